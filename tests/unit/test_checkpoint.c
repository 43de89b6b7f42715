/* Names, layouts, dtypes and heads of checkpoints; and what is refused. */
#include "containers.h"

#include "base/dtype.h"
#include "formats/checkpoint.h"
#include "formats/json.h"
#include "formats/names.h"

enum { LAYERS = 2, WIDTH = 4, INNER = 6, VOCAB = 5, POSITIONS = 3 };

static const bml_hf_config config = {.n_layer = LAYERS,
                                     .n_head = 2,
                                     .n_embd = WIDTH,
                                     .n_inner = INNER,
                                     .n_positions = POSITIONS,
                                     .vocab_size = VOCAB,
                                     .layer_norm_epsilon = 1e-5f,
                                     .tie_word_embeddings = true,
                                     .bos_token_id = -1,
                                     .eos_token_id = -1};

static const char config_json[] =
    "{\"model_type\":\"gpt2\",\"n_layer\":2,\"n_head\":2,\"n_embd\":4,\"n_inner\":6,"
    "\"n_positions\":3,\"vocab_size\":5}";

/* How a checkpoint under test is written. */
typedef struct variant {
    const char *prefix, *dtype;
    bool out_in, no_bias;
    const char *drop;      /* a tensor to leave out, by its name without the prefix */
    const char *replace;   /* a tensor to write with another dtype or shape */
    const char *new_dtype; /* NULL: as before */
    const char *new_shape; /* NULL: as before */
    size_t new_bytes;
    const char *extra; /* one more tensor */
    const char *extra_shape;
    size_t misalign;
} variant;

static size_t element_size(const char *dtype)
{
    return strcmp(dtype, "F64") == 0 ? 8 : strcmp(dtype, "F32") == 0 ? 4 : 2;
}

/* Value i of the n-th tensor, exact in every dtype. */
static float value_of(size_t n, size_t i)
{
    return (float)((n * 7 + i) % 64) * 0.25f - 3;
}

static void store(const char *dtype, float value, char *out)
{
    double wide = value;
    uint16_t f16 = bml_f32_to_f16(value), bf16 = bml_f32_to_bf16(value);
    if (strcmp(dtype, "F64") == 0)
        memcpy(out, &wide, 8);
    else if (strcmp(dtype, "F32") == 0)
        memcpy(out, &value, 4);
    else
        memcpy(out, strcmp(dtype, "F16") == 0 ? &f16 : &bf16, 2);
}

static void add_part(container_builder *b, const variant *v, const char *name, int rows, int cols,
                     size_t *n)
{
    (*n)++;
    if (v->drop && strcmp(v->drop, name) == 0)
        return;
    bool replaced = v->replace && strcmp(v->replace, name) == 0;
    const char *dtype = replaced && v->new_dtype ? v->new_dtype : v->dtype;
    char full[128], shape[64];
    snprintf(full, sizeof full, "%s%s", v->prefix, name);
    snprintf(shape, sizeof shape, cols ? "[%d,%d]" : "[%d]", rows, cols);
    size_t count = (size_t)rows * (size_t)(cols ? cols : 1);
    if (replaced) {
        add_tensor(b, full, dtype, v->new_shape ? v->new_shape : shape, v->new_bytes);
        return;
    }
    char *data = add_tensor(b, full, dtype, shape, count * element_size(dtype));
    for (size_t i = 0; i < count; i++)
        store(dtype, value_of(*n, i), data + i * element_size(dtype));
}

static void add_matrix(container_builder *b, const variant *v, const char *name, int in, int out,
                       size_t *n)
{
    add_part(b, v, name, v->out_in ? out : in, v->out_in ? in : out, n);
}

static void add_layer(container_builder *b, const variant *v, int layer, size_t *n)
{
    static const struct {
        const char *name;
        int in, out; /* in is 0 for a vector */
    } parts[] = {
        {"ln_1.weight", 0, WIDTH},
        {"ln_1.bias", 0, WIDTH},
        {"attn.c_attn.weight", WIDTH, 3 * WIDTH},
        {"attn.c_attn.bias", 0, 3 * WIDTH},
        {"attn.c_proj.weight", WIDTH, WIDTH},
        {"attn.c_proj.bias", 0, WIDTH},
        {"ln_2.weight", 0, WIDTH},
        {"ln_2.bias", 0, WIDTH},
        {"mlp.c_fc.weight", WIDTH, INNER},
        {"mlp.c_fc.bias", 0, INNER},
        {"mlp.c_proj.weight", INNER, WIDTH},
        {"mlp.c_proj.bias", 0, WIDTH},
    };
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        if (v->no_bias && strstr(parts[i].name, "bias"))
            continue;
        char name[64];
        snprintf(name, sizeof name, "h.%d.%s", layer, parts[i].name);
        if (parts[i].in)
            add_matrix(b, v, name, parts[i].in, parts[i].out, n);
        else
            add_part(b, v, name, parts[i].out, 0, n);
    }
}

