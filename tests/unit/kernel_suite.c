#include "kernel_suite.h"

#include "testing.h"

#include "backend/cpu/quant.h"
#include "base/dtype.h"

#include <math.h>

static uint64_t seed;

static size_t up_to(size_t n)
{
    return 1 + test_random(&seed) % n;
}

static float uniform(float scale)
{
    return scale * ((float)(test_random(&seed) >> 40) / (float)(1 << 23) - 1);
}

/* ---- the backend under test -------------------------------------------------------------------*/

static const kernel_suite *suite;
static const bml_backend *b;
static bml_queue *queue;
static bml_device *device, *packer_device;

/* A buffer of the device and its image on the host: begin() uploads the images of all arrays,
 * end() downloads them again. */
typedef struct array {
    void *data;
    bml_buffer buffer;
} array;

static array live[16];
static size_t n_live;

static array array_of(size_t bytes)
{
    array a = {.data = malloc(bytes)};
    assert_non_null(a.data);
    memset(a.data, 0xff, bytes); /* NaN in every dtype */
    assert_int_equal(b->buffer_new(device, bytes, &a.buffer, NULL), BML_OK);
    assert_true(n_live < sizeof live / sizeof *live);
    return live[n_live++] = a;
}

static array poisoned(size_t n)
{
    return array_of(n * sizeof(float));
}

static array random_array(size_t n, float scale)
{
    array a = poisoned(n);
    for (size_t i = 0; i < n; i++)
        ((float *)a.data)[i] = uniform(scale);
    return a;
}

static void drop(array *a)
{
    for (size_t i = 0; i < n_live; i++)
        if (live[i].data == a->data)
            live[i--] = live[--n_live];
    b->buffer_free(device, &a->buffer);
    free(a->data);
}

/* A batch of n tokens that is only there for its size. */
static bml_batch plain_batch(size_t n)
{
    static int32_t zeros[4096];
    assert_true(n <= 4096);
    return (bml_batch){.n_tokens = (int)n, .token = zeros, .position = zeros, .slot = zeros};
}

static void begin(const bml_batch *batch)
{
    for (size_t i = 0; i < n_live; i++)
        assert_int_equal(
            b->upload(queue, &live[i].buffer, live[i].data, live[i].buffer.bytes, NULL), BML_OK);
    bml_error err;
    if (b->begin(queue, batch, &err))
        fail_msg("%s", err.message);
}

static void end(void)
{
    bml_error err;
    if (b->end(queue, &err))
        fail_msg("%s", err.message);
    for (size_t i = 0; i < n_live; i++)
        assert_int_equal(
            b->download(queue, live[i].data, &live[i].buffer, live[i].buffer.bytes, NULL), BML_OK);
}

static void assert_close(const char *what, double got, double wanted, double bound)
{
    if (!(fabs(got - wanted) <= bound))
        fail_msg("%s: got %.9g, wanted %.9g, off by %.3g, allowed %.3g", what, got, wanted,
                 fabs(got - wanted), bound);
}

/* A random matrix of one dtype, exactly as held, and the same as float64. */
typedef struct matrix {
    void *data;
    double *exact;
    bml_matrix m;
} matrix;

static matrix random_matrix(int rows, int cols, bml_dtype dtype, float scale)
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

static bml_weight weight_of(const matrix *m, bool out_in, bml_weight_format format)
{
    bml_weight w;
    assert_int_equal(b->weight_new(device, &m->m, out_in, format, &w, NULL), BML_OK);
    return w;
}

static void drop_matrix(matrix *m, bml_weight *w)
{
    b->weight_free(device, w);
    free(m->data);
    free(m->exact);
}

/* ---- the kernels ------------------------------------------------------------------------------*/

