#include "formats/hf_config.h"

#include "base/error.h"
#include "base/file.h"
#include "formats/foreign.h"
#include "formats/json.h"

#include <limits.h>
#include <math.h>
#include <string.h>

/* Far above any GPT-2, and low enough that the products of two of them that the engine forms in
 * an int (3 * n_embd, n_head * head size) fit. */
enum {
    MAX_CONFIG = 16 << 20, /* bytes */
    MAX_LAYERS = 4096,
    MAX_WIDTH = 1 << 17,
    MAX_INNER = 1 << 20,
    MAX_POSITIONS = 1 << 20,
    MAX_VOCAB = 1 << 24
};

/* The object under the parser's eyes; the readers below name it and the key in their errors. */
typedef struct source {
    const json_t *json;
    const char *origin;
    bml_error *err;
} source;

static bml_status wrong_type(const source *s, const char *key, const json_t *value,
                             const char *right)
{
    return bml_fail(s->err, BML_ERR_FORMAT, "%s: \"%s\" is %s, not %s", s->origin, key,
                    bml_json_type_name(value), right);
}

/* The value of KEY, or of ALIAS (which may be NULL); NULL if there is neither. */
static const json_t *get(const source *s, const char **key, const char *alias)
{
    const json_t *value = json_object_get(s->json, *key);
    if (value || !alias)
        return value;
    value = json_object_get(s->json, alias);
    if (value)
        *key = alias;
    return value;
}

/* A size from 1 to MAX; *NUMBER keeps its default when the key is missing. */
static bml_status read_size(const source *s, const char *key, const char *alias, int max,
                            int *number)
{
    const json_t *value = get(s, &key, alias);
    if (!value)
        return BML_OK;
    if (!json_is_integer(value))
        return wrong_type(s, key, value, "an integer");
    json_int_t n = json_integer_value(value);
    if (n < 1 || n > max)
        return bml_fail(s->err, BML_ERR_FORMAT, "%s: \"%s\" is %lld, not from 1 to %d", s->origin,
                        key, (long long)n, max);
    *number = (int)n;
    return BML_OK;
}

static bml_status read_bool(const source *s, const char *key, bool *flag)
{
    const json_t *value = json_object_get(s->json, key);
    if (!value)
        return BML_OK;
    if (!json_is_boolean(value))
        return wrong_type(s, key, value, "true or false");
    *flag = json_is_true(value);
    return BML_OK;
}

/* A token id, null, or a list of ids, of which the first counts. Negative ids mean none. */
static bml_status read_token(const source *s, const char *key, int *token)
{
    const json_t *value = json_object_get(s->json, key);
    if (!value)
        return BML_OK;
    if (json_is_array(value)) {
        size_t index;
        json_t *item;
        json_array_foreach(value, index, item)
        {
            if (!json_is_integer(item))
                return wrong_type(s, key, item, "a list of integers");
        }
        value = json_array_get(value, 0);
    }
    *token = -1;
    if (!value || json_is_null(value))
        return BML_OK;
    if (!json_is_integer(value))
        return wrong_type(s, key, value, "an integer, a list of integers or null");
    json_int_t id = json_integer_value(value);
    if (id > INT_MAX)
        return bml_fail(s->err, BML_ERR_FORMAT, "%s: \"%s\" is %lld, which is no token id",
                        s->origin, key, (long long)id);
    *token = id < 0 ? -1 : (int)id;
    return BML_OK;
}

static bml_status read_more_eos(const source *s, int vocab_size, int more[BML_MOST_EOS - 1])
{
    const json_t *list = json_object_get(s->json, "eos_token_id");
    for (int i = 0; i < BML_MOST_EOS - 1; i++)
        more[i] = -1;
    if (!json_is_array(list))
        return BML_OK;
    size_t n = json_array_size(list);
    if (n > BML_MOST_EOS)
        return bml_fail(s->err, BML_ERR_UNSUPPORTED,
                        "%s: \"eos_token_id\" lists %zu ids; at most %d can end a text", s->origin,
                        n, BML_MOST_EOS);
    for (size_t i = 1; i < n; i++) {
        json_int_t id = json_integer_value(json_array_get(list, i));
        more[i - 1] = id < 0 || id >= vocab_size ? -1 : (int)id;
    }
    return BML_OK;
}

