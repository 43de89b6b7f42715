/*
 * The fourteen kernels against NumPy: data/kernels/kernels.safetensors, made by
 * tools/reference/make_kernels.py. Each case runs with the kernels of every instruction set that
 * this machine has, on one thread and on three.
 */
#include "golden.h"

#include "backend/cpu/cpu.h"
#include "formats/safetensors.h"

/* Sums of up to a few hundred products; functions of one value; what must be the same bits. */
#define SUM_TOLERANCE 1e-5
#define VALUE_TOLERANCE 2e-6
#define EXACT 0.0

enum { MAX_LAYERS = 4 };

static const bml_backend *backend;
static int isa; /* bml_cpu_isa of the backend */
static bml_safetensors *goldens;
static bml_device *device;
static bml_queue *queue;

/* ---- the goldens ---- */

/* Tensor KERNEL.N.NAME, or NULL. */
static const bml_tensor *find(const char *kernel, int n, const char *name)
{
    char key[96];
    snprintf(key, sizeof key, "%s.%d.%s", kernel, n, name);
    return bml_safetensors_find(goldens, key);
}

static const bml_tensor *get(const char *kernel, int n, const char *name)
{
    const bml_tensor *tensor = find(kernel, n, name);
    if (!tensor)
        fail_msg("no golden %s.%d.%s", kernel, n, name);
    return tensor;
}

static int get_int(const char *kernel, int n, const char *name)
{
    int32_t value;
    const bml_tensor *tensor = get(kernel, n, name);
    assert_string_equal(tensor->dtype, "I32");
    assert_int_equal(tensor->bytes, sizeof value);
    memcpy(&value, tensor->data, sizeof value);
    return (int)value;
}

static float get_float(const char *kernel, int n, const char *name)
{
    float value;
    const bml_tensor *tensor = get(kernel, n, name);
    assert_string_equal(tensor->dtype, "F32");
    assert_int_equal(tensor->bytes, sizeof value);
    memcpy(&value, tensor->data, sizeof value);
    return value;
}

static int n_cases(const char *kernel)
{
    char key[96];
    int32_t count;
    snprintf(key, sizeof key, "%s.cases", kernel);
    const bml_tensor *tensor = bml_safetensors_find(goldens, key);
    assert_non_null(tensor);
    memcpy(&count, tensor->data, sizeof count);
    assert_true(count > 0);
    return (int)count;
}

static int dim(const bml_tensor *tensor, int axis)
{
    assert_true(axis < tensor->n_dims);
    return (int)tensor->shape[axis];
}

/* ---- buffers, weights, frames ---- */

static bml_buffer buffer_new(size_t bytes)
{
    bml_error err;
    bml_buffer buffer;
    expect_ok(backend->buffer_new(device, bytes, &buffer, &err), &err);
    return buffer;
}

static bml_buffer buffer_of(const bml_tensor *tensor)
{
    bml_error err;
    bml_buffer buffer = buffer_new(tensor->bytes);
    expect_ok(backend->upload(queue, &buffer, tensor->data, tensor->bytes, &err), &err);
    return buffer;
}

/* The optional tensor NAME, or no buffer. */
static bml_buffer buffer_if(const char *kernel, int n, const char *name)
{
    const bml_tensor *tensor = find(kernel, n, name);
    return tensor ? buffer_of(tensor) : (bml_buffer){0};
}

static void buffer_drop(bml_buffer *buffer)
{
    if (buffer->data)
        backend->buffer_free(device, buffer);
}

static bml_weight weight_of(const bml_tensor *tensor, bool out_in)
{
    bml_error err;
    bml_weight weight;
    bml_matrix matrix = {
        .data = tensor->data, .dtype = BML_F32, .rows = dim(tensor, 0), .cols = dim(tensor, 1)};
    expect_ok(backend->weight_new(device, &matrix, out_in, BML_WEIGHTS_FILE, &weight, &err), &err);
    return weight;
}

static void begin(const bml_batch *batch)
{
    bml_error err;
    expect_ok(backend->begin(queue, batch, &err), &err);
}

static void end(void)
{
    bml_error err;
    expect_ok(backend->end(queue, &err), &err);
}

/* The frame for kernels that take nothing from the batch: one token in slot 0. */
static void begin_plain(void)
{
    static const int32_t zero = 0;
    static const bml_batch batch = {
        .n_tokens = 1, .token = &zero, .position = &zero, .slot = &zero, .n_rows = 1, .row = &zero};
    begin(&batch);
}