static void check_linear(size_t n_tokens, size_t n_in, size_t n_out, bool out_in, bml_dtype dtype,
                         bml_weight_format format, bool with_bias)
{
    matrix m = out_in ? random_matrix((int)n_out, (int)n_in, dtype, 1)
                      : random_matrix((int)n_in, (int)n_out, dtype, 1);
    bml_weight w = weight_of(&m, out_in, format);
    array x = random_array(n_tokens * n_in, 2), bias = {0};
    /* One more row behind the output, which must stay as it is. */
    array out = poisoned((n_tokens + 1) * n_out);
    if (with_bias)
        bias = random_array(n_out, 3);
    bml_batch batch = plain_batch(n_tokens);
    begin(&batch);
    if (out_in)
        b->linear_transposed(queue, &out.buffer, &x.buffer, &w, &bias.buffer, (int)n_tokens);
    else
        b->linear(queue, &out.buffer, &x.buffer, &w, &bias.buffer, (int)n_tokens);
    end();
    const float *xs = x.data, *got = out.data, *bs = bias.data;
    for (size_t t = 0; t < n_tokens; t++)
        for (size_t o = 0; o < n_out; o++) {
            double sum = bs ? bs[o] : 0, magnitude = fabs(sum);
            for (size_t i = 0; i < n_in; i++) {
                double term = xs[t * n_in + i] * m.exact[out_in ? o * n_in + i : i * n_out + o];
                sum += term;
                magnitude += fabs(term);
            }
            assert_close(out_in ? "linear_transposed" : "linear", got[t * n_out + o], sum,
                         1e-6 * magnitude + 1e-30);
        }
    for (size_t o = 0; o < n_out; o++)
        assert_true(isnan(got[n_tokens * n_out + o]));
    drop(&x);
    drop(&bias);
    drop(&out);
    drop_matrix(&m, &w);
}

static void test_linear(void **state)
{
    (void)state;
    static const bml_dtype dtypes[] = {BML_F32, BML_BF16, BML_F16};
    static const size_t shapes[][3] = {{1, 1, 1},    {1, 768, 96},  {2, 17, 31},   {8, 33, 47},
                                       {9, 33, 47},  {12, 64, 32},  {13, 513, 33}, {25, 1030, 130},
                                       {1, 4, 5000}, {24, 5, 1000}, {7, 3, 3},     {31, 16, 256}};
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
        for (int i = 0; i < 6; i++)
            check_linear(shapes[s][0], shapes[s][1], shapes[s][2], i % 2, dtypes[i / 2],
                         BML_WEIGHTS_FILE, true);
    for (int i = 0; i < 60; i++)
        check_linear(up_to(40), up_to(200), up_to(200), i % 2, dtypes[i % 3],
                     i % 5 ? BML_WEIGHTS_FILE : BML_WEIGHTS_F32, i % 4);
}

/* ---- packed weights ---- */

/* Weight [output][input] as the packed format holds it, read the plain way from quant.h's words. */
static double unpacked(const bml_weight *w, size_t output, size_t input)
{
    size_t n_in = (size_t)w->n_in, block = input / 64, i = input % 64, o = output % 16;
    const char *tile = (const char *)w->buffer.data + output / 16 * bml_tile_bytes(w->format, n_in);
    const uint8_t *q = (const uint8_t *)tile + bml_tile_header(w->format, n_in);
    if (w->format == BML_WEIGHTS_Q8)
        return (q[((block * 16 + i / 4) * 16 + o) * 4 + i % 4] - 128) *
               (double)bml_bf16_to_f32(((const uint16_t *)tile)[block * 16 + o]);
    const float *row_scale = (const float *)tile;
    const int8_t *scale = (const int8_t *)(row_scale + 16);
    uint8_t byte = q[((block * 8 + i / 8) * 16 + o) * 4 + i % 4];
    int level = bml_q4_levels[i % 8 < 4 ? byte & 15 : byte >> 4];
    return (double)row_scale[o] * scale[(block * 2 + i / 32) * 16 + o] * level;
}

/* The same values as weight_of(), in the words of quant.h. */
static bml_weight packed_of(const matrix *m, bool out_in, bml_weight_format format)
{
    bml_weight w;
    assert_int_equal(suite->packer->weight_new(packer_device, &m->m, out_in, format, &w, NULL),
                     BML_OK);
    return w;
}

static void drop_packed(bml_weight *w)
{
    suite->packer->weight_free(packer_device, w);
}

/* An activation as a product with packed weights sees it: blocks of 64 int8. */
static double quantized(const float *x, size_t n, size_t i)
{
    if (!suite->quantizes_activations)
        return x[i];
    float max = 0;
    for (size_t j = i / 64 * 64; j < n && j < i / 64 * 64 + 64; j++)
        max = fabsf(x[j]) > max ? fabsf(x[j]) : max;
    return max > 0 ? (double)rintf(x[i] * (127 / max)) * (double)(max / 127) : 0;
}

