/*
 * The kernels of a decoding batch against float64: products with every cut and epilogue, the norm
 * with what it adds up before, attention of sequences of any length, the head. Outputs start as
 * NaN.
 */
#include "backend/cuda/attention_decode.h"
#include "backend/cuda/head.h"
#include "backend/cuda/product_batch.h"
#include "helpers.cuh"

#include <vector>

/* Device memory for the length of a test. */
struct memory {
    std::vector<void *> all;

    template <typename T> T *keep(T *p)
    {
        all.push_back((void *)p);
        return p;
    }

    ~memory()
    {
        for (void *p : all)
            CHECK(cudaFree(p));
    }
};

template <typename T> static std::vector<T> fetch(const T *from, size_t n)
{
    std::vector<T> to(n);
    CHECK(cudaMemcpy(to.data(), from, n * sizeof(T), cudaMemcpyDeviceToHost));
    return to;
}

/* out [m, n] = a [m, k] W [n, k] */
template <typename T>
static __global__ void reference(double *out, const T *a, const T *w, int m, int n, int k)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    double sum = 0;
    if (i >= m * n)
        return;
    for (int j = 0; j < k; j++)
        sum +=
            (double)(float)a[(size_t)(i / n) * k + j] * (double)(float)w[(size_t)(i % n) * k + j];
    out[i] = sum;
}

template <typename T>
static std::vector<double> product_of(const T *a, const T *w, int m, int n, int k)
{
    memory owned;
    double *out = owned.keep(poison_new<double>((size_t)m * n));
    reference<<<(m * n + 255) / 256, 256>>>(out, a, w, m, n, k);
    CHECK(cudaGetLastError());
    return fetch(out, (size_t)m * n);
}

/* ---- products ---- */

/* A product of M rows, of which N columns and K are multiples of 8; HEADS of the QKV, or 0. */
template <typename T>
static void test_product(bml_dtype type, int m, int n, int k, bml_cuda_epilogue epilogue,
                         bml_activation activation, int heads)
{
    enum { SLOTS = 300, CONTEXT = 40 };
    memory owned;
    bml_cuda_product p = {};
    T *a = owned.keep(random_new<T>((size_t)m * k, 1));
    T *w = owned.keep(random_new<T>((size_t)n * k, 1 / sqrtf((float)k)));
    float *bias = owned.keep(random_new<float>(n, 0.5f));
    std::vector<int32_t> slot(m), position(m);
    for (int t = 0; t < m; t++)
        slot[t] = m - 1 - t, position[t] = t * 7 % CONTEXT;
    p.type = type, p.m = m, p.n = n, p.k = k, p.a = a, p.a_pitch = k, p.w = w;
    p.bias = bias, p.epilogue = epilogue, p.activation = activation;
    p.out_pitch = heads ? n / 3 : n;
    p.slot = owned.keep(upload(slot.data(), m));
    p.position = owned.keep(upload(position.data(), m));
    int width = n / 3, dim = heads ? width / heads : 1;
    size_t cache_count = heads ? (size_t)SLOTS * CONTEXT * width : 1;
    std::vector<double> wanted = product_of(a, w, m, n, k);
    std::vector<float> biases = fetch(bias, n);

    for (int columns : {48, 96})
        for (int split : {1, 2, 4, 8}) {
            bool parts = epilogue == BML_CUDA_STORE32;
            if (split > (parts ? (k + 63) / 64 : 1) || columns * k / split > 96 * 64 * 12)
                continue;
            memory own;
            size_t out_count = (size_t)m * p.out_pitch * split;
            float *wide = own.keep(poison_new<float>(out_count + 8));
            T *narrow = own.keep(poison_new<T>(out_count + 8));
            T *keys = own.keep(poison_new<T>(cache_count));
            T *values = own.keep(poison_new<T>(cache_count));
            p.out = parts ? (void *)wide : narrow;
            p.cache = {keys, values, SLOTS, heads, CONTEXT, dim};
            CHECK(bml_cuda_product_batch(&p, {columns, split}, NULL, 0));
            CHECK(cudaDeviceSynchronize());
            std::vector<float> got32 = fetch(wide, out_count + 8);
            std::vector<T> got16 = fetch(narrow, out_count + 8);
            std::vector<T> cached[] = {fetch(keys, cache_count), fetch(values, cache_count)};
            difference d;
            for (int t = 0; t < m; t++)
                for (int c = 0; c < n; c++) {
                    double x = wanted[(size_t)t * n + c] + biases[c], got = 0;
                    int third = heads ? c / width : 0, h = c % width / dim;
                    size_t line = ((size_t)slot[t] * heads + h) * CONTEXT + position[t];
                    if (parts)
                        for (int s = 0; s < split; s++)
                            got += got32[((size_t)s * m + t) * n + c];
                    else if (third)
                        got = number(cached[third - 1][line * dim + c % dim]);
                    else
                        got = number(got16[(size_t)t * p.out_pitch + c]);
                    d.add(got, epilogue == BML_CUDA_ACTIVATION ? activated(x, activation) : x);
                }
            for (int i = 0; i < 8; i++)
                d.stray |=
                    !(parts ? poisoned(got32[out_count + i]) : poisoned(got16[out_count + i]));
            char name[120];
            snprintf(name, sizeof name, "product %dx%dx%d cut %d/%d epilogue %d %d, type %d", m, n,
                     k, columns, split, (int)epilogue, (int)activation, (int)type);
            d.judge(name, parts ? 4e-6 : type == BML_F16 ? 4e-4 : 3e-3);
        }
}