/* The batch of a case: its token, position, slot and row, zeros for what it does not name. */
static bml_batch batch_of(const char *kernel, int n, int n_tokens)
{
    static const int32_t zeros[64];
    const bml_tensor *token = find(kernel, n, "token"), *position = find(kernel, n, "position");
    const bml_tensor *slot = find(kernel, n, "slot"), *row = find(kernel, n, "row");
    assert_true(n_tokens <= 64);
    return (bml_batch){.n_tokens = n_tokens,
                       .token = token ? token->data : zeros,
                       .position = position ? position->data : zeros,
                       .slot = slot ? slot->data : zeros,
                       .n_rows = row ? dim(row, 0) : 0,
                       .row = row ? row->data : zeros};
}

/* A buffer against tensor NAME: every value within TOLERANCE * (1 + its size). */
static void expect_buffer(const char *kernel, int n, const char *name, const bml_buffer *buffer,
                          double tolerance)
{
    bml_error err;
    const bml_tensor *want = get(kernel, n, name);
    char what[128];
    float *got = malloc(want->bytes);
    assert_non_null(got);
    expect_ok(backend->download(queue, got, buffer, want->bytes, &err), &err);
    for (size_t i = 0; i < want->bytes / sizeof *got; i++) {
        float right = ((const float *)want->data)[i];
        snprintf(what, sizeof what, "%s.%d.%s[%zu] with instruction set %d", kernel, n, name, i,
                 isa);
        expect_near(what, &got[i], &right, 1, tolerance, 1 + fabs((double)right));
    }
    free(got);
}

/* ---- the kernels ---- */

static void golden_embedding(const char *kernel, int n)
{
    const bml_tensor *out = get(kernel, n, "out");
    bml_weight wte = weight_of(get(kernel, n, "wte"), true);
    bml_weight wpe = weight_of(get(kernel, n, "wpe"), true);
    bml_buffer y = buffer_new(out->bytes);
    bml_batch batch = batch_of(kernel, n, dim(out, 0));
    begin(&batch);
    backend->embedding(queue, &y, &wte, &wpe);
    end();
    expect_buffer(kernel, n, "out", &y, EXACT);
    buffer_drop(&y);
    backend->weight_free(device, &wte);
    backend->weight_free(device, &wpe);
}

static void golden_layernorm(const char *kernel, int n)
{
    const bml_tensor *in = get(kernel, n, "x"), *out = get(kernel, n, "out");
    bool rows_of_batch = find(kernel, n, "row") != NULL;
    bml_buffer x = buffer_of(in), y = buffer_new(out->bytes);
    bml_buffer weight = buffer_if(kernel, n, "weight"), bias = buffer_if(kernel, n, "bias");
    bml_batch batch = batch_of(kernel, n, dim(in, 0));
    begin(&batch);
    backend->layernorm(queue, &y, &x, &weight, &bias, dim(out, 0), dim(out, 1),
                       get_float(kernel, n, "epsilon"), rows_of_batch);
    end();
    expect_buffer(kernel, n, "out", &y, SUM_TOLERANCE);
    buffer_drop(&x);
    buffer_drop(&y);
    buffer_drop(&weight);
    buffer_drop(&bias);
}

static void golden_matmul(const char *kernel, int n)
{
    const bml_tensor *out = get(kernel, n, "out"), *left = get(kernel, n, "a");
    bml_buffer a = buffer_of(left), b = buffer_of(get(kernel, n, "b"));
    bml_buffer c = buffer_new(out->bytes);
    begin_plain();
    backend->matmul(queue, &c, &a, &b, dim(out, 0), dim(out, 1), dim(left, 1));
    end();
    expect_buffer(kernel, n, "out", &c, SUM_TOLERANCE);
    buffer_drop(&a);
    buffer_drop(&b);
    buffer_drop(&c);
}

static void golden_linear(const char *kernel, int n)
{
    bool transposed = strcmp(kernel, "linear_transposed") == 0;
    const bml_tensor *out = get(kernel, n, "out");
    bml_buffer x = buffer_of(get(kernel, n, "x")), y = buffer_new(out->bytes);
    bml_buffer bias = buffer_if(kernel, n, "bias");
    bml_weight w = weight_of(get(kernel, n, "w"), transposed);
    assert_int_equal(w.n_out, dim(out, 1));
    begin_plain();
    (transposed ? backend->linear_transposed : backend->linear)(queue, &y, &x, &w, &bias,
                                                                dim(out, 0));
    end();
    expect_buffer(kernel, n, "out", &y, SUM_TOLERANCE);
    buffer_drop(&x);
    buffer_drop(&y);
    buffer_drop(&bias);
    backend->weight_free(device, &w);
}

static void golden_qkv_split(const char *kernel, int n)
{
    const bml_tensor *out = get(kernel, n, "q");
    bml_buffer qkv = buffer_of(get(kernel, n, "qkv"));
    bml_buffer q = buffer_new(out->bytes), k = buffer_new(out->bytes), v = buffer_new(out->bytes);
    assert_int_equal(dim(out, 0), get_int(kernel, n, "heads"));
    begin_plain();
    backend->qkv_split(queue, &q, &k, &v, &qkv, dim(out, 1), dim(out, 0), dim(out, 2));
    end();
    expect_buffer(kernel, n, "q", &q, EXACT);
    expect_buffer(kernel, n, "k", &k, EXACT);
    expect_buffer(kernel, n, "v", &v, EXACT);
    buffer_drop(&qkv);
    buffer_drop(&q);
    buffer_drop(&k);
    buffer_drop(&v);
}