static bml_bytes write_variant(const variant *v)
{
    container_builder b = {0};
    size_t n = 0;
    add_part(&b, v, "wte.weight", VOCAB, WIDTH, &n);
    add_part(&b, v, "wpe.weight", POSITIONS, WIDTH, &n);
    for (int layer = 0; layer < LAYERS; layer++)
        add_layer(&b, v, layer, &n);
    add_part(&b, v, "ln_f.weight", WIDTH, 0, &n);
    if (!v->no_bias)
        add_part(&b, v, "ln_f.bias", WIDTH, 0, &n);
    if (v->extra)
        add_tensor(&b, v->extra, "U8", v->extra_shape, 1);
    return finish_container(&b, v->misalign);
}

static bml_status map(bml_bytes file, const bml_hf_config *c, bml_checkpoint **checkpoint,
                      bml_error *err)
{
    bml_safetensors *st;
    bml_status status = bml_safetensors_parse(file.data, file.length, "m.st", &st, err);
    if (status)
        fail_msg("the test's own container: %s", err->message);
    return bml_checkpoint_map(c, st, "m.st", checkpoint, err);
}

static float matrix_at(const bml_matrix *m, size_t i)
{
    uint16_t half;
    float full;
    if (m->dtype == BML_F32) {
        memcpy(&full, (const char *)m->data + 4 * i, 4);
        return full;
    }
    memcpy(&half, (const char *)m->data + 2 * i, 2);
    return m->dtype == BML_F16 ? bml_f16_to_f32(half) : bml_bf16_to_f32(half);
}

static void check_matrix(const char *what, const bml_matrix *m, const char *dtype, int rows,
                         int cols, size_t n)
{
    bml_dtype right = strcmp(dtype, "F16") == 0    ? BML_F16
                      : strcmp(dtype, "BF16") == 0 ? BML_BF16
                                                   : BML_F32;
    if (m->rows != rows || m->cols != cols || m->dtype != right ||
        (uintptr_t)m->data % bml_dtype_size(right))
        fail_msg("%s: [%d, %d] of %d at %p", what, m->rows, m->cols, (int)m->dtype, m->data);
    for (size_t i = 0; i < (size_t)rows * (size_t)cols; i++)
        if (matrix_at(m, i) != value_of(n, i))
            fail_msg("%s: element %zu is %g", what, i, (double)matrix_at(m, i));
}

static void check_vector(const char *what, const float *vector, int count, size_t n)
{
    assert_non_null(vector);
    assert_int_equal((uintptr_t)vector % sizeof(float), 0);
    for (int i = 0; i < count; i++)
        if (vector[i] != value_of(n, (size_t)i))
            fail_msg("%s: element %d is %g", what, i, (double)vector[i]);
}

static void check_linear(const variant *v, const bml_linear *l, int in, int out, size_t *n)
{
    assert_int_equal(l->out_in, v->out_in);
    check_matrix("matrix", &l->w, v->dtype, v->out_in ? out : in, v->out_in ? in : out, ++*n);
    if (v->no_bias)
        assert_null(l->bias);
    else
        check_vector("bias", l->bias, out, ++*n);
}

static void check_norm(const variant *v, const bml_norm *norm, size_t *n)
{
    check_vector("norm", norm->weight, WIDTH, ++*n);
    if (v->no_bias)
        assert_null(norm->bias);
    else
        check_vector("norm bias", norm->bias, WIDTH, ++*n);
}