template <typename T> static void test_products(bml_dtype type)
{
    static const struct {
        int m, n, k, heads;
    } shapes[] = {{64, 768, 768, 4}, {9, 1152, 384, 6},  {33, 120, 200, 5},
                  {1, 96, 64, 1},    {130, 144, 136, 3}, {300, 192, 768, 1}};
    for (const auto &s : shapes) {
        test_product<T>(type, s.m, s.n, s.k, BML_CUDA_STORE32, BML_ACT_GELU_TANH, 0);
        test_product<T>(type, s.m, s.n, s.k, BML_CUDA_QKV, BML_ACT_GELU_TANH, s.heads);
        for (int i = 0; i < 3; i++)
            test_product<T>(type, s.m, s.n, s.k, BML_CUDA_ACTIVATION, (bml_activation)i, 0);
    }
    test_product<T>(type, 256, 768, 3072, BML_CUDA_STORE32, BML_ACT_GELU_TANH, 0);
}

/* ---- the norm ---- */

template <typename T>
static void test_norm(bml_dtype type, int rows, int n, int n_sums, bool bias, bool picked)
{
    memory owned;
    size_t count = (size_t)rows * n;
    float *x = owned.keep(random_new<float>(count, 3));
    float *sums = owned.keep(random_new<float>(count * (n_sums + 1), 1));
    float *weight = owned.keep(random_new<float>(n, 1)), *b = owned.keep(random_new<float>(n, 1));
    T *out = owned.keep(poison_new<T>(count + 8));
    std::vector<float> before = fetch(x, count), added = fetch(sums, count * (n_sums + 1));
    std::vector<float> hw = fetch(weight, n), hb = fetch(b, n);
    int n_rows = picked ? (rows + 1) / 2 : rows;
    std::vector<int32_t> row(n_rows);
    for (int i = 0; i < n_rows; i++)
        row[i] = picked ? 2 * i : i;
    int32_t *rows_at = owned.keep(upload(row.data(), n_rows));
    CHECK(bml_cuda_norm_batch(type, out, x, sums, n_sums, rows, picked ? rows_at : nullptr, weight,
                              bias ? b : nullptr, n_rows, n, 1e-5f, 0));
    CHECK(cudaDeviceSynchronize());
    std::vector<T> got = fetch(out, count + 8);
    std::vector<float> after = fetch(x, count);
    difference normed, stream;
    for (int i = 0; i < n_rows; i++) {
        std::vector<double> line(n);
        double mean = 0, variance = 0;
        for (int c = 0; c < n; c++) {
            size_t at = (size_t)row[i] * n + c;
            line[c] = before[at];
            for (int s = 0; s < n_sums; s++)
                line[c] += added[s * count + at];
            stream.add(after[at], line[c]);
            mean += line[c] / n;
        }
        for (double v : line)
            variance += (v - mean) * (v - mean) / n;
        for (int c = 0; c < n; c++)
            normed.add(number(got[(size_t)i * n + c]),
                       (line[c] - mean) / sqrt(variance + 1e-5) * hw[c] + (bias ? hb[c] : 0));
    }
    normed.stray = !poisoned(got[(size_t)n_rows * n]);
    char name[80];
    snprintf(name, sizeof name, "norm %dx%d of %d sums, type %d", rows, n, n_sums, (int)type);
    normed.judge(name, type == BML_F16 ? 4e-4 : 3e-3);
    stream.judge(name, 1e-6);
}