static void check_packed(size_t n_tokens, size_t n_in, size_t n_out, bool out_in, bml_dtype dtype,
                         bml_weight_format format)
{
    matrix m = out_in ? random_matrix((int)n_out, (int)n_in, dtype, 1)
                      : random_matrix((int)n_in, (int)n_out, dtype, 1);
    bml_weight w = weight_of(&m, out_in, format), held = packed_of(&m, out_in, format);
    array x = random_array(n_tokens * n_in, 2), bias = random_array(n_out, 3);
    array out = poisoned((n_tokens + 1) * n_out);
    bml_batch batch = plain_batch(n_tokens);
    begin(&batch);
    b->linear(queue, &out.buffer, &x.buffer, &w, &bias.buffer, (int)n_tokens);
    end();
    double *row = malloc(n_in * sizeof *row), error = 0, size = 0;
    for (size_t o = 0; o < n_out; o++) {
        for (size_t i = 0; i < n_in; i++) {
            double exact = m.exact[out_in ? o * n_in + i : i * n_out + o];
            row[i] = unpacked(&held, o, i);
            error += (row[i] - exact) * (row[i] - exact);
            size += exact * exact;
        }
        for (size_t t = 0; t < n_tokens; t++) {
            double sum = ((float *)bias.data)[o], magnitude = fabs(sum);
            for (size_t i = 0; i < n_in; i++) {
                double term = row[i] * quantized((float *)x.data + t * n_in, n_in, i);
                sum += term;
                magnitude += fabs(term);
            }
            assert_close("packed", ((float *)out.data)[t * n_out + o], sum, 2e-6 * magnitude);
        }
        assert_true(isnan(((float *)out.data)[n_tokens * n_out + o]));
    }
    /* Uniform weights: a step of 2/254 of the range for Q8; for Q4 the levels suit bells better. */
    double bound = format == BML_WEIGHTS_Q8 ? 0.006 : 0.13;
    if (!(sqrt(error) <= bound * sqrt(size)))
        fail_msg("format %d: relative error %.4f", (int)format, sqrt(error / size));
    free(row);
    drop(&x);
    drop(&bias);
    drop(&out);
    drop_packed(&held);
    drop_matrix(&m, &w);
}

static void test_packed(void **state)
{
    (void)state;
    for (int i = 0; i < 40; i++)
        for (int format = BML_WEIGHTS_Q8; format <= BML_WEIGHTS_Q4; format++)
            check_packed(up_to(i < 20 ? 5 : 20), up_to(i % 4 ? 200 : 1000), up_to(i % 3 ? 50 : 150),
                         i % 2, (bml_dtype)(i % 3), (bml_weight_format)format);
}

/* Blocks of zeros, single spikes and tiny or huge values come back within their own scale. */
static void test_packing_extremes(void **state)
{
    (void)state;
    enum { IN = 128, OUT = 20 };
    static const float scales[] = {0, 1e-30f, 1e-6f, 1, 1e6f, 1e30f};
    for (size_t s = 0; s < sizeof scales / sizeof *scales; s++)
        for (int format = BML_WEIGHTS_Q8; format <= BML_WEIGHTS_Q4; format++) {
            matrix m = random_matrix(OUT, IN, BML_F32, scales[s]);
            float *data = m.data;
            memset(data, 0, 64 * sizeof *data);
            data[3] = scales[s]; /* alone in its block */
            bml_weight w = weight_of(&m, true, (bml_weight_format)format);
            bml_weight held = packed_of(&m, true, (bml_weight_format)format);
            for (size_t o = 0; o < OUT; o++)
                for (size_t i = 0; i < IN; i++) {
                    double bound = scales[s] * (format == BML_WEIGHTS_Q8 ? 0.0041 : 0.2);
                    assert_close("packing", unpacked(&held, o, i), data[o * IN + i], bound);
                }
            assert_true(unpacked(&held, 0, 3) >= 0.97 * scales[s]);
            drop_packed(&held);
            drop_matrix(&m, &w);
        }
}

static void test_packed_keeps_nan(void **state)
{
    (void)state;
    static const float bad[] = {NAN, INFINITY, -INFINITY};
    for (int format = BML_WEIGHTS_Q8; format <= BML_WEIGHTS_Q4; format++)
        for (int i = 0; i < 3; i++) {
            matrix m = random_matrix(20, 100, BML_F32, 1);
            bml_weight w = weight_of(&m, true, (bml_weight_format)format);
            array x = random_array(100, 1), out = poisoned(20), bias = {0};
            ((float *)x.data)[70] = bad[i];
            bml_batch batch = plain_batch(1);
            begin(&batch);
            b->linear(queue, &out.buffer, &x.buffer, &w, &bias.buffer, 1);
            end();
            for (size_t o = 0; o < 20; o++)
                assert_false(isfinite(((float *)out.data)[o]));
            drop(&x);
            drop(&out);
            drop_matrix(&m, &w);
        }
}