static bml_status read_epsilon(const source *s, float *epsilon)
{
    const char *key = "layer_norm_epsilon";
    const json_t *value = json_object_get(s->json, key);
    if (!value)
        return BML_OK;
    if (!json_is_number(value))
        return wrong_type(s, key, value, "a number");
    *epsilon = (float)json_number_value(value);
    if (isfinite(*epsilon) && *epsilon > 0)
        return BML_OK;
    return bml_fail(s->err, BML_ERR_FORMAT,
                    "%s: \"%s\" is %g, not a positive float32 number such as 1e-5", s->origin, key,
                    json_number_value(value));
}

static bml_status read_activation(const source *s, bml_activation *activation)
{
    static const struct {
        const char *name;
        bml_activation activation;
    } known[] = {
        {"gelu_new", BML_ACT_GELU_TANH},
        {"gelu_fast", BML_ACT_GELU_TANH},
        {"gelu_pytorch_tanh", BML_ACT_GELU_TANH},
        {"gelu", BML_ACT_GELU_ERF},
        {"relu", BML_ACT_RELU},
    };
    const char *key = "activation_function";
    const json_t *value = json_object_get(s->json, key);
    if (!value)
        return BML_OK;
    const char *name = json_string_value(value);
    if (!name)
        return wrong_type(s, key, value, "a string");
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        if (strcmp(known[i].name, name) == 0) {
            *activation = known[i].activation;
            return BML_OK;
        }
    }
    return bml_fail(s->err, BML_ERR_UNSUPPORTED,
                    "%s: \"%s\" \"%s\" is not supported; supported are gelu_new, gelu_fast, "
                    "gelu_pytorch_tanh, gelu and relu",
                    s->origin, key, name);
}

static bml_status refuse_architecture(const source *s, const char *name)
{
    return bml_fail(s->err, BML_ERR_UNSUPPORTED,
                    "%s: the model is a %s; only GPT-2 (GPT2LMHeadModel) can be run", s->origin,
                    name);
}

/* Only GPT-2: by "architectures" where it is given, and never against "model_type". */
static bml_status check_architecture(const source *s)
{
    const json_t *type = json_object_get(s->json, "model_type");
    const json_t *names = json_object_get(s->json, "architectures");
    if (type && !json_is_null(type) && !json_is_string(type))
        return wrong_type(s, "model_type", type, "a string");
    if (names && !json_is_null(names) && !json_is_array(names))
        return wrong_type(s, "architectures", names, "a list of strings");
    const char *type_name = json_string_value(type), *first = NULL;
    bool found = false;
    size_t index;
    json_t *item;
    json_array_foreach(names, index, item)
    {
        const char *name = json_string_value(item);
        if (!name)
            return wrong_type(s, "architectures", item, "a list of strings");
        if (!first)
            first = name;
        found = found || strcmp(name, "GPT2LMHeadModel") == 0 || strcmp(name, "GPT2Model") == 0;
    }
    if (first && !found)
        return refuse_architecture(s, first);
    if (type_name && strcmp(type_name, "gpt2") != 0)
        return refuse_architecture(s, type_name);
    if (first || type_name)
        return BML_OK;
    return bml_fail(s->err, BML_ERR_UNSUPPORTED,
                    "%s: neither \"architectures\" nor \"model_type\" says what the model is; only "
                    "GPT-2 (\"model_type\": \"gpt2\") can be run",
                    s->origin);
}

static bml_status check_quantization(const source *s)
{
    const json_t *value = json_object_get(s->json, "quantization_config");
    if (!value || json_is_null(value))
        return BML_OK;
    const char *method = json_string_value(json_object_get(value, "quant_method"));
    return bml_fail(s->err, BML_ERR_UNSUPPORTED,
                    "%s: the weights are quantised (\"quantization_config\", method %s), which is "
                    "not supported; use the checkpoint it was made from",
                    s->origin, method ? method : "not named");
}

static bml_status check_cross_attention(const source *s)
{
    bool cross = false;
    bml_status status = read_bool(s, "add_cross_attention", &cross);
    if (!status && cross)
        status = bml_fail(s->err, BML_ERR_UNSUPPORTED,
                          "%s: \"add_cross_attention\" is true, which is not supported; only "
                          "decoders that stand alone can be run",
                          s->origin);
    return status;
}

