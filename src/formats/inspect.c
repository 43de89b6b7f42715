/* bml_inspect: what a checkpoint holds, as one JSON object. */
#include "base/error.h"
#include "base/file.h"
#include "base/memory.h"
#include "formats/checkpoint.h"
#include "formats/checkpoint_files.h"
#include "formats/json.h"
#include "formats/names.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

/* What is known of the checkpoint while its report is written. */
typedef struct report {
    json_t *json;
    const bml_checkpoint *checkpoint; /* NULL if it cannot be loaded */
    const bml_safetensors *st;
    const char *layout; /* how matrices are stored, "[in, out]" or "[out, in]"; NULL: unknown */
    int n_layer;
    bool has_wte;
    bool failed; /* out of memory on the way */
} report;

/* Adds VALUE, which is taken over, and remembers a failure. */
static void put(report *r, json_t *object, const char *key, json_t *value)
{
    if (json_object_set_new(object, key, value) != 0)
        r->failed = true;
}

static void append(report *r, json_t *array, json_t *value)
{
    if (json_array_append_new(array, value) != 0)
        r->failed = true;
}

/* TEXT as a JSON string; a path need not be UTF-8, and then its odd bytes become "?". */
static json_t *text_json(const char *text)
{
    json_t *json = json_string(text);
    if (json)
        return json;
    char *copy = bml_strndup(text, strlen(text));
    if (!copy)
        return NULL;
    for (char *p = copy; *p; p++)
        if ((unsigned char)*p >= 0x80)
            *p = '?';
    json = json_string(copy);
    free(copy);
    return json;
}

/* A string made by bml_format, which is taken over. */
static json_t *taken_text(char *text)
{
    json_t *json = text ? text_json(text) : NULL;
    free(text);
    return json;
}

static json_t *token_json(int id)
{
    return id < 0 ? json_null() : json_integer(id);
}

/* ---- config ---------------------------------------------------------------------------------*/

static json_t *config_json(report *r, const bml_hf_config *c)
{
    static const char *const activations[] = {
        [BML_ACT_GELU_TANH] = "gelu_new", [BML_ACT_GELU_ERF] = "gelu", [BML_ACT_RELU] = "relu"};
    json_t *json = json_object();
    put(r, json, "n_layer", json_integer(c->n_layer));
    put(r, json, "n_head", json_integer(c->n_head));
    put(r, json, "n_embd", json_integer(c->n_embd));
    put(r, json, "n_inner", json_integer(c->n_inner));
    put(r, json, "n_positions", json_integer(c->n_positions));
    put(r, json, "vocab_size", json_integer(c->vocab_size));
    put(r, json, "layer_norm_epsilon", json_real((double)c->layer_norm_epsilon));
    put(r, json, "activation_function", json_string(activations[c->activation]));
    put(r, json, "scale_attn_weights", json_boolean(c->scale_attn_weights));
    put(r, json, "scale_attn_by_inverse_layer_idx",
        json_boolean(c->scale_attn_by_inverse_layer_idx));
    put(r, json, "tie_word_embeddings", json_boolean(c->tie_word_embeddings));
    put(r, json, "bos_token_id", token_json(c->bos_token_id));
    put(r, json, "eos_token_id", token_json(c->eos_token_id));
    return json;
}

/* A config that cannot be run, as it stands in the file; null if it is no JSON. */
static json_t *raw_config(const char *path)
{
    bml_file file;
    if (bml_file_read(path, 16 << 20, &file, NULL))
        return json_null();
    json_t *json = json_loadb((const char *)file.data, file.size, 0, NULL);
    bml_file_close(&file);
    return json ? json : json_null();
}

static void put_config(report *r, const char *path)
{
    bml_hf_config config;
    if (bml_hf_config_read(path, &config, NULL)) {
        put(r, r->json, "config", raw_config(path));
        return;
    }
    r->n_layer = config.n_layer;
    put(r, r->json, "config", config_json(r, &config));
}

/* ---- tensors --------------------------------------------------------------------------------*/

/* Any c_attn tells how matrices are stored: its sides are in the ratio 1 to 3. */
static const char *layout_of(const bml_tensor *t)
{
    if (t->n_dims == 2 && t->shape[1] % 3 == 0 && t->shape[1] / 3 == t->shape[0])
        return "[in, out]";
    if (t->n_dims == 2 && t->shape[0] % 3 == 0 && t->shape[0] / 3 == t->shape[1])
        return "[out, in]";
    return NULL;
}

/* What the description of one tensor depends on in others. */
static void look_ahead(report *r)
{
    for (size_t i = 0; i < bml_safetensors_count(r->st); i++) {
        const bml_tensor *t = bml_safetensors_at(r->st, i);
        bml_tensor_name name = bml_tensor_name_read(t->name, INT_MAX);
        r->has_wte |= name.used && name.role == BML_ROLE_WTE;
        if (name.used && name.role == BML_ROLE_C_ATTN_WEIGHT && !r->layout)
            r->layout = layout_of(t);
    }
}

static bool is_linear_weight(bml_role role)
{
    return role == BML_ROLE_C_ATTN_WEIGHT || role == BML_ROLE_C_PROJ_WEIGHT ||
           role == BML_ROLE_C_FC_WEIGHT || role == BML_ROLE_MLP_C_PROJ_WEIGHT;
}

static json_t *use_json(const report *r, bml_tensor_name name)
{
    const char *role = bml_role_name(name.role);
    if (name.role == BML_ROLE_LM_HEAD && !r->has_wte)
        return json_string("lm_head.weight, and as wte.weight, which is missing");
    if (name.role < BML_FIRST_LAYER_ROLE)
        return json_string(role);
    bool stored = r->layout && is_linear_weight(name.role);
    return taken_text(bml_format("%s of layer %d%s%s", role, name.layer, stored ? ", stored " : "",
                                 stored ? r->layout : ""));
}

