/* The kernel suite: products with row-major and packed weights, and the embedding of these. */
#include "kernel_frame.h"

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
    begin_pass(&batch);
    if (out_in)
        b->linear_transposed(queue, &out.buffer, &x.buffer, &w, &bias.buffer, (int)n_tokens);
    else
        b->linear(queue, &out.buffer, &x.buffer, &w, &bias.buffer, (int)n_tokens);
    end_pass();
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

void test_linear(void **state)
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

static float largest_of(const float *x, size_t begin, size_t end)
{
    float max = 0;
    for (size_t i = begin; i < end; i++)
        max = fabsf(x[i]) > max ? fabsf(x[i]) : max;
    return max;
}

/* An activation as a product with packed weights sees it: blocks of 64 int8. */
static double quantized(const float *x, size_t n, size_t i)
{
    if (!suite->quantizes_activations)
        return x[i];
    size_t begin = i / 64 * 64, end = begin + 64 < n ? begin + 64 : n;
    float max = largest_of(x, begin, end);
    if (suite->scales_by_row) {
        float range = largest_of(x, 0, n);
        if (range < 0x1p-90f)
            return 0;
        for (int k = 0; k < 24 && range / 2 >= max; k++)
            range /= 2;
        max = range;
    }
    return max > 0 ? (double)rintf(x[i] * (127 / max)) * (double)(max / 127) : 0;
}

/* Blocks of activations are multiplied by SPREAD^i, i from -8 to 8. */
static void check_packed(size_t n_tokens, size_t n_in, size_t n_out, bool out_in, bml_dtype dtype,
                         bml_weight_format format, float spread)
{
    matrix m = out_in ? random_matrix((int)n_out, (int)n_in, dtype, 1)
                      : random_matrix((int)n_in, (int)n_out, dtype, 1);
    bml_weight w = weight_of(&m, out_in, format), held = packed_of(&m, out_in, format);
    array x = random_array(n_tokens * n_in, 2), bias = random_array(n_out, 3);
    array out = poisoned((n_tokens + 1) * n_out);
    for (size_t t = 0; t < n_tokens; t++)
        for (size_t i = 0, block = 0; i < n_in; block = ++i / 64)
            ((float *)x.data)[t * n_in + i] *= powf(spread, (float)((t * 7 + block * 5) % 17) - 8);
    bml_batch batch = plain_batch(n_tokens);
    begin_pass(&batch);
    b->linear(queue, &out.buffer, &x.buffer, &w, &bias.buffer, (int)n_tokens);
    end_pass();
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

void test_packed(void **state)
{
    (void)state;
    for (int i = 0; i < 40; i++)
        for (int format = BML_WEIGHTS_Q8; format <= BML_WEIGHTS_Q4; format++)
            check_packed(up_to(i < 20 ? 5 : 20), up_to(i % 4 ? 200 : 1000), up_to(i % 3 ? 50 : 150),
                         i % 2, (bml_dtype)(i % 3), (bml_weight_format)format,
                         i % 5 ? 1 : (float)up_to(20));
}

/* Rows of zeros, tiny and huge ones beside a plain one, whose bits they do not change. */
void test_packed_extreme_rows(void **state)
{
    (void)state;
    enum { IN = 200, OUT = 40, ROWS = 16 };
    static const float scales[] = {0, 1e-45f, 1e-38f, 1e-30f, 1e-25f, 1e-20f, 1e20f, 1e36f};
    for (int format = BML_WEIGHTS_Q8; format <= BML_WEIGHTS_Q4; format++) {
        matrix m = random_matrix(OUT, IN, BML_F32, 1);
        bml_weight w = weight_of(&m, true, (bml_weight_format)format);
        bml_weight held = packed_of(&m, true, (bml_weight_format)format);
        array x = random_array(ROWS * IN, 1), out = poisoned(ROWS * OUT), bias = {0};
        array one = array_of(IN * sizeof(float)), alone = poisoned(OUT);
        float *xs = x.data;
        memcpy(one.data, xs, IN * sizeof *xs);
        for (size_t r = 1; r < ROWS; r++) {
            float scale = scales[r % 8];
            if (!suite->scales_by_row && scale < 1e-34f)
                scale = 0; /* 127 / max, of each block, would overflow */
            for (size_t i = 0; i < IN; i++)
                xs[r * IN + i] *= scale;
        }
        xs[(ROWS - 1) * IN] = NAN;
        bml_batch batch = plain_batch(ROWS), single = plain_batch(1);
        begin_pass(&batch);
        b->linear(queue, &out.buffer, &x.buffer, &w, &bias.buffer, ROWS);
        end_pass();
        begin_pass(&single);
        b->linear(queue, &alone.buffer, &one.buffer, &w, &bias.buffer, 1);
        end_pass();
        for (size_t o = 0; o < OUT; o++) {
            const float *got = out.data;
            assert_close("first row", got[o], ((float *)alone.data)[o],
                         suite->scales_by_row ? 0 : 1e-4);
            for (size_t r = 0; r < ROWS - 1; r++) {
                double sum = 0, magnitude = 0;
                for (size_t i = 0; i < IN; i++) {
                    double term = unpacked(&held, o, i) * quantized(xs + r * IN, IN, i);
                    sum += term;
                    magnitude += fabs(term);
                }
                assert_close("extreme row", got[r * OUT + o], sum, 2e-6 * magnitude + 1e-27);
            }
            assert_true(isnan(got[(ROWS - 1) * OUT + o]));
        }
        drop(&x);
        drop(&out);
        drop(&one);
        drop(&alone);
        drop_packed(&held);
        drop_matrix(&m, &w);
    }
}

/* Blocks of zeros, single spikes and tiny or huge values come back within their own scale. */
void test_packing_extremes(void **state)
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

void test_packed_keeps_nan(void **state)
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
            begin_pass(&batch);
            b->linear(queue, &out.buffer, &x.buffer, &w, &bias.buffer, 1);
            end_pass();
            for (size_t o = 0; o < 20; o++)
                assert_false(isfinite(((float *)out.data)[o]));
            drop(&x);
            drop(&out);
            drop_matrix(&m, &w);
        }
}