static void check_variant(const variant *v)
{
    bml_bytes file = write_variant(v);
    bml_checkpoint *c;
    bml_error err;
    if (map(file, &config, &c, &err))
        fail_msg("%s %s: %s", v->prefix, v->dtype, err.message);
    size_t n = 0;
    check_matrix("wte", &c->wte, v->dtype, VOCAB, WIDTH, ++n);
    check_matrix("wpe", &c->wpe, v->dtype, POSITIONS, WIDTH, ++n);
    for (int i = 0; i < LAYERS; i++) {
        const bml_layer *layer = &c->layers[i];
        check_norm(v, &layer->ln_1, &n);
        check_linear(v, &layer->c_attn, WIDTH, 3 * WIDTH, &n);
        check_linear(v, &layer->c_proj, WIDTH, WIDTH, &n);
        check_norm(v, &layer->ln_2, &n);
        check_linear(v, &layer->c_fc, WIDTH, INNER, &n);
        check_linear(v, &layer->mlp_c_proj, INNER, WIDTH, &n);
    }
    check_norm(v, &c->ln_f, &n);
    assert_true(c->tied);
    assert_ptr_equal(c->lm_head.data, c->wte.data);
    size_t weights = WIDTH * (VOCAB + POSITIONS + 1) +
                     LAYERS * (WIDTH * (3 * WIDTH + WIDTH + 2 * INNER) + 2 * WIDTH);
    size_t biases = WIDTH + LAYERS * (3 * WIDTH + WIDTH + WIDTH + INNER + 2 * WIDTH);
    size_t count = weights + (v->no_bias ? 0 : biases);
    assert_int_equal(c->n_params, count);
    assert_int_equal(c->file_bytes, count * element_size(v->dtype));
    /* Aligned matrices of a type that can be used as it is are not copied. */
    bool in_file = (const char *)c->wte.data >= file.data &&
                   (const char *)c->wte.data < file.data + file.length;
    bool usable = strcmp(v->dtype, "F64") != 0 && v->misalign % element_size(v->dtype) == 0;
    assert_int_equal(in_file, usable);
    bml_checkpoint_close(c);
    free(file.data);
}

static void variants(void **state)
{
    (void)state;
    static const char *const prefixes[] = {"",
                                           "transformer.",
                                           "_orig_mod.",
                                           "_orig_mod.transformer.",
                                           "transformer._orig_mod.",
                                           "module.transformer.",
                                           "module._orig_mod.transformer.",
                                           "_orig_mod.module.transformer.",
                                           "model.transformer."};
    static const char *const dtypes[] = {"F32", "F16", "BF16", "F64"};
    for (size_t p = 0; p < sizeof prefixes / sizeof *prefixes; p++)
        for (size_t d = 0; d < 4; d++)
            for (int layout = 0; layout < 2; layout++)
                for (int bias = 0; bias < 2; bias++)
                    for (size_t misalign = 0; misalign < 4; misalign++)
                        check_variant(&(variant){.prefix = prefixes[p],
                                                 .dtype = dtypes[d],
                                                 .out_in = layout,
                                                 .no_bias = bias,
                                                 .misalign = misalign});
}

static void ignored_tensors(void **state)
{
    (void)state;
    static const char *const names[] = {
        "h.0.attn.bias",          "transformer.h.1.attn.masked_bias", "_orig_mod.h.0.attn.bias",
        "h.2.attn.c_attn.weight", "h.00.attn.c_attn.weight",          "score.weight",
        "h.x.ln_1.weight",        "h.0.crossattention.bias",          "h.12345678.ln_1.weight",
        "something else",
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        bml_bytes file = write_variant(&(variant){
            .prefix = "transformer.", .dtype = "F32", .extra = names[i], .extra_shape = "[1,1]"});
        bml_checkpoint *c;
        bml_error err = {0};
        if (map(file, &config, &c, &err))
            fail_msg("%s: %s", names[i], err.message);
        bml_checkpoint_close(c);
        free(file.data);
    }
}

static void names(void **state)
{
    (void)state;
    bml_tensor_name name = bml_tensor_name_read("transformer.h.11.mlp.c_proj.bias", 12);
    assert_true(name.used);
    assert_int_equal(name.role, BML_ROLE_MLP_C_PROJ_BIAS);
    assert_int_equal(name.layer, 11);
    assert_true(bml_tensor_name_read("h.0.attn.c_attn.bias", 1).used);
    assert_string_equal(bml_tensor_name_read("h.0.attn.bias", 1).ignored,
                        "causal mask buffer, not a weight");
    assert_non_null(strstr(bml_tensor_name_read("h.12.ln_1.bias", 12).ignored, "n_layer"));
    assert_false(bml_tensor_name_read("h.", 12).used);
    assert_false(bml_tensor_name_read("h.3", 12).used);
    assert_false(bml_tensor_name_read("h.3.", 12).used);
    assert_false(bml_tensor_name_read("", 12).used);
    assert_false(bml_tensor_name_read("transformer.", 12).used);
    for (bml_role role = 0; role < BML_N_ROLES; role++) {
        char text[64];
        snprintf(text, sizeof text, "%s%s", role < BML_FIRST_LAYER_ROLE ? "" : "h.7.",
                 bml_role_name(role));
        name = bml_tensor_name_read(text, 8);
        assert_true(name.used);
        assert_int_equal(name.role, role);
    }
}