/* The embedding reads single rows of what the head reads as tiles. */
static void test_packed_embedding(void **state)
{
    (void)state;
    for (size_t c = 1; c < 200; c += 13) {
        matrix wte = random_matrix(50, (int)c, BML_F32, 1),
               wpe = random_matrix(5, (int)c, BML_F32, 1);
        bml_weight e = weight_of(&wte, true, BML_WEIGHTS_Q8);
        bml_weight held = packed_of(&wte, true, BML_WEIGHTS_Q8);
        bml_weight p = weight_of(&wpe, true, BML_WEIGHTS_FILE);
        int32_t token[] = {0, 17, 49}, position[] = {4, 0, 2}, slot[] = {0, 0, 0};
        bml_batch batch = {3, token, position, slot, 0, NULL, NULL};
        array out = poisoned(3 * c);
        begin(&batch);
        b->embedding(queue, &out.buffer, &e, &p);
        end();
        for (size_t t = 0; t < 3; t++)
            for (size_t i = 0; i < c; i++)
                assert_close("packed embedding", ((float *)out.data)[t * c + i],
                             unpacked(&held, (size_t)token[t], i) +
                                 wpe.exact[(size_t)position[t] * c + i],
                             3e-7);
        drop(&out);
        drop_packed(&held);
        drop_matrix(&wte, &e);
        drop_matrix(&wpe, &p);
    }
}

static void test_matmul(void **state)
{
    (void)state;
    for (int i = 0; i < 30; i++) {
        size_t m = up_to(40), n = up_to(70), k = up_to(70);
        array a = random_array(m * k, 1), bb = random_array(k * n, 1), c = poisoned(m * n);
        bml_batch batch = plain_batch(1);
        begin(&batch);
        b->matmul(queue, &c.buffer, &a.buffer, &bb.buffer, (int)m, (int)n, (int)k);
        end();
        for (size_t r = 0; r < m; r++)
            for (size_t o = 0; o < n; o++) {
                double sum = 0, magnitude = 0;
                for (size_t j = 0; j < k; j++) {
                    double term =
                        (double)((float *)a.data)[r * k + j] * ((float *)bb.data)[j * n + o];
                    sum += term;
                    magnitude += fabs(term);
                }
                assert_close("matmul", ((float *)c.data)[r * n + o], sum, 1e-6 * magnitude);
            }
        drop(&a);
        drop(&bb);
        drop(&c);
    }
}

static void test_embedding(void **state)
{
    (void)state;
    for (int i = 0; i < 12; i++) {
        size_t n = up_to(30), c = up_to(130), vocab = up_to(50), positions = up_to(60);
        bml_dtype dtype = (bml_dtype)(i % 3);
        matrix wte = random_matrix((int)vocab, (int)c, dtype, 1);
        matrix wpe = random_matrix((int)positions, (int)c, dtype, 1);
        bml_weight e = weight_of(&wte, true, BML_WEIGHTS_FILE);
        bml_weight p = weight_of(&wpe, true, BML_WEIGHTS_FILE);
        int32_t token[30], position[30], slot[30] = {0};
        for (size_t t = 0; t < n; t++) {
            token[t] = (int32_t)(up_to(vocab) - 1);
            position[t] = (int32_t)(up_to(positions) - 1);
        }
        bml_batch batch = {(int)n, token, position, slot, 0, NULL, NULL};
        array out = poisoned(n * c);
        begin(&batch);
        b->embedding(queue, &out.buffer, &e, &p);
        end();
        for (size_t t = 0; t < n; t++)
            for (size_t j = 0; j < c; j++)
                assert_close("embedding", ((float *)out.data)[t * c + j],
                             wte.exact[(size_t)token[t] * c + j] +
                                 wpe.exact[(size_t)position[t] * c + j],
                             2e-7);
        drop(&out);
        drop_matrix(&wte, &e);
        drop_matrix(&wpe, &p);
    }
}