/* A weight that is not finite shows in its output, and in no other. */
void test_packed_keeps_bad_weights(void **state)
{
    (void)state;
    static const float bad[] = {NAN, INFINITY, -INFINITY};
    for (int format = BML_WEIGHTS_Q8; format <= BML_WEIGHTS_Q4; format++)
        for (int i = 0; i < 3; i++)
            for (size_t at = 0; at < 300; at += 70) {
                matrix m = random_matrix(20, 300, BML_F32, 1);
                ((float *)m.data)[7 * 300 + at] = bad[i];
                bml_weight w = weight_of(&m, true, (bml_weight_format)format);
                array x = random_array(300, 1), out = poisoned(20), bias = {0};
                ((float *)x.data)[150] = 1000; /* so that other blocks' scales are far smaller */
                bml_batch batch = plain_batch(1);
                begin_pass(&batch);
                b->linear(queue, &out.buffer, &x.buffer, &w, &bias.buffer, 1);
                end_pass();
                for (size_t o = 0; o < 20; o++)
                    assert_int_equal(isfinite(((float *)out.data)[o]) != 0, o != 7);
                drop(&x);
                drop(&out);
                drop_matrix(&m, &w);
            }
}

/* The embedding reads single rows of what the head reads as tiles. */
void test_packed_embedding(void **state)
{
    (void)state;
    for (size_t c = 1; c < 200; c += 13) {
        matrix wte = random_matrix(50, (int)c, BML_F32, 1),
               wpe = random_matrix(5, (int)c, BML_F32, 1);
        bml_weight e = weight_of(&wte, true, BML_WEIGHTS_Q8);
        bml_weight held = packed_of(&wte, true, BML_WEIGHTS_Q8);
        bml_weight p = weight_of(&wpe, true, BML_WEIGHTS_FILE);
        int32_t token[] = {0, 17, 49}, position[] = {4, 0, 2}, slot[] = {0, 0, 0};
        bml_batch batch = {3, token, position, slot, 0, NULL, NULL, NULL};
        array out = poisoned(3 * c);
        begin_pass(&batch);
        b->embedding(queue, &out.buffer, &e, &p);
        end_pass();
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

void test_matmul(void **state)
{
    (void)state;
    for (int i = 0; i < 30; i++) {
        size_t m = up_to(40), n = up_to(70), k = up_to(70);
        array a = random_array(m * k, 1), bb = random_array(k * n, 1), c = poisoned(m * n);
        bml_batch batch = plain_batch(1);
        begin_pass(&batch);
        b->matmul(queue, &c.buffer, &a.buffer, &bb.buffer, (int)m, (int)n, (int)k);
        end_pass();
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