/* A cache of several layers; LAYER holds the case's, the others zeros. */
typedef struct cache {
    bml_kv_cache kv;
    bml_buffer k[MAX_LAYERS], v[MAX_LAYERS];
    size_t bytes;
} cache;

static void cache_open(cache *c, const char *kernel, int n)
{
    const bml_tensor *k = get(kernel, n, "cache_k"), *v = get(kernel, n, "cache_v");
    int layers = get_int(kernel, n, "layers"), layer = get_int(kernel, n, "layer");
    assert_true(layers <= MAX_LAYERS && layer < layers);
    c->kv = (bml_kv_cache){.dtype = BML_F32,
                           .n_layer = layers,
                           .n_slots = dim(k, 0),
                           .n_head = dim(k, 1),
                           .n_ctx = dim(k, 2),
                           .head_dim = dim(k, 3),
                           .k = c->k,
                           .v = c->v};
    c->bytes = k->bytes;
    for (int l = 0; l < layers; l++) {
        c->k[l] = l == layer ? buffer_of(k) : buffer_new(k->bytes);
        c->v[l] = l == layer ? buffer_of(v) : buffer_new(v->bytes);
    }
}

static void cache_close(cache *c)
{
    for (int l = 0; l < c->kv.n_layer; l++) {
        buffer_drop(&c->k[l]);
        buffer_drop(&c->v[l]);
    }
}

static void expect_zeros(const bml_buffer *buffer, size_t bytes)
{
    bml_error err;
    unsigned char *got = malloc(bytes);
    assert_non_null(got);
    expect_ok(backend->download(queue, got, buffer, bytes, &err), &err);
    for (size_t i = 0; i < bytes; i++)
        assert_int_equal(got[i], 0);
    free(got);
}

static void golden_kv_append(const char *kernel, int n)
{
    cache c;
    cache_open(&c, kernel, n);
    int layer = get_int(kernel, n, "layer");
    const bml_tensor *in = get(kernel, n, "k");
    bml_buffer k = buffer_of(in), v = buffer_of(get(kernel, n, "v"));
    bml_batch batch = batch_of(kernel, n, dim(in, 1));
    begin(&batch);
    backend->kv_append(queue, &c.kv, layer, &k, &v);
    end();
    expect_buffer(kernel, n, "out_k", &c.k[layer], EXACT);
    expect_buffer(kernel, n, "out_v", &c.v[layer], EXACT);
    for (int l = 0; l < c.kv.n_layer; l++) {
        if (l == layer)
            continue;
        expect_zeros(&c.k[l], c.bytes);
        expect_zeros(&c.v[l], c.bytes);
    }
    buffer_drop(&k);
    buffer_drop(&v);
    cache_close(&c);
}

static void golden_softmax(const char *kernel, int n)
{
    const bml_tensor *in = get(kernel, n, "x");
    bml_buffer x = buffer_of(in);
    begin_plain();
    backend->softmax(queue, &x, dim(in, 0), dim(in, 1));
    end();
    expect_buffer(kernel, n, "out", &x, VALUE_TOLERANCE);
    buffer_drop(&x);
}

static void golden_attention(const char *kernel, int n)
{
    const bml_tensor *out = get(kernel, n, "out");
    bml_buffer q = buffer_of(get(kernel, n, "q")), k = buffer_of(get(kernel, n, "k"));
    bml_buffer v = buffer_of(get(kernel, n, "v")), y = buffer_new(out->bytes);
    bml_batch batch = batch_of(kernel, n, dim(out, 1));
    begin(&batch);
    backend->attention(queue, &y, &q, &k, &v, dim(out, 1), dim(out, 0), dim(out, 2),
                       get_float(kernel, n, "scale"));
    end();
    expect_buffer(kernel, n, "out", &y, SUM_TOLERANCE);
    buffer_drop(&q);
    buffer_drop(&k);
    buffer_drop(&v);
    buffer_drop(&y);
}

static void golden_attention_cached(const char *kernel, int n)
{
    cache c;
    cache_open(&c, kernel, n);
    const bml_tensor *out = get(kernel, n, "out");
    bml_buffer q = buffer_of(get(kernel, n, "q")), y = buffer_new(out->bytes);
    bml_batch batch = batch_of(kernel, n, dim(out, 1));
    begin(&batch);
    backend->attention_cached(queue, &y, &q, &c.kv, get_int(kernel, n, "layer"),
                              get_float(kernel, n, "scale"));
    end();
    expect_buffer(kernel, n, "out", &y, SUM_TOLERANCE);
    buffer_drop(&q);
    buffer_drop(&y);
    cache_close(&c);
}