/* ---- attention ---- */

template <typename T> static void test_attention(bml_dtype type, int n, int dim, bool clusters)
{
    enum { HEADS = 3, CONTEXT = 700 };
    memory owned;
    int width = HEADS * dim;
    size_t cache_count = (size_t)n * HEADS * CONTEXT * dim, out_count = (size_t)n * width;
    T *k = owned.keep(random_new<T>(cache_count, 1)),
      *v = owned.keep(random_new<T>(cache_count, 1));
    T *out = owned.keep(poison_new<T>(out_count + 8));
    bml_cuda_attention a = {};
    a.type = type, a.q_pitch = width + 8, a.n_tokens = n, a.scale = 1 / sqrtf((float)dim);
    T *q = owned.keep(random_new<T>((size_t)n * a.q_pitch, 2));
    std::vector<int32_t> slot(n), position(n);
    for (int t = 0; t < n; t++) {
        slot[t] = n - 1 - t, position[t] = t * 211 % CONTEXT;
        for (int h = 0; h < HEADS; h++) { /* past the sequence: NaN */
            size_t at = (((size_t)slot[t] * HEADS + h) * CONTEXT + position[t] + 1) * dim;
            size_t bytes = (size_t)(CONTEXT - 1 - position[t]) * dim * sizeof(T);
            CHECK(cudaMemset(k + at, 0xff, bytes));
            CHECK(cudaMemset(v + at, 0xff, bytes));
        }
    }
    a.q = q, a.out = out, a.cache = {k, v, n, HEADS, CONTEXT, dim};
    int32_t *slots = owned.keep(upload(slot.data(), n)),
            *positions = owned.keep(upload(position.data(), n));
    CHECK(bml_cuda_attention_decode(&a, slots, positions, clusters, 0));
    CHECK(cudaDeviceSynchronize());
    std::vector<T> got = fetch(out, out_count + 8), hq = fetch(q, (size_t)n * a.q_pitch);
    std::vector<T> hk = fetch(k, cache_count), hv = fetch(v, cache_count);
    difference d;
    for (int t = 0; t < n; t++)
        for (int h = 0; h < HEADS; h++) {
            size_t line = ((size_t)slot[t] * HEADS + h) * CONTEXT * dim;
            std::vector<double> score(position[t] + 1), value(dim);
            double top = -INFINITY, sum = 0;
            for (int j = 0; j <= position[t]; j++) {
                for (int i = 0; i < dim; i++)
                    score[j] += number(hq[(size_t)t * a.q_pitch + h * dim + i]) *
                                number(hk[line + (size_t)j * dim + i]) * a.scale;
                top = fmax(top, score[j]);
            }
            for (int j = 0; j <= position[t]; j++) {
                double weight = exp(score[j] - top);
                sum += weight;
                for (int i = 0; i < dim; i++)
                    value[i] += weight * number(hv[line + (size_t)j * dim + i]);
            }
            for (int i = 0; i < dim; i++)
                d.add(number(got[(size_t)t * width + h * dim + i]), value[i] / sum);
        }
    d.stray = !poisoned(got[out_count]);
    CHECK(cudaMemset(q, 0xff, sizeof(T))); /* token 0 sees its own key alone; NaN stays */
    CHECK(bml_cuda_attention_decode(&a, slots, positions, clusters, 0));
    CHECK(cudaDeviceSynchronize());
    d.stray |= !poisoned(fetch(out, 1)[0]);
    char name[80];
    snprintf(name, sizeof name, "attention of %d, heads of %d, clusters %d, type %d", n, dim,
             clusters, (int)type);
    d.judge(name, type == BML_F16 ? 1e-3 : 6e-3);
}