static bml_status read_sizes(const source *s, bml_hf_config *c)
{
    /* The second names are those of transformers' attribute_map. */
    bml_status status = read_size(s, "n_layer", "num_hidden_layers", MAX_LAYERS, &c->n_layer);
    if (!status)
        status = read_size(s, "n_head", "num_attention_heads", MAX_WIDTH, &c->n_head);
    if (!status)
        status = read_size(s, "n_embd", "hidden_size", MAX_WIDTH, &c->n_embd);
    if (!status)
        status = read_size(s, "vocab_size", NULL, MAX_VOCAB, &c->vocab_size);
    /* n_ctx is the old name of n_positions. */
    if (!status)
        status = read_size(s, "n_ctx", NULL, MAX_POSITIONS, &c->n_positions);
    if (!status)
        status =
            read_size(s, "n_positions", "max_position_embeddings", MAX_POSITIONS, &c->n_positions);
    if (status)
        return status;
    if (c->n_embd % c->n_head)
        return bml_fail(s->err, BML_ERR_FORMAT,
                        "%s: \"n_embd\" %d is not a multiple of \"n_head\" %d", s->origin,
                        c->n_embd, c->n_head);
    c->n_inner = 4 * c->n_embd;
    if (json_is_null(json_object_get(s->json, "n_inner")))
        return BML_OK;
    return read_size(s, "n_inner", NULL, MAX_INNER, &c->n_inner);
}

static bml_status read_flags(const source *s, bml_hf_config *c)
{
    bml_status status = read_bool(s, "scale_attn_weights", &c->scale_attn_weights);
    if (!status)
        status =
            read_bool(s, "scale_attn_by_inverse_layer_idx", &c->scale_attn_by_inverse_layer_idx);
    if (!status)
        status = read_bool(s, "tie_word_embeddings", &c->tie_word_embeddings);
    if (!status) {
        /* Scores are float32 here anyway, so that it changes nothing; only its type matters. */
        bool upcast;
        status = read_bool(s, "reorder_and_upcast_attn", &upcast);
    }
    return status;
}

static bml_status read_config(const source *s, bml_hf_config *c)
{
    bml_status status = check_architecture(s);
    if (!status)
        status = check_quantization(s);
    if (!status)
        status = check_cross_attention(s);
    if (!status)
        status = read_sizes(s, c);
    if (!status)
        status = read_flags(s, c);
    if (!status)
        status = read_epsilon(s, &c->layer_norm_epsilon);
    if (!status)
        status = read_activation(s, &c->activation);
    if (!status)
        status = read_token(s, "bos_token_id", &c->bos_token_id);
    if (!status)
        status = read_token(s, "eos_token_id", &c->eos_token_id);
    if (!status)
        status = read_more_eos(s, c->vocab_size, c->more_eos);
    /* An id that no logit stands for, such as GPT-2's default in a smaller model, is none. */
    if (c->bos_token_id >= c->vocab_size)
        c->bos_token_id = -1;
    if (c->eos_token_id >= c->vocab_size)
        c->eos_token_id = -1;
    return status;
}

bml_status bml_hf_config_parse(const char *text, size_t length, const char *origin,
                               bml_hf_config *config, bml_error *err)
{
    json_t *json;
    bml_status status = bml_refuse_foreign(text, length, origin, err);
    if (!status)
        status = bml_json_parse_object(text, length, 0, origin, &json, err);
    if (status)
        return status;
    bml_hf_config c = {
        .n_layer = 12,
        .n_head = 12,
        .n_embd = 768,
        .n_positions = 1024,
        .vocab_size = 50257,
        .layer_norm_epsilon = 1e-5f,
        .activation = BML_ACT_GELU_TANH,
        .scale_attn_weights = true,
        .tie_word_embeddings = true,
        .bos_token_id = 50256,
        .eos_token_id = 50256,
    };
    status = read_config(&(source){json, origin, err}, &c);
    json_decref(json);
    if (!status)
        *config = c;
    return status;
}

bool bml_is_eos(const bml_hf_config *config, int32_t token)
{
    bool is = token == config->eos_token_id;
    for (int i = 0; i < BML_MOST_EOS - 1; i++)
        is |= token == config->more_eos[i];
    return is && token >= 0;
}

bml_status bml_hf_config_read(const char *path, bml_hf_config *config, bml_error *err)
{
    bml_file file;
    bml_status status = bml_file_read(path, MAX_CONFIG, &file, err);
    if (status)
        return status;
    status = bml_hf_config_parse((const char *)file.data, file.size, path, config, err);
    bml_file_close(&file);
    return status;
}