static void golden_heads_merge(const char *kernel, int n)
{
    const bml_tensor *in = get(kernel, n, "x");
    bml_buffer x = buffer_of(in), y = buffer_new(in->bytes);
    begin_plain();
    backend->heads_merge(queue, &y, &x, dim(in, 1), dim(in, 0), dim(in, 2));
    end();
    expect_buffer(kernel, n, "out", &y, EXACT);
    buffer_drop(&x);
    buffer_drop(&y);
}

static void golden_residual_add(const char *kernel, int n)
{
    const bml_tensor *in = get(kernel, n, "x");
    bml_buffer x = buffer_of(in), y = buffer_of(get(kernel, n, "y"));
    begin_plain();
    backend->residual_add(queue, &x, &y, (size_t)dim(in, 0));
    end();
    expect_buffer(kernel, n, "out", &x, EXACT);
    buffer_drop(&x);
    buffer_drop(&y);
}

static void golden_gelu(const char *kernel, int n)
{
    static const bml_activation activations[] = {BML_ACT_GELU_TANH, BML_ACT_GELU_ERF, BML_ACT_RELU};
    const bml_tensor *in = get(kernel, n, "x");
    bml_buffer x = buffer_of(in);
    begin_plain();
    backend->gelu(queue, &x, (size_t)dim(in, 0), activations[get_int(kernel, n, "activation")]);
    end();
    expect_buffer(kernel, n, "out", &x, VALUE_TOLERANCE);
    buffer_drop(&x);
}

static void golden_argmax(const char *kernel, int n)
{
    bml_error err;
    const bml_tensor *in = get(kernel, n, "x"), *out = get(kernel, n, "out");
    bml_buffer x = buffer_of(in), ids = buffer_new(out->bytes);
    begin_plain();
    backend->argmax(queue, &ids, &x, dim(in, 0), dim(in, 1), get_int(kernel, n, "n_valid"));
    end();
    int32_t *got = malloc(out->bytes);
    assert_non_null(got);
    expect_ok(backend->download(queue, got, &ids, out->bytes, &err), &err);
    size_t rows = (size_t)dim(out, 0);
    expect_ids(kernel, got, rows, out->data, rows);
    free(got);
    buffer_drop(&x);
    buffer_drop(&ids);
}

/* ---- all of them ---- */

typedef struct kernel_test {
    const char *name;
    void (*run)(const char *kernel, int n);
} kernel_test;

static void test_kernel(void **state)
{
    const kernel_test *test = *state;
    static const int threads[] = {1, 3};
    bml_error err;
    int cases = n_cases(test->name), backends = 0;
    for (isa = 0; isa < BML_CPU_N_ISAS; isa++) {
        backend = bml_cpu_backend((bml_cpu_isa)isa);
        if (!backend)
            continue;
        backends++;
        expect_ok(backend->open(&device, &err), &err);
        for (size_t t = 0; t < sizeof threads / sizeof *threads; t++) {
            expect_ok(backend->queue_new(device, threads[t], &queue, &err), &err);
            for (int n = 0; n < cases; n++)
                test->run(test->name, n);
            backend->queue_free(queue);
        }
        backend->close(device);
    }
    assert_true(backends > 0);
}

static int setup(void **state)
{
    (void)state;
    bml_error err;
    if (bml_safetensors_open(TEST_DATA "/kernels/kernels.safetensors", &goldens, &err) == BML_OK)
        return 0;
    fprintf(stderr, "%s\n", err.message);
    return -1;
}

static int teardown(void **state)
{
    (void)state;
    bml_safetensors_close(goldens);
    return 0;
}

int main(void)
{
    static kernel_test kernels[] = {
        {"embedding", golden_embedding},
        {"layernorm", golden_layernorm},
        {"matmul", golden_matmul},
        {"linear", golden_linear},
        {"linear_transposed", golden_linear},
        {"qkv_split", golden_qkv_split},
        {"kv_append", golden_kv_append},
        {"softmax", golden_softmax},
        {"attention", golden_attention},
        {"attention_cached", golden_attention_cached},
        {"heads_merge", golden_heads_merge},
        {"residual_add", golden_residual_add},
        {"gelu", golden_gelu},
        {"argmax", golden_argmax},
    };
    enum { KERNELS = sizeof kernels / sizeof *kernels };
    struct CMUnitTest tests[KERNELS];
    for (int i = 0; i < KERNELS; i++)
        tests[i] = (struct CMUnitTest){
            .name = kernels[i].name, .test_func = test_kernel, .initial_state = &kernels[i]};
    return cmocka_run_group_tests(tests, setup, teardown);
}
