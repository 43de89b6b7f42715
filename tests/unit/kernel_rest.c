/* The kernel suite: everything but products. */
#include "kernel_frame.h"

void test_embedding(void **state)
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
        bml_batch batch = {(int)n, token, position, slot, 0, NULL, NULL, NULL};
        array out = poisoned(n * c);
        begin_pass(&batch);
        b->embedding(queue, &out.buffer, &e, &p);
        end_pass();
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
    bml_batch batch = {(int)n_x_rows, zeros, zeros, zeros, (int)n, row, NULL, NULL};
    array w = random_array(c, 2), bias = {0}, out = poisoned(n * c);
    if (with_bias)
        bias = random_array(c, 1);
    begin_pass(&batch);
    b->layernorm(queue, &out.buffer, &x->buffer, &w.buffer, &bias.buffer, (int)n, (int)c, epsilon,
                 rows_of_batch);
    end_pass();
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

void test_layernorm(void **state)
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

void test_softmax(void **state)
{
    (void)state;
    for (int i = 0; i < 40; i++) {
        size_t n = up_to(10), c = up_to(100);
        array x = random_array(n * c, i % 3 ? 5 : 200);
        float *xs = x.data;
        for (size_t j = 0; j < n * c; j++)
            if (up_to(5) == 5)
                xs[j] = -INFINITY;
        for (size_t j = 0; j < c; j++)
            xs[j] = i % 2 ? xs[j] : -INFINITY; /* a whole row of them */
        float *before = malloc(n * c * sizeof *before);
        memcpy(before, xs, n * c * sizeof *before);
        bml_batch batch = plain_batch(1);
        begin_pass(&batch);
        b->softmax(queue, &x.buffer, (int)n, (int)c);
        end_pass();
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

void test_softmax_keeps_nan(void **state)
{
    (void)state;
    for (size_t c = 1; c < 40; c++)
        for (int all = 0; all < 2; all++) {
            array x = random_array(c, 1);
            for (size_t j = 0; j < c; j++)
                ((float *)x.data)[j] = all || j == c / 2 ? NAN : -INFINITY;
            bml_batch batch = plain_batch(1);
            begin_pass(&batch);
            b->softmax(queue, &x.buffer, 1, (int)c);
            end_pass();
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

void test_attention(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof head_dims / sizeof *head_dims; i++) {
        size_t d = head_dims[i], n = up_to(40), h = up_to(4), size = h * n * d;
        float scale = 1 / sqrtf((float)d);
        array q = random_array(size, 2), k = random_array(size, 2), v = random_array(size, 2),
              out = poisoned(size);
        bml_batch batch = plain_batch(n);
        begin_pass(&batch);
        b->attention(queue, &out.buffer, &q.buffer, &k.buffer, &v.buffer, (int)n, (int)h, (int)d,
                     scale);
        end_pass();
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
    bml_batch batch = {(int)n, zeros, position, slot, 0, NULL, NULL, NULL};
    array k = random_array(h * n * d, 2), v = random_array(h * n * d, 2),
          q = random_array(h * n * d, 2), out = poisoned(h * n * d);
    begin_pass(&batch);
    b->kv_append(queue, &cache, 0, &k.buffer, &v.buffer);
    b->attention_cached(queue, &out.buffer, &q.buffer, &cache, 0, 0.3f);
    end_pass();
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

void test_attention_cached(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof head_dims / sizeof *head_dims; i++)
        for (int dtype = 0; dtype < 3; dtype++)
            check_cached(head_dims[i], up_to(3), (bml_dtype)dtype);
}

void test_heads(void **state)
{
    (void)state;
    for (int i = 0; i < 20; i++) {
        size_t n = up_to(20), h = up_to(6), d = up_to(40), c = h * d;
        array qkv = random_array(n * 3 * c, 1), q = poisoned(n * c), k = poisoned(n * c),
              v = poisoned(n * c), merged = poisoned(n * c);
        bml_batch batch = plain_batch(n);
        begin_pass(&batch);
        b->qkv_split(queue, &q.buffer, &k.buffer, &v.buffer, &qkv.buffer, (int)n, (int)h, (int)d);
        b->heads_merge(queue, &merged.buffer, &v.buffer, (int)n, (int)h, (int)d);
        end_pass();
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

void test_residual_add(void **state)
{
    (void)state;
    for (int i = 0; i < 20; i++) {
        size_t n = up_to(50000);
        array x = random_array(n, 1), y = random_array(n, 1);
        float *before = malloc(n * sizeof *before);
        memcpy(before, x.data, n * sizeof *before);
        bml_batch batch = plain_batch(1);
        begin_pass(&batch);
        b->residual_add(queue, &x.buffer, &y.buffer, n);
        end_pass();
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

void test_gelu(void **state)
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
        begin_pass(&batch);
        b->gelu(queue, &x.buffer, N, (bml_activation)activation);
        end_pass();
        for (size_t i = 0; i < N; i++) {
            double wanted = exact_activation(before[i], (bml_activation)activation);
            assert_true(isfinite(((float *)x.data)[i]));
            assert_close("gelu", ((float *)x.data)[i], wanted, 2e-6 + 1e-6 * fabs(wanted));
        }
        drop(&x);
    }
}

void test_nan_goes_through(void **state)
{
    (void)state;
    for (int activation = 0; activation < 3; activation++)
        for (size_t n = 1; n < 40; n++) {
            array x = random_array(n, 1);
            ((float *)x.data)[n - 1] = NAN;
            bml_batch batch = plain_batch(1);
            begin_pass(&batch);
            b->gelu(queue, &x.buffer, n, (bml_activation)activation);
            end_pass();
            assert_true(isnan(((float *)x.data)[n - 1]));
            drop(&x);
        }
}

void test_argmax(void **state)
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
        begin_pass(&batch);
        b->argmax(queue, &ids.buffer, &x.buffer, (int)n, (int)cols, (int)valid);
        end_pass();
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

void test_score(void **state)
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
        bml_batch batch = {(int)n, zeros, zeros, zeros, (int)n, row, target, NULL};
        begin_pass(&batch);
        b->score(queue, &scores.buffer, &x.buffer, (int)n, (int)cols);
        end_pass();
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