static void refused(void **state)
{
    (void)state;
    static const struct {
        variant v;
        bml_status status;
        const char *error;
    } cases[] = {
        {{.drop = "wpe.weight"}, BML_ERR_FORMAT, "m.st: tensor \"wpe.weight\" is missing"},
        {{.drop = "wte.weight"},
         BML_ERR_FORMAT,
         "\"transformer.wte.weight\", and with \"_orig_mod.\""},
        {{.drop = "ln_f.weight"}, BML_ERR_FORMAT, "\"ln_f.weight\" is missing"},
        {{.drop = "h.0.attn.c_attn.weight"},
         BML_ERR_FORMAT,
         "\"h.0.attn.c_attn.weight\" is missing"},
        {{.drop = "h.1.attn.c_attn.weight"},
         BML_ERR_FORMAT,
         "\"h.1.attn.c_attn.weight\" is missing"},
        {{.drop = "h.1.mlp.c_proj.weight"}, BML_ERR_FORMAT, "\"h.1.mlp.c_proj.weight\" is missing"},
        {{.drop = "h.1.ln_2.weight"}, BML_ERR_FORMAT, "\"h.1.ln_2.weight\" is missing"},
        {{.replace = "wte.weight", .new_shape = "[6,4]", .new_bytes = 96},
         BML_ERR_FORMAT,
         "has shape [6, 4]; expected [5, 4], from config.json's vocab_size"},
        {{.replace = "wte.weight", .new_shape = "[20]", .new_bytes = 80},
         BML_ERR_FORMAT,
         "has shape [20]; expected [5, 4]"},
        {{.replace = "wpe.weight", .new_shape = "[4,4]", .new_bytes = 64},
         BML_ERR_FORMAT,
         "has shape [4, 4]; expected [3, 4], from config.json's n_positions"},
        {{.replace = "h.0.attn.c_attn.weight", .new_shape = "[4,11]", .new_bytes = 176},
         BML_ERR_FORMAT,
         "has shape [4, 11]; expected [4, 12] (or the transpose)"},
        {{.replace = "h.1.attn.c_attn.weight", .new_shape = "[12,4]", .new_bytes = 192},
         BML_ERR_FORMAT,
         "has shape [12, 4]; expected [4, 12], stored [in, out]"},
        {{.replace = "h.0.mlp.c_fc.weight", .new_shape = "[6,4]", .new_bytes = 96},
         BML_ERR_FORMAT,
         "has shape [6, 4]; expected [4, 6]"},
        {{.replace = "h.0.mlp.c_fc.weight", .new_shape = "[4,6]", .new_bytes = 96, .out_in = true},
         BML_ERR_FORMAT,
         "has shape [4, 6]; expected [6, 4], stored [out, in]"},
        {{.replace = "h.0.attn.c_proj.weight", .new_shape = "[4,4,1]", .new_bytes = 64},
         BML_ERR_FORMAT,
         "has shape [4, 4, 1]; expected [4, 4]"},
        {{.replace = "h.1.ln_1.weight", .new_shape = "[5]", .new_bytes = 20},
         BML_ERR_FORMAT,
         "has shape [5]; expected [4]"},
        {{.replace = "h.1.ln_1.bias", .new_shape = "[1,4]", .new_bytes = 16},
         BML_ERR_FORMAT,
         "has shape [1, 4]; expected [4]"},
        {{.replace = "h.1.mlp.c_fc.bias", .new_shape = "[]", .new_bytes = 4},
         BML_ERR_FORMAT,
         "has shape []; expected [6]"},
        {{.replace = "wte.weight", .new_dtype = "I8", .new_bytes = 20},
         BML_ERR_UNSUPPORTED,
         "tensor \"wte.weight\" has dtype I8, which is not supported for weights; supported are "
         "F32, F16, BF16 and F64"},
        {{.replace = "h.1.attn.c_proj.weight", .new_dtype = "Q9", .new_bytes = 3},
         BML_ERR_UNSUPPORTED,
         "has dtype Q9"},
        {{.replace = "h.1.attn.c_proj.bias", .new_dtype = "F8_E4M3", .new_bytes = 4},
         BML_ERR_UNSUPPORTED,
         "has dtype F8_E4M3"},
        {{.extra = "transformer.wte.weight", .extra_shape = "[1]"},
         BML_ERR_FORMAT,
         "tensors \"transformer.wte.weight\" and \"wte.weight\" are both wte.weight"},
        {{.extra = "_orig_mod.h.1.ln_1.bias", .extra_shape = "[1]"},
         BML_ERR_FORMAT,
         "are both h.1.ln_1.bias"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        variant v = cases[i].v;
        v.prefix = "";
        v.dtype = "F32";
        bml_bytes file = write_variant(&v);
        bml_checkpoint *c;
        bml_error err;
        check_error(&err, map(file, &config, &c, &err), cases[i].status, cases[i].error);
        free(file.data);
    }
}

/* ---- the output head: as transformers 5.24 does in each combination -------------------------*/

typedef enum head { NO_HEAD, SAME_HEAD, OTHER_HEAD, HEAD_ONLY, OTHER_DTYPE } head;

static bml_status open_head(head kind, bool tie, bml_checkpoint **c, bml_bytes *file,
                            bml_error *err)
{
    container_builder b = {0};
    variant v = {.prefix = "transformer.", .dtype = "F32"};
    size_t n = 0;
    if (kind == HEAD_ONLY)
        n++;
    else
        add_part(&b, &v, "wte.weight", VOCAB, WIDTH, &n);
    add_part(&b, &v, "wpe.weight", POSITIONS, WIDTH, &n);
    for (int layer = 0; layer < LAYERS; layer++)
        add_layer(&b, &v, layer, &n);
    add_part(&b, &v, "ln_f.weight", WIDTH, 0, &n);
    v.prefix = "";
    n = kind == SAME_HEAD ? 0 : 98;
    v.dtype = kind == OTHER_DTYPE ? "BF16" : "F32";
    if (kind != NO_HEAD)
        add_part(&b, &v, "lm_head.weight", VOCAB, WIDTH, &n);
    *file = finish_container(&b, 0);
    bml_hf_config with = config;
    with.tie_word_embeddings = tie;
    return map(*file, &with, c, err);
}

static void heads(void **state)
{
    (void)state;
    static const struct {
        head kind;
        bool tie, tied;
        const char *error;
        size_t head; /* which values */
    } cases[] = {
        {NO_HEAD, true, true, NULL, 1},
        {SAME_HEAD, true, true, NULL, 1},
        {OTHER_HEAD, true, false, NULL, 99},
        {OTHER_DTYPE, true, false, NULL, 99},
        {HEAD_ONLY, true, true, NULL, 99},
        {NO_HEAD, false, false, "needed because config.json has \"tie_word_embeddings\": false", 0},
        {SAME_HEAD, false, true, NULL, 1}, /* equal, so that one matrix does for both */
        {OTHER_HEAD, false, false, NULL, 99},
        {HEAD_ONLY, false, false, "\"wte.weight\" is missing", 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        bml_checkpoint *c;
        bml_bytes file;
        bml_error err = {0};
        bml_status status = open_head(cases[i].kind, cases[i].tie, &c, &file, &err);
        if (cases[i].error) {
            check_error(&err, status, BML_ERR_FORMAT, cases[i].error);
        } else {
            if (status)
                fail_msg("case %zu: %s", i, err.message);
            assert_int_equal(c->tied, cases[i].tied);
            assert_int_equal(c->tied, c->lm_head.data == c->wte.data);
            check_matrix("head", &c->lm_head, cases[i].kind == OTHER_DTYPE ? "BF16" : "F32", VOCAB,
                         WIDTH, cases[i].head);
            check_matrix("wte", &c->wte, "F32", VOCAB, WIDTH, cases[i].kind == HEAD_ONLY ? 99 : 1);
            bml_checkpoint_close(c);
        }
        free(file.data);
    }
}

/* ---- directories -----------------------------------------------------------------------------*/

static void put_weights(const char *dir, const char *name, const variant *v)
{
    bml_bytes file = write_variant(v);
    put_file(dir, name, file.data, file.length);
    free(file.data);
}

static const variant plain = {.prefix = "", .dtype = "F32"};

static void expect_open(const char *dir, const char *name, bml_status expected, const char *part)
{
    char *path = bml_format("%s%s%s", dir, *name ? "/" : "", name);
    bml_checkpoint *c = NULL;
    bml_error err = {0};
    bml_status status = bml_checkpoint_open(path, &c, &err);
    if (expected)
        check_error(&err, status, expected, part);
    else if (status)
        fail_msg("%s: %s", path, err.message);
    bml_checkpoint_close(c);
    free(path);
}

static void directories(void **state)
{
    (void)state;
    char *dir = make_temp();
    expect_open(dir, "nothing", BML_ERR_IO, "nothing: cannot open: No such file");
    expect_open(dir, "", BML_ERR_IO, "config.json: cannot open");
    put_text(dir, "config.json", config_json);
    expect_open(dir, "", BML_ERR_IO, "holds no weights");
    put_text(dir, "pytorch_model.bin", "PK\003\004");
    expect_open(dir, "", BML_ERR_UNSUPPORTED,
                "holds pytorch_model.bin, but no model.safetensors, the only format");
    expect_open(dir, "pytorch_model.bin", BML_ERR_UNSUPPORTED, "PyTorch zip checkpoint");
    put_weights(dir, "other.safetensors", &plain);
    expect_open(dir, "", BML_OK, NULL);
    put_weights(dir, "second.safetensors", &plain);
    expect_open(dir, "", BML_ERR_IO, "holds 2 .safetensors files");
    expect_open(dir, "second.safetensors", BML_OK, NULL);
    put_text(dir, "model.safetensors.index.json", "{}");
    expect_open(dir, "", BML_ERR_FORMAT, "no \"weight_map\"");
    put_weights(dir, "model.safetensors", &plain);
    expect_open(dir, "", BML_OK, NULL);
    put_text(dir, "config.json", "{\"model_type\":\"bert\"}");
    expect_open(dir, "", BML_ERR_UNSUPPORTED, "the model is a bert");
    expect_open(dir, "model.safetensors", BML_ERR_UNSUPPORTED, "the model is a bert");
    put_text(dir, "model.safetensors", "");
    expect_open(dir, "model.safetensors", BML_ERR_FORMAT, "model.safetensors: is empty");
    if (geteuid() != 0) { /* nothing is unreadable to root */
        chmod(dir, 0);
        expect_open(dir, "", BML_ERR_IO, "Permission denied");
        chmod(dir, 0700);
    }
    remove_tree(dir);
}

/* ---- bml_inspect -----------------------------------------------------------------------------*/

static json_t *inspect(const char *path)
{
    char *text;
    bml_error err = {0};
    if (bml_inspect(path, &text, &err))
        fail_msg("%s", err.message);
    json_t *json = json_loads(text, JSON_REJECT_DUPLICATES, NULL);
    assert_non_null(json);
    bml_free(text);
    return json;
}

static const char *text_at(const json_t *object, const char *key)
{
    const char *text = json_string_value(json_object_get(object, key));
    return text ? text : "(none)";
}

static const json_t *tensor_at(const json_t *json, const char *name)
{
    size_t i;
    json_t *tensor;
    json_array_foreach(json_object_get(json, "tensors"), i, tensor)
    {
        if (strcmp(text_at(tensor, "name"), name) == 0)
            return tensor;
    }
    fail_msg("no tensor %s", name);
    return NULL;
}

static int64_t total_at(const json_t *json, const char *key)
{
    return json_integer_value(json_object_get(json_object_get(json, "totals"), key));
}

static void inspects(void **state)
{
    (void)state;
    char *dir = make_temp();
    put_text(dir, "config.json", config_json);
    put_text(dir, "vocab.json", "{}");
    put_text(dir, "merges.txt", "");
    put_weights(dir, "model.safetensors",
                &(variant){.prefix = "transformer.",
                           .dtype = "BF16",
                           .out_in = true,
                           .extra = "transformer.h.1.attn.bias",
                           .extra_shape = "[1]"});
    json_t *json = inspect(dir);
    assert_string_equal(text_at(json, "path"), dir);
    assert_true(json_is_true(json_object_get(json, "loadable")));
    assert_true(json_is_null(json_object_get(json, "problem")));
    assert_int_equal(
        json_integer_value(json_object_get(json_object_get(json, "config"), "n_inner")), INNER);
    assert_string_equal(text_at(json, "layout"), "[out, in]");
    const json_t *t = tensor_at(json, "transformer.h.1.attn.c_attn.weight");
    assert_string_equal(text_at(t, "use"), "attn.c_attn.weight of layer 1, stored [out, in]");
    assert_string_equal(text_at(t, "dtype"), "BF16");
    assert_string_equal(text_at(t, "file"), "model.safetensors");
    assert_int_equal(json_integer_value(json_object_get(t, "bytes")), 96);
    assert_int_equal(json_array_size(json_object_get(t, "shape")), 2);
    assert_string_equal(text_at(tensor_at(json, "transformer.wte.weight"), "use"), "wte.weight");
    assert_string_equal(text_at(tensor_at(json, "transformer.h.1.attn.bias"), "ignored"),
                        "causal mask buffer, not a weight");
    assert_int_equal(json_array_size(json_object_get(json, "tokenizer")), 2);
    assert_int_equal(total_at(json, "tensors"), 29);
    assert_int_equal(total_at(json, "ignored_tensors"), 1);
    assert_int_equal(total_at(json, "ignored_bytes"), 1);
    assert_int_equal(total_at(json, "used_bytes"), 2 * total_at(json, "params"));
    json_decref(json);

    /* What cannot be loaded is described as far as it goes. */
    put_weights(dir, "model.safetensors",
                &(variant){.prefix = "", .dtype = "F32", .drop = "h.1.ln_2.bias"});
    json = inspect(dir);
    assert_true(json_is_true(json_object_get(json, "loadable"))); /* a bias may be missing */
    json_decref(json);
    put_weights(dir, "model.safetensors",
                &(variant){.prefix = "", .dtype = "F32", .drop = "h.1.ln_2.weight"});
    json = inspect(dir);
    assert_true(json_is_false(json_object_get(json, "loadable")));
    assert_non_null(strstr(text_at(json, "problem"), "\"h.1.ln_2.weight\" is missing"));
    assert_string_equal(text_at(tensor_at(json, "h.0.mlp.c_fc.weight"), "use"),
                        "mlp.c_fc.weight of layer 0, stored [in, out]");
    json_decref(json);
    put_text(dir, "config.json", "{\"model_type\":\"bert\",\"x\":1}");
    json = inspect(dir);
    assert_non_null(strstr(text_at(json, "problem"), "the model is a bert"));
    assert_string_equal(text_at(json_object_get(json, "config"), "model_type"), "bert");
    json_decref(json);

    put_text(dir, "model.safetensors", "{}");
    char *text;
    bml_error err;
    check_error(&err, bml_inspect(dir, &text, &err), BML_ERR_FORMAT, "model.safetensors: is 2");
    remove_tree(dir);
}

static json_t *inspect_head(head kind)
{
    bml_checkpoint *c;
    bml_bytes file;
    assert_int_equal(open_head(kind, true, &c, &file, NULL), BML_OK);
    bml_checkpoint_close(c);
    char *dir = make_temp();
    put_text(dir, "config.json", config_json);
    put_file(dir, "model.safetensors", file.data, file.length);
    json_t *json = inspect(dir);
    free(file.data);
    remove_tree(dir);
    return json;
}

static void inspects_heads(void **state)
{
    (void)state;
    json_t *json = inspect_head(SAME_HEAD);
    assert_true(json_is_true(json_object_get(json, "tied")));
    assert_non_null(strstr(text_at(tensor_at(json, "lm_head.weight"), "ignored"), "tied"));
    json_decref(json);
    json = inspect_head(OTHER_HEAD);
    assert_true(json_is_false(json_object_get(json, "tied")));
    assert_string_equal(text_at(tensor_at(json, "lm_head.weight"), "use"), "lm_head.weight");
    json_decref(json);
    json = inspect_head(HEAD_ONLY);
    assert_true(json_is_true(json_object_get(json, "tied")));
    assert_non_null(strstr(text_at(tensor_at(json, "lm_head.weight"), "use"), "as wte.weight"));
    json_decref(json);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(variants), cmocka_unit_test(ignored_tensors),
        cmocka_unit_test(names),    cmocka_unit_test(refused),
        cmocka_unit_test(heads),    cmocka_unit_test(directories),
        cmocka_unit_test(inspects), cmocka_unit_test(inspects_heads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
