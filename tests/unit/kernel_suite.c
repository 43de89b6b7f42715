#include "kernel_frame.h"

static uint64_t seed;

size_t up_to(size_t n)
{
    return 1 + test_random(&seed) % n;
}

float uniform(float scale)
{
    return scale * ((float)(test_random(&seed) >> 40) / (float)(1 << 23) - 1);
}

/* ---- the backend under test -------------------------------------------------------------------*/

const kernel_suite *suite;
const bml_backend *b;
bml_queue *queue;
bml_device *device, *packer_device;

static array live[16];
static size_t n_live;

array array_of(size_t bytes)
{
    array a = {.data = malloc(bytes)};
    assert_non_null(a.data);
    memset(a.data, 0xff, bytes); /* NaN in every dtype */
    assert_int_equal(b->buffer_new(device, bytes, &a.buffer, NULL), BML_OK);
    assert_true(n_live < sizeof live / sizeof *live);
    return live[n_live++] = a;
}

array poisoned(size_t n)
{
    return array_of(n * sizeof(float));
}

array random_array(size_t n, float scale)
{
    array a = poisoned(n);
    for (size_t i = 0; i < n; i++)
        ((float *)a.data)[i] = uniform(scale);
    return a;
}

void drop(array *a)
{
    for (size_t i = 0; i < n_live; i++)
        if (live[i].data == a->data)
            live[i--] = live[--n_live];
    b->buffer_free(device, &a->buffer);
    free(a->data);
}

bml_batch plain_batch(size_t n)
{
    static int32_t zeros[4096];
    assert_true(n <= 4096);
    return (bml_batch){.n_tokens = (int)n, .token = zeros, .position = zeros, .slot = zeros};
}

void begin_pass(const bml_batch *batch)
{
    for (size_t i = 0; i < n_live; i++)
        assert_int_equal(
            b->upload(queue, &live[i].buffer, live[i].data, live[i].buffer.bytes, NULL), BML_OK);
    bml_error err;
    if (b->begin(queue, batch, &err))
        fail_msg("%s", err.message);
}

void end_pass(void)
{
    bml_error err;
    if (b->end(queue, &err))
        fail_msg("%s", err.message);
    for (size_t i = 0; i < n_live; i++)
        assert_int_equal(
            b->download(queue, live[i].data, &live[i].buffer, live[i].buffer.bytes, NULL), BML_OK);
}

void assert_close(const char *what, double got, double wanted, double bound)
{
    if (!(fabs(got - wanted) <= bound))
        fail_msg("%s: got %.9g, wanted %.9g, off by %.3g, allowed %.3g", what, got, wanted,
                 fabs(got - wanted), bound);
}

matrix random_matrix(int rows, int cols, bml_dtype dtype, float scale)
{
    size_t n = (size_t)rows * (size_t)cols;
    matrix r = {
        malloc(n * 4), malloc(n * sizeof(double)), {.dtype = dtype, .rows = rows, .cols = cols}};
    for (size_t i = 0; i < n; i++) {
        float f = uniform(scale);
        uint16_t half = dtype == BML_BF16 ? bml_f32_to_bf16(f) : bml_f32_to_f16(f);
        if (dtype == BML_F32) {
            ((float *)r.data)[i] = f;
            r.exact[i] = f;
        } else {
            ((uint16_t *)r.data)[i] = half;
            r.exact[i] = dtype == BML_BF16 ? bml_bf16_to_f32(half) : bml_f16_to_f32(half);
        }
    }
    r.m.data = r.data;
    return r;
}

bml_weight weight_of(const matrix *m, bool out_in, bml_weight_format format)
{
    bml_weight w;
    assert_int_equal(b->weight_new(device, &m->m, out_in, format, &w, NULL), BML_OK);
    return w;
}

void drop_matrix(matrix *m, bml_weight *w)
{
    b->weight_free(device, w);
    free(m->data);
    free(m->exact);
}

int run_kernel_suite(const kernel_suite *what)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_linear),
        cmocka_unit_test(test_matmul),
        cmocka_unit_test(test_packed),
        cmocka_unit_test(test_packed_extreme_rows),
        cmocka_unit_test(test_packing_extremes),
        cmocka_unit_test(test_packed_keeps_nan),
        cmocka_unit_test(test_packed_keeps_bad_weights),
        cmocka_unit_test(test_packed_embedding),
        cmocka_unit_test(test_embedding),
        cmocka_unit_test(test_layernorm),
        cmocka_unit_test(test_softmax),
        cmocka_unit_test(test_softmax_keeps_nan),
        cmocka_unit_test(test_attention),
        cmocka_unit_test(test_attention_cached),
        cmocka_unit_test(test_heads),
        cmocka_unit_test(test_residual_add),
        cmocka_unit_test(test_gelu),
        cmocka_unit_test(test_nan_goes_through),
        cmocka_unit_test(test_argmax),
        cmocka_unit_test(test_score),
        cmocka_unit_test(test_sample),
    };
    suite = what;
    b = suite->backend;
    seed = suite->seed;
    n_live = 0;
    bml_error err;
    if (b->open(&device, &err) || b->queue_new(device, suite->n_threads, &queue, &err) ||
        suite->packer->open(&packer_device, &err)) {
        fprintf(stderr, "%s: %s\n", suite->title, err.message);
        return 1;
    }
    int failed = cmocka_run_group_tests_name(suite->title, tests, NULL, NULL);
    suite->packer->close(packer_device);
    b->queue_free(queue);
    b->close(device);
    return failed;
}