/* A head that is there but equals wte is not used. */
static bool is_spare_head(const report *r, bml_tensor_name name)
{
    return name.role == BML_ROLE_LM_HEAD && r->checkpoint && r->checkpoint->tied && r->has_wte;
}

static json_t *tensor_json(report *r, const bml_tensor *t, bool *used)
{
    bml_tensor_name name = bml_tensor_name_read(t->name, r->n_layer);
    if (name.used && is_spare_head(r, name)) {
        name.used = false;
        name.ignored = "the same as wte.weight, to which the head is tied";
    }
    *used = name.used;
    const char *slash = strrchr(t->file, '/');
    json_t *json = json_object(), *shape = json_array();
    for (int i = 0; i < t->n_dims; i++)
        append(r, shape, json_integer(t->shape[i]));
    put(r, json, "name", json_string(t->name));
    put(r, json, "dtype", json_string(t->dtype));
    put(r, json, "shape", shape);
    put(r, json, "bytes", json_integer((json_int_t)t->bytes));
    put(r, json, "file", text_json(slash ? slash + 1 : t->file));
    if (name.used)
        put(r, json, "use", use_json(r, name));
    else
        put(r, json, "ignored", json_string(name.ignored));
    return json;
}

static void put_tensors(report *r)
{
    json_t *list = json_array(), *totals = json_object();
    uint64_t bytes[2] = {0}; /* ignored, used */
    size_t counts[2] = {0};
    for (size_t i = 0; i < bml_safetensors_count(r->st); i++) {
        const bml_tensor *t = bml_safetensors_at(r->st, i);
        bool used;
        append(r, list, tensor_json(r, t, &used));
        bytes[used] += t->bytes;
        counts[used]++;
    }
    put(r, r->json, "layout", r->layout ? json_string(r->layout) : json_null());
    put(r, r->json, "tied", r->checkpoint ? json_boolean(r->checkpoint->tied) : json_null());
    put(r, r->json, "tensors", list);
    put(r, totals, "tensors", json_integer((json_int_t)(counts[0] + counts[1])));
    put(r, totals, "bytes", json_integer((json_int_t)(bytes[0] + bytes[1])));
    put(r, totals, "used_tensors", json_integer((json_int_t)counts[true]));
    put(r, totals, "used_bytes", json_integer((json_int_t)bytes[true]));
    put(r, totals, "ignored_tensors", json_integer((json_int_t)counts[false]));
    put(r, totals, "ignored_bytes", json_integer((json_int_t)bytes[false]));
    put(r, totals, "params",
        r->checkpoint ? json_integer((json_int_t)r->checkpoint->n_params) : json_null());
    put(r, r->json, "totals", totals);
}

/* ---- the report -----------------------------------------------------------------------------*/

/* The tokenizer's files that lie in DIRECTORY. */
static void put_tokenizer(report *r, const char *directory)
{
    static const char *const names[] = {
        "tokenizer.json",          "vocab.json",           "merges.txt", "added_tokens.json",
        "special_tokens_map.json", "tokenizer_config.json"};
    json_t *list = json_array();
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char *path = bml_path_join(directory, names[i]);
        if (!path)
            r->failed = true;
        else if (bml_path_exists(path))
            append(r, list, json_string(names[i]));
        free(path);
    }
    put(r, r->json, "tokenizer", list);
}

/* PROBLEM is why the checkpoint cannot be loaded, or NULL. */
static bml_status write_report(const char *path, const bml_checkpoint_files *files,
                               const bml_checkpoint *checkpoint, const bml_safetensors *st,
                               const char *problem, char **json, bml_error *err)
{
    report r = {.json = json_object(), .checkpoint = checkpoint, .st = st, .n_layer = INT_MAX};
    look_ahead(&r);
    put(&r, r.json, "path", text_json(path));
    put(&r, r.json, "loadable", json_boolean(checkpoint != NULL));
    put(&r, r.json, "problem", problem ? text_json(problem) : json_null());
    put_config(&r, files->config);
    put_tensors(&r);
    put_tokenizer(&r, files->directory);
    /* Seven digits are what a float32 epsilon has. */
    char *text = r.failed ? NULL : json_dumps(r.json, JSON_REAL_PRECISION(7));
    json_decref(r.json);
    if (!text)
        return bml_fail(err, BML_ERR_MEMORY, "%s: out of memory while describing it", path);
    *json = text;
    return BML_OK;
}

static bml_status inspect(const char *path, char **json, bml_error *err)
{
    bml_checkpoint_files files;
    bml_status status = bml_checkpoint_files_find(path, &files, err);
    if (status)
        return status;
    bml_checkpoint *checkpoint = NULL;
    bml_safetensors *st = NULL;
    bml_error problem = {0};
    bml_status loading = bml_checkpoint_open(path, &checkpoint, &problem);
    if (loading == BML_ERR_MEMORY)
        status = bml_fail(err, loading, "%s", problem.message);
    else if (loading)
        /* It cannot be run, but it can be described if the container is whole. */
        status = files.weights ? bml_safetensors_open(files.weights, &st, err)
                               : bml_checkpoint_no_weights(path, err);
    if (!status)
        status = write_report(path, &files, checkpoint, checkpoint ? checkpoint->files : st,
                              loading ? problem.message : NULL, json, err);
    bml_safetensors_close(st);
    bml_checkpoint_close(checkpoint);
    bml_checkpoint_files_clear(&files);
    return status;
}

bml_status bml_inspect(const char *name, char **json, bml_error *err)
{
    char *path;
    bml_status status = bml_model_find(name, &path, err);
    if (status)
        return status;
    status = inspect(path, json, err);
    free(path);
    return status;
}