static void check_layernorm(array *x, size_t n_x_rows, size_t c, float epsilon, bool with_bias,
                            bool rows_of_batch, double bound)
{
    int32_t row[64], zeros[64] = {0};
    size_t n = n_x_rows;
    if (rows_of_batch) {
        n = up_to(n_x_rows);
        for (size_t r = 0; r < n; r++)
            row[r] = (int32_t)(up_to(n_x_rows) - 1);
    }
    bml_batch batch = {(int)n_x_rows, zeros, zeros, zeros, (int)n, row, NULL};
    array w = random_array(c, 2), bias = {0}, out = poisoned(n * c);
    if (with_bias)
        bias = random_array(c, 1);
    begin(&batch);
    b->layernorm(queue, &out.buffer, &x->buffer, &w.buffer, &bias.buffer, (int)n, (int)c, epsilon,
                 rows_of_batch);
    end();
    for (size_t r = 0; r < n; r++) {
        const float *xs = (float *)x->data + (rows_of_batch ? (size_t)row[r] : r) * c;
        double mean = 0, variance = 0;
        for (size_t i = 0; i < c; i++)
            mean += xs[i];
        mean /= (double)c;
        for (size_t i = 0; i < c; i++)
            variance += (xs[i] - mean) * (xs[i] - mean);
        variance /= (double)c;
        for (size_t i = 0; i < c; i++) {
            double wanted = (xs[i] - mean) / sqrt(variance + epsilon) * ((float *)w.data)[i];
            wanted += with_bias ? ((float *)bias.data)[i] : 0;
            assert_close("layernorm", ((float *)out.data)[r * c + i], wanted, bound);
        }
    }
    drop(&w);
    drop(&bias);
    drop(&out);
}

static void test_layernorm(void **state)
{
    (void)state;
    for (int i = 0; i < 30; i++) {
        size_t n = up_to(20), c = up_to(300);
        array x = random_array(n * c, i % 3 ? 1 : 1000);
        check_layernorm(&x, n, c, i % 2 ? 1e-5f : 1e-3f, i % 4, i % 5 == 0, 1e-5);
        drop(&x);
    }
    /* Constant rows give the bias exactly; a large mean loses nothing of the spread. */
    static const float means[] = {0, 1, 1e4f, -3e6f, 0.1f, 1e30f};
    for (size_t i = 0; i < sizeof means / sizeof *means; i++) {
        array x = poisoned(3 * 769);
        for (size_t j = 0; j < 3 * 769; j++)
            ((float *)x.data)[j] = means[i];
        check_layernorm(&x, 3, 769, 1e-5f, true, false, 1e-7);
        for (size_t j = 0; j < 3 * 769 && i < 5; j++)
            ((float *)x.data)[j] += uniform(1);
        check_layernorm(&x, 3, 769, 1e-5f, true, false, 1e-5);
        drop(&x);
    }
}

static void test_softmax(void **state)
{
    (void)state;
    for (int i = 0; i < 40; i++) {
        size_t n = up_to(10), c = up_to(100);
        array x = random_array(n * c, i % 3 ? 5 : 200);
        float *xs = x.data;
        for (size_t j = 0; j < n * c; j++)
            if (test_random(&seed) % 5 == 0)
                xs[j] = -INFINITY;
        for (size_t j = 0; j < c; j++)
            xs[j] = i % 2 ? xs[j] : -INFINITY; /* a whole row of them */
        float *before = malloc(n * c * sizeof *before);
        memcpy(before, xs, n * c * sizeof *before);
        bml_batch batch = plain_batch(1);
        begin(&batch);
        b->softmax(queue, &x.buffer, (int)n, (int)c);
        end();
        for (size_t r = 0; r < n; r++) {
            double max = -INFINITY, sum = 0;
            for (size_t j = 0; j < c; j++)
                max = fmax(max, before[r * c + j]);
            for (size_t j = 0; j < c; j++)
                sum += exp(before[r * c + j] - max);
            for (size_t j = 0; j < c; j++) {
                double below = max - before[r * c + j];
                double p = max == -INFINITY ? 0 : exp(-below) / sum;
                /* BELOW is rounded to float32: its error is a relative error of exp. */
                double bound = p > 0 ? (2e-6 + 6e-8 * below) * p : 0;
                assert_close("softmax", xs[r * c + j], p, bound + 1e-37);
            }
        }
        free(before);
        drop(&x);
    }
}

static void test_softmax_keeps_nan(void **state)
{
    (void)state;
    for (size_t c = 1; c < 40; c++)
        for (int all = 0; all < 2; all++) {
            array x = random_array(c, 1);
            for (size_t j = 0; j < c; j++)
                ((float *)x.data)[j] = all || j == c / 2 ? NAN : -INFINITY;
            bml_batch batch = plain_batch(1);
            begin(&batch);
            b->softmax(queue, &x.buffer, 1, (int)c);
            end();
            assert_true(isnan(((float *)x.data)[c / 2]));
            drop(&x);
        }
}