/* ---- the head ---- */

/* Row 0 has a NaN where there is more than one. */
template <typename T> static void test_head(bml_dtype type, int m, int n, int k)
{
    memory owned;
    T *a = owned.keep(random_new<T>((size_t)m * k, 1)),
      *w = owned.keep(random_new<T>((size_t)n * k, 1));
    std::vector<double> logits = product_of(a, w, m, n, k);
    if (m > 1)
        CHECK(cudaMemset(a, 0xff, sizeof(T)));
    bml_cuda_head h = {};
    h.type = type, h.m = m, h.n = n, h.k = k, h.a = a, h.w = w;
    h.parts = owned.keep(poison_new<double>((size_t)m * (n / 128 + 1)));
    bml_cuda_choice &to = h.choice;
    to.ids = owned.keep(poison_new<int32_t>(m + 1));
    to.host = owned.keep(poison_new<int32_t>(2 * (m + 1)));
    to.pitch = m + 1;
    if (n % 2) { /* a step that another can follow */
        std::vector<int32_t> positions(m + 1);
        for (int r = 0; r <= m; r++)
            positions[r] = 7 * r;
        to.position = owned.keep(upload(positions.data(), m + 1));
        to.token = owned.keep(poison_new<int32_t>(m + 1));
    }
    bool right = bml_cuda_takes_head(&h);
    CHECK(bml_cuda_head_argmax(&h, 0));
    CHECK(cudaDeviceSynchronize());
    std::vector<int32_t> ids = fetch(to.ids, m + 1), host = fetch(to.host, 2 * (m + 1)), token,
                         position;
    if (to.position)
        token = fetch(to.token, m + 1), position = fetch(to.position, m + 1);
    for (int r = 0; r < m; r++) {
        const double *row = &logits[(size_t)r * n];
        double best = row[0];
        for (int c = 1; c < n; c++)
            best = fmax(best, row[c]);
        bool bad = m > 1 && r == 0;
        int half = to.position ? r % 2 : 0;
        right &= host[half * to.pitch + r] == ids[r] && host[!half * to.pitch + r] == -1;
        if (to.position)
            right &= token[r] == (bad ? 0 : ids[r]) && position[r] == 7 * r + 1;
        right &= bad ? ids[r] == -1 : ids[r] >= 0 && ids[r] < n;
        right = right && (bad || row[ids[r]] >= best - 1e-3);
    }
    right &= ids[m] == -1 && host[m] == -1; /* as it was */
    if (to.position)
        right &= token[m] == -1 && position[m] == 7 * m;
    checks++;
    failures += !right;
    if (!right)
        printf("FAIL head %dx%dx%d, type %d\n", m, n, k, (int)type);
}

template <typename T> static void test_all(bml_dtype type)
{
    test_products<T>(type);
    for (int n : {768, 1600, 1024, 2048, 20})
        for (int n_sums : {0, 1, 2, 4, 8})
            test_norm<T>(type, 37, n, n_sums, n_sums != 2, n_sums == 1 || n_sums == 4);
    for (int n : {1, 2, 9, 40, 130})
        for (int dim : {64, 128})
            for (bool clusters : {false, true})
                test_attention<T>(type, n, dim, clusters);
    for (int m : {1, 9, 64, 65, 130, 256}) {
        test_head<T>(type, m, 8192, 384);
        test_head<T>(type, m, 1001, 768);
    }
    test_head<T>(type, 64, 2, 1024);
}

int main(void)
{
    test_all<__nv_bfloat16>(BML_BF16);
    test_all<__half>(BML_F16);
    printf("%d checks, %d failed\n", checks, failures);
    return failures != 0;
}