/* One query in float64 against n keys given by a function of their address. */
static void exact_query(const float *q, const double *k, const double *v, size_t n, size_t d,
                        double scale, double *out)
{
    double *p = malloc(n * sizeof *p), max = -INFINITY, sum = 0;
    for (size_t key = 0; key < n; key++) {
        p[key] = 0;
        for (size_t i = 0; i < d; i++)
            p[key] += scale * q[i] * k[key * d + i];
        max = fmax(max, p[key]);
    }
    for (size_t key = 0; key < n; key++)
        sum += p[key] = exp(p[key] - max);
    for (size_t i = 0; i < d; i++) {
        out[i] = 0;
        for (size_t key = 0; key < n; key++)
            out[i] += p[key] / sum * v[key * d + i];
    }
    free(p);
}

static const size_t head_dims[] = {1, 2, 3, 11, 16, 40, 64, 80, 96, 128, 200};

static void test_attention(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof head_dims / sizeof *head_dims; i++) {
        size_t d = head_dims[i], n = up_to(40), h = up_to(4), size = h * n * d;
        float scale = 1 / sqrtf((float)d);
        array q = random_array(size, 2), k = random_array(size, 2), v = random_array(size, 2),
              out = poisoned(size);
        bml_batch batch = plain_batch(n);
        begin(&batch);
        b->attention(queue, &out.buffer, &q.buffer, &k.buffer, &v.buffer, (int)n, (int)h, (int)d,
                     scale);
        end();
        double *ks = malloc(size * sizeof *ks), *vs = malloc(size * sizeof *vs), wanted[200];
        for (size_t j = 0; j < size; j++) {
            ks[j] = ((float *)k.data)[j];
            vs[j] = ((float *)v.data)[j];
        }
        for (size_t row = 0; row < h * n; row++) {
            exact_query((float *)q.data + row * d, ks + row / n * n * d, vs + row / n * n * d,
                        row % n + 1, d, scale, wanted);
            for (size_t j = 0; j < d; j++)
                assert_close("attention", ((float *)out.data)[row * d + j], wanted[j], 4e-6);
        }
        free(ks);
        free(vs);
        drop(&q);
        drop(&k);
        drop(&v);
        drop(&out);
    }
}

/* Appends random keys and values for slots of various lengths, then asks about random positions. */
static void check_cached(size_t d, size_t h, bml_dtype dtype)
{
    enum { SLOTS = 3, CTX = 37 };
    size_t cells = SLOTS * h * CTX * d, bytes = cells * bml_dtype_size(dtype);
    array ck = array_of(bytes), cv = array_of(bytes); /* unused cells must not be read */
    bml_kv_cache cache = {dtype, 1, SLOTS, CTX, (int)h, (int)d, &ck.buffer, &cv.buffer};
    double *ks = calloc(cells, sizeof *ks), *vs = calloc(cells, sizeof *vs), wanted[200];

    int32_t zeros[64] = {0}, position[64], slot[64];
    size_t n = 0, lengths[SLOTS] = {up_to(20), up_to(20), 1};
    for (int s = 0; s < SLOTS; s++)
        for (size_t p = 0; p < lengths[s]; p++) {
            slot[n] = s;
            position[n++] = (int32_t)p;
        }
    for (size_t i = n; i > 1; i--) { /* the tokens of a batch come in any order of slots */
        size_t j = up_to(i) - 1;
        int32_t s = slot[i - 1], p = position[i - 1];
        slot[i - 1] = slot[j];
        position[i - 1] = position[j];
        slot[j] = s;
        position[j] = p;
    }
    bml_batch batch = {(int)n, zeros, position, slot, 0, NULL, NULL};
    array k = random_array(h * n * d, 2), v = random_array(h * n * d, 2),
          q = random_array(h * n * d, 2), out = poisoned(h * n * d);
    begin(&batch);
    b->kv_append(queue, &cache, 0, &k.buffer, &v.buffer);
    b->attention_cached(queue, &out.buffer, &q.buffer, &cache, 0, 0.3f);
    end();
    for (size_t hh = 0; hh < h; hh++)
        for (size_t t = 0; t < n; t++)
            for (size_t i = 0; i < d; i++) {
                size_t from = (hh * n + t) * d + i;
                size_t to = (((size_t)slot[t] * h + hh) * CTX + (size_t)position[t]) * d + i;
                float kf = ((float *)k.data)[from], vf = ((float *)v.data)[from];
                if (dtype == BML_F16) {
                    kf = bml_f16_to_f32(bml_f32_to_f16(kf));
                    vf = bml_f16_to_f32(bml_f32_to_f16(vf));
                } else if (dtype == BML_BF16) {
                    kf = bml_bf16_to_f32(bml_f32_to_bf16(kf));
                    vf = bml_bf16_to_f32(bml_f32_to_bf16(vf));
                }
                ks[to] = kf;
                vs[to] = vf;
            }
    for (size_t hh = 0; hh < h; hh++)
        for (size_t t = 0; t < n; t++) {
            size_t head = ((size_t)slot[t] * h + hh) * CTX * d;
            exact_query((float *)q.data + (hh * n + t) * d, ks + head, vs + head,
                        (size_t)position[t] + 1, d, 0.3f, wanted);
            for (size_t i = 0; i < d; i++)
                assert_close("attention_cached", ((float *)out.data)[(hh * n + t) * d + i],
                             wanted[i], 5e-6);
        }
    free(ks);
    free(vs);
    drop(&ck);
    drop(&cv);
    drop(&k);
    drop(&v);
    drop(&q);
    drop(&out);
}

static void test_attention_cached(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof head_dims / sizeof *head_dims; i++)
        for (int dtype = 0; dtype < 3; dtype++)
            check_cached(head_dims[i], up_to(3), (bml_dtype)dtype);
}

static void test_heads(void **state)
{
    (void)state;
    for (int i = 0; i < 20; i++) {
        size_t n = up_to(20), h = up_to(6), d = up_to(40), c = h * d;
        array qkv = random_array(n * 3 * c, 1), q = poisoned(n * c), k = poisoned(n * c),
              v = poisoned(n * c), merged = poisoned(n * c);
        bml_batch batch = plain_batch(n);
        begin(&batch);
        b->qkv_split(queue, &q.buffer, &k.buffer, &v.buffer, &qkv.buffer, (int)n, (int)h, (int)d);
        b->heads_merge(queue, &merged.buffer, &v.buffer, (int)n, (int)h, (int)d);
        end();
        const float *from = qkv.data;
        for (size_t t = 0; t < n; t++)
            for (size_t j = 0; j < c; j++) {
                size_t at = (j / d * n + t) * d + j % d;
                assert_true(((float *)q.data)[at] == from[t * 3 * c + j]);
                assert_true(((float *)k.data)[at] == from[t * 3 * c + c + j]);
                assert_true(((float *)v.data)[at] == from[t * 3 * c + 2 * c + j]);
                assert_true(((float *)merged.data)[t * c + j] == from[t * 3 * c + 2 * c + j]);
            }
        drop(&qkv);
        drop(&q);
        drop(&k);
        drop(&v);
        drop(&merged);
    }
}

static void test_residual_add(void **state)
{
    (void)state;
    for (int i = 0; i < 20; i++) {
        size_t n = up_to(50000);
        array x = random_array(n, 1), y = random_array(n, 1);
        float *before = malloc(n * sizeof *before);
        memcpy(before, x.data, n * sizeof *before);
        bml_batch batch = plain_batch(1);
        begin(&batch);
        b->residual_add(queue, &x.buffer, &y.buffer, n);
        end();
        for (size_t j = 0; j < n; j++)
            assert_true(((float *)x.data)[j] == before[j] + ((float *)y.data)[j]);
        free(before);
        drop(&x);
        drop(&y);
    }
}

static double exact_activation(double x, bml_activation activation)
{
    if (activation == BML_ACT_RELU)
        return x > 0 ? x : 0;
    if (activation == BML_ACT_GELU_ERF)
        return 0.5 * x * erfc(-x * sqrt(0.5));
    return 0.5 * x * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}

static void test_gelu(void **state)
{
    (void)state;
    static const float special[] = {0,      -0.0f, 13.3f, -13.3f, 40,    -40,   1e4f, -1e4f,
                                    1e-30f, 1e-6f, -9,    9,      -5.5f, 1e30f, 3e38f};
    enum { N = 3001, SPECIAL = sizeof special / sizeof *special };
    for (int activation = 0; activation < 3; activation++) {
        array x = random_array(N, 6);
        memcpy(x.data, special, sizeof special);
        float before[N];
        memcpy(before, x.data, sizeof before);
        bml_batch batch = plain_batch(1);
        begin(&batch);
        b->gelu(queue, &x.buffer, N, (bml_activation)activation);
        end();
        for (size_t i = 0; i < N; i++) {
            double wanted = exact_activation(before[i], (bml_activation)activation);
            assert_true(isfinite(((float *)x.data)[i]));
            assert_close("gelu", ((float *)x.data)[i], wanted, 2e-6 + 1e-6 * fabs(wanted));
        }
        drop(&x);
    }
}

static void test_nan_goes_through(void **state)
{
    (void)state;
    for (int activation = 0; activation < 3; activation++)
        for (size_t n = 1; n < 40; n++) {
            array x = random_array(n, 1);
            ((float *)x.data)[n - 1] = NAN;
            bml_batch batch = plain_batch(1);
            begin(&batch);
            b->gelu(queue, &x.buffer, n, (bml_activation)activation);
            end();
            assert_true(isnan(((float *)x.data)[n - 1]));
            drop(&x);
        }
}

static void test_argmax(void **state)
{
    (void)state;
    for (int i = 0; i < 200; i++) {
        size_t n = up_to(5), cols = up_to(100), valid = up_to(cols);
        array x = random_array(n * cols, 1), ids = poisoned(n);
        float *xs = x.data;
        for (size_t j = 0; j < n * cols; j++)
            xs[j] = roundf(xs[j] * 4); /* many ties */
        if (i % 4 == 0)
            xs[up_to(n * cols) - 1] = i % 3 ? NAN : i % 8 ? INFINITY : -INFINITY;
        bml_batch batch = plain_batch(1);
        begin(&batch);
        b->argmax(queue, &ids.buffer, &x.buffer, (int)n, (int)cols, (int)valid);
        end();
        for (size_t r = 0; r < n; r++) {
            int32_t best = 0;
            bool finite = true;
            for (size_t j = 0; j < valid; j++) {
                finite &= isfinite(xs[r * cols + j]) != 0;
                best = xs[r * cols + j] > xs[r * cols + (size_t)best] ? (int32_t)j : best;
            }
            assert_int_equal(((int32_t *)ids.data)[r], finite ? best : -1);
        }
        drop(&x);
        drop(&ids);
    }
}

static void test_score(void **state)
{
    (void)state;
    for (int i = 0; i < 200 && b->score; i++) {
        size_t n = up_to(4), cols = up_to(i % 10 ? 200 : 5000);
        array x = random_array(n * cols, i % 3 ? 2 : 30);
        array scores = array_of(n * sizeof(bml_row_score));
        float *xs = x.data;
        int32_t zeros[4] = {0}, row[4] = {0, 1, 2, 3}, target[4];
        for (size_t j = 0; j < n * cols && i % 2; j++)
            xs[j] = roundf(xs[j] * 4); /* many ties */
        for (size_t r = 0; r < n; r++)
            target[r] = (int32_t)(up_to(cols) - 1);
        size_t bad = i % 4 == 3 ? up_to(n * cols) - 1 : n * cols;
        if (bad < n * cols)
            xs[bad] = i % 3 ? NAN : i % 8 == 3 ? INFINITY : -INFINITY;
        bml_batch batch = {(int)n, zeros, zeros, zeros, (int)n, row, target};
        begin(&batch);
        b->score(queue, &scores.buffer, &x.buffer, (int)n, (int)cols);
        end();
        for (size_t r = 0; r < n; r++) {
            const bml_row_score *got = (bml_row_score *)scores.data + r;
            const float *logits = xs + r * cols;
            float max = logits[0], own = logits[target[r]];
            double sum = 0, weighted = 0;
            int32_t rank = 1;
            if (bad / cols == r) {
                assert_true(isnan(got->max));
                continue;
            }
            for (size_t j = 0; j < cols; j++) {
                max = logits[j] > max ? logits[j] : max;
                rank += logits[j] > own || (logits[j] == own && (int32_t)j < target[r]);
            }
            for (size_t j = 0; j < cols; j++) {
                double d = (double)logits[j] - max;
                sum += exp(d);
                weighted += d * exp(d);
            }
            assert_true(got->max == max && got->target == own);
            assert_int_equal(got->rank, rank);
            assert_close("sum", got->sum, sum, 1e-6 * sum);
            assert_close("weighted", got->weighted, weighted, 2e-6 * (1 - weighted));
        }
        drop(&x);
        drop(&scores);
    }
}

int run_kernel_suite(const kernel_suite *what)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_linear),
        cmocka_unit_test(test_matmul),
        cmocka_unit_test(test_packed),
        cmocka_unit_test(test_packing_extremes),
        cmocka_unit_test(test_packed_keeps_nan),
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
