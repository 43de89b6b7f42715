/*
 * The prefill kernels against float64: every variant of the products with every epilogue, attention
 * over ragged batches, the norm. Outputs start as NaN; what lies around them must stay.
 */
#include "backend/cuda/attention.h"
#include "backend/cuda/product.h"
#include "helpers.cuh"

/* ---- products ---- */

template <typename T>
static __global__ void product_reference(double *out, const bml_cuda_product p)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= p.m * p.n)
        return;
    int row = i / p.n, column = i % p.n;
    double sum = p.bias ? p.bias[column] : 0;
    for (int k = 0; k < p.k; k++)
        sum += (double)(float)((const T *)p.a)[(size_t)row * p.a_pitch + k] *
               (double)(float)((const T *)p.w)[(size_t)column * p.k + k];
    out[i] = p.epilogue == BML_CUDA_ACTIVATION ? activated(sum, p.activation) : sum;
}

static const char *epilogue_names[] = {"activation", "store32", "residual", "qkv"};

/* One shape with one epilogue: the reference, then every kernel that takes it. */
template <typename T> struct product_case {
    bml_cuda_product p = {};
    size_t out_count;
    double *reference;
    float *x = nullptr; /* the residual stream before */

    product_case(bml_dtype type, int m, int n, int k, bml_cuda_epilogue epilogue,
                 bml_activation activation, bool bias, int gap)
    {
        p.type = type;
        p.m = m, p.n = n, p.k = k;
        p.a_pitch = k + gap;
        p.a = random_new<T>((size_t)m * p.a_pitch, 1);
        p.w = random_new<T>((size_t)n * k, 1 / sqrtf((float)k));
        p.bias = bias ? random_new<float>(n, 0.5f) : nullptr;
        p.epilogue = epilogue;
        p.activation = activation;
        p.out_pitch = (epilogue == BML_CUDA_QKV ? n / 3 : n) + gap;
        out_count = (size_t)(m + 1) * p.out_pitch;
        if (epilogue == BML_CUDA_RESIDUAL) {
            float *device = random_new<float>(out_count, 2);
            x = download(device, out_count);
            CHECK(cudaFree(device));
        }
        double *device;
        CHECK(cudaMalloc(&device, (size_t)m * n * sizeof(double)));
        product_reference<T><<<(m * n + 255) / 256, 256>>>(device, p);
        reference = download(device, (size_t)m * n);
        CHECK(cudaFree(device));
    }

    ~product_case()
    {
        CHECK(cudaFree((void *)p.a));
        CHECK(cudaFree((void *)p.w));
        CHECK(cudaFree((void *)p.bias));
        free(reference);
        free(x);
    }

    void judge(const char *kernel, const difference &d)
    {
        char name[200];
        snprintf(name, sizeof name, "product %s %dx%dx%d %s %s", kernel, p.m, p.n, p.k,
                 epilogue_names[p.epilogue], p.type == BML_F16 ? "f16" : "bf16");
        bool wide = p.epilogue == BML_CUDA_STORE32 || p.epilogue == BML_CUDA_RESIDUAL;
        d.judge(name, wide ? 2e-6 : p.type == BML_F16 ? 4e-4 : 3e-3);
    }

    template <typename O, typename F> void run_out(const char *kernel, F launch)
    {
        O *out = poison_new<O>(out_count);
        if (x)
            CHECK(cudaMemcpy(out, x, out_count * sizeof(O), cudaMemcpyHostToDevice));
        p.out = out;
        CHECK(launch());
        CHECK(cudaDeviceSynchronize());
        O *got = download(out, out_count);
        difference d;
        for (size_t i = 0; i < out_count; i++) {
            size_t row = i / p.out_pitch, column = i % p.out_pitch;
            if (row < (size_t)p.m && column < (size_t)p.n)
                d.add(number(got[i]), reference[row * p.n + column] + (x ? x[i] : 0));
            else if (x ? number(got[i]) != x[i] : !poisoned(got[i]))
                d.stray = true;
        }
        judge(kernel, d);
        free(got);
        CHECK(cudaFree(out));
    }

    template <typename F> void run_qkv(const char *kernel, F launch)
    {
        int width = p.n / 3, slots = 3, context = p.m + 9;
        bml_cuda_cache16 *c = &p.cache;
        c->head_dim = width % 64 ? width % 16 ? 5 : 16 : 64;
        c->n_head = width / c->head_dim, c->n_slots = slots, c->n_ctx = context;
        size_t cache_count = (size_t)slots * context * width;
        int32_t *slot = (int32_t *)malloc(p.m * sizeof *slot);
        int32_t *position = (int32_t *)malloc(p.m * sizeof *position);
        for (int i = 0; i < p.m; i++) {
            slot[i] = 2 - i % 3;
            position[i] = i + 7;
        }
        T *out = poison_new<T>(out_count), *k = poison_new<T>(cache_count),
          *v = poison_new<T>(cache_count);
        p.out = out, c->k = k, c->v = v;
        p.slot = upload(slot, p.m), p.position = upload(position, p.m);
        CHECK(launch());
        CHECK(cudaDeviceSynchronize());
        T *got[] = {download(out, out_count), download(k, cache_count), download(v, cache_count)};
        difference d;
        size_t written = 0;
        for (int part = 0; part < 3; part++)
            for (size_t i = 0; i < (part ? cache_count : out_count); i++)
                written += !poisoned(got[part][i]);
        for (int i = 0; i < p.m * p.n; i++) {
            int row = i / p.n, column = i % p.n, part = column / width, at = column % width;
            size_t line = ((size_t)slot[row] * c->n_head + at / c->head_dim) * context;
            size_t where = part ? (line + position[row]) * c->head_dim + at % c->head_dim
                                : (size_t)row * p.out_pitch + at;
            d.add(number(got[part][where]), reference[i]);
        }
        d.stray = written != (size_t)p.m * p.n;
        judge(kernel, d);
        void *device[] = {out, k, v, (void *)p.slot, (void *)p.position};
        for (void *buffer : device)
            CHECK(cudaFree(buffer));
        for (T *buffer : got)
            free(buffer);
        free(slot);
        free(position);
    }

    template <typename F> void run(const char *kernel, F launch)
    {
        if (p.epilogue == BML_CUDA_QKV)
            run_qkv(kernel, launch);
        else if (p.epilogue == BML_CUDA_STORE32 || p.epilogue == BML_CUDA_RESIDUAL)
            run_out<float>(kernel, launch);
        else
            run_out<T>(kernel, launch);
    }

    void run_all(bool sm90)
    {
        static const bml_cuda_tile tiles[] = {
            {64, 96, 1, false},   {128, 64, 1, false},  {128, 64, 2, false},  {128, 64, 4, false},
            {128, 96, 1, false},  {128, 96, 2, false},  {128, 96, 3, false},  {128, 128, 1, false},
            {128, 128, 2, false}, {128, 128, 4, false}, {128, 192, 1, false}, {128, 256, 1, false},
            {128, 128, 1, true},  {128, 192, 1, true},
        };
        run("sm80", [&] { return bml_cuda_product_sm80(&p, 0); });
        run("chosen", [&] { return bml_cuda_product16(&p, 0); });
        for (const bml_cuda_tile &tile : tiles) {
            char name[40];
            snprintf(name, sizeof name, "sm90 %dx%d/%d%s", tile.rows, tile.columns, tile.split,
                     tile.turns ? " in turns" : "");
            if (sm90 && tile.split <= (p.k + 63) / 64)
                run(name, [&] { return bml_cuda_product_sm90(&p, tile, 0); });
        }
    }
};

template <typename T> static void test_products(bml_dtype type)
{
    static const struct {
        int m, n, k, gap;
        bool sm90;
    } shapes[] = {{128, 192, 128, 0, true},  {1, 48, 64, 8, true},      {333, 576, 200, 8, true},
                  {257, 1536, 768, 0, true}, {640, 768, 1024, 8, true}, {77, 135, 65, 3, false},
                  {130, 255, 96, 1, false}};
    static const struct {
        bml_cuda_epilogue epilogue;
        bml_activation activation;
    } ends[] = {{BML_CUDA_ACTIVATION, BML_ACT_GELU_TANH}, {BML_CUDA_ACTIVATION, BML_ACT_GELU_ERF},
                {BML_CUDA_ACTIVATION, BML_ACT_RELU},      {BML_CUDA_STORE32, BML_ACT_RELU},
                {BML_CUDA_RESIDUAL, BML_ACT_RELU},        {BML_CUDA_QKV, BML_ACT_RELU}};
    for (const auto &s : shapes)
        for (const auto &e : ends)
            for (int bias = 0; bias < 2; bias++)
                product_case<T>(type, s.m, s.n, s.k, e.epilogue, e.activation, bias, s.gap)
                    .run_all(s.sm90);
    /* logits: rows of an odd length */
    product_case<T>(type, 70, 1001, 192, BML_CUDA_STORE32, BML_ACT_RELU, false, 0).run_all(true);
    product_case<T>(type, 200, 772, 128, BML_CUDA_RESIDUAL, BML_ACT_RELU, true, 0).run_all(true);
    /* more tiles than multiprocessors, so that blocks take several */
    product_case<T>(type, 3000, 1536, 136, BML_CUDA_QKV, BML_ACT_RELU, true, 0).run_all(true);
    product_case<T>(type, 4200, 1544, 800, BML_CUDA_RESIDUAL, BML_ACT_RELU, true, 8).run_all(true);
}

/* Sums so far below zero that their cubes are infinite: nothing is left of them. */
template <typename T> static void test_far_sums(bml_dtype type)
{
    enum { M = 70, N = 192 };
    product_case<T> far(type, M, N, 64, BML_CUDA_ACTIVATION, BML_ACT_GELU_TANH, true, 0);
    float bias[N];
    for (int i = 0; i < N; i++)
        bias[i] = -powf(10, (float)(2 + i % 37));
    CHECK(cudaMemcpy((void *)far.p.bias, bias, sizeof bias, cudaMemcpyHostToDevice));
    for (int i = 0; i < M * N; i++)
        far.reference[i] = 0;
    far.run_all(true);
}

/* ---- attention ---- */

template <typename T>
static __global__ void attention_reference(double *out, const bml_cuda_attention a,
                                           const int32_t *slot, const int32_t *position)
{
    int token = blockIdx.x, head = blockIdx.y, d = a.cache.head_dim, h = a.cache.n_head;
    const T *q = (const T *)a.q + (size_t)token * a.q_pitch + head * d;
    size_t line = ((size_t)slot[token] * h + head) * a.cache.n_ctx * d;
    const T *k = (const T *)a.cache.k + line, *v = (const T *)a.cache.v + line;
    double top = -INFINITY, sum = 0;
    for (int pass = 0; pass < 2; pass++) {
        for (int j = 0; j <= position[token]; j++) {
            double score = 0;
            for (int i = 0; i < d; i++)
                score += (double)(float)q[i] * (double)(float)k[(size_t)j * d + i];
            score *= a.scale;
            if (!pass) {
                top = fmax(top, score);
                continue;
            }
            double weight = exp(score - top);
            sum += weight;
            for (int i = threadIdx.x; i < d; i += blockDim.x)
                out[((size_t)token * h + head) * d + i] +=
                    weight * (double)(float)v[(size_t)j * d + i];
        }
    }
    for (int i = threadIdx.x; i < d; i += blockDim.x)
        out[((size_t)token * h + head) * d + i] /= sum;
}

/* A run of COUNT tokens of SLOT from POSITION on. */
struct run {
    int slot, position, count;
};

template <typename T>
static void test_attention(bml_dtype type, int head_dim, const run *runs, int n_runs)
{
    enum { SLOTS = 4, HEADS = 3, CONTEXT = 700 };
    int32_t token[2048] = {}, slot[2048], position[2048], reached[SLOTS] = {};
    int n = 0, width = HEADS * head_dim;
    for (const run *r = runs; r < runs + n_runs; r++)
        for (int i = 0; i < r->count; i++, n++) {
            slot[n] = r->slot;
            position[n] = r->position + i;
            if (reached[r->slot] <= position[n])
                reached[r->slot] = position[n] + 1;
        }
    bml_batch batch = {n, token, position, slot, 0, nullptr};
    bml_cuda_query_tile tiles[2048];
    bml_cuda_attention a = {};
    size_t cache_count = (size_t)SLOTS * HEADS * CONTEXT * head_dim, out_count = (size_t)n * width;
    a.type = type;
    a.q_pitch = 3 * width;
    T *q = random_new<T>((size_t)n * a.q_pitch, 2);
    T *k = random_new<T>(cache_count, 1), *v = random_new<T>(cache_count, 1);
    a.q = q, a.n_tokens = n, a.scale = 1 / sqrtf((float)head_dim);
    a.cache = {k, v, SLOTS, HEADS, CONTEXT, head_dim};
    a.n_tiles = bml_cuda_query_tiles(&batch, tiles);
    a.tiles = upload(tiles, a.n_tiles);
    for (int s = 0; s < SLOTS; s++)
        for (int h = 0; h < HEADS; h++) { /* past the sequence: NaN */
            size_t at = (((size_t)s * HEADS + h) * CONTEXT + reached[s]) * head_dim;
            size_t bytes = (size_t)(CONTEXT - reached[s]) * head_dim * sizeof(T);
            CHECK(cudaMemset(k + at, 0xff, bytes));
            CHECK(cudaMemset(v + at, 0xff, bytes));
        }
    int32_t *slots = upload(slot, n), *positions = upload(position, n);
    double *expected;
    CHECK(cudaMalloc(&expected, out_count * sizeof(double)));
    CHECK(cudaMemset(expected, 0, out_count * sizeof(double)));
    attention_reference<T><<<dim3(n, HEADS), 64>>>(expected, a, slots, positions);
    double *wanted = download(expected, out_count);

    for (int variant = 0; variant < 5; variant++) {
        static const bml_cuda_steps steps[] = {{64, 1}, {128, 1}, {64, 3}};
        char kernel[40];
        if (variant >= 2 && head_dim != 64)
            break;
        if (variant < 2)
            snprintf(kernel, sizeof kernel, variant ? "chosen" : "sm80");
        else
            snprintf(kernel, sizeof kernel, "sm90 %dx%d", steps[variant - 2].keys,
                     steps[variant - 2].groups);
        T *out = poison_new<T>(out_count + width);
        a.out = out;
        CHECK(variant == 0   ? bml_cuda_attention_sm80(&a, 0)
              : variant == 1 ? bml_cuda_attention16(&a, 0)
                             : bml_cuda_attention_sm90(&a, steps[variant - 2], 0));
        CHECK(cudaDeviceSynchronize());
        T *got = download(out, out_count + width);
        difference d;
        for (size_t i = 0; i < out_count; i++)
            d.add(number(got[i]), wanted[i]);
        for (int i = 0; i < width; i++)
            d.stray |= !poisoned(got[out_count + i]);
        char name[100];
        snprintf(name, sizeof name, "attention %s, %d tokens, heads of %d, %s", kernel, n, head_dim,
                 type == BML_F16 ? "f16" : "bf16");
        d.judge(name, type == BML_F16 ? 1e-3 : 6e-3);
        free(got);
        CHECK(cudaFree(out));
    }
    void *device[] = {q, k, v, (void *)a.tiles, slots, positions, expected};
    for (void *buffer : device)
        CHECK(cudaFree(buffer));
    free(wanted);
}

template <typename T> static void test_attentions(bml_dtype type)
{
    static const run whole[] = {{1, 0, 640}}, ragged[] = {{2, 0, 1},   {0, 37, 200}, {3, 511, 1},
                                                          {1, 0, 130}, {2, 1, 65},   {3, 512, 180}};
    static const int heads[] = {64, 5, 32, 80, 96, 128, 256};
    for (int d : heads) {
        test_attention<T>(type, d, whole, 1);
        test_attention<T>(type, d, ragged, 6);
    }
}

/* ---- the norm ---- */

template <typename T> static void test_norm(bml_dtype type, int rows, int n, bool bias, bool picked)
{
    float *x = random_new<float>((size_t)rows * n, 3), *weight = random_new<float>(n, 1),
          *b = random_new<float>(n, 1);
    T *out = poison_new<T>((size_t)rows * n + 8);
    int32_t *row = (int32_t *)malloc(rows * sizeof *row);
    for (int i = 0; i < rows; i++)
        row[i] = picked ? rows - 1 - i : i;
    int32_t *rows_at = upload(row, rows);
    CHECK(bml_cuda_norm16(type, out, x, picked ? rows_at : nullptr, weight, bias ? b : nullptr,
                          rows, n, 1e-5f, {{weight, b}, {(size_t)n / 4 * 16, 0}}, 0));
    CHECK(cudaDeviceSynchronize());
    T *got = download(out, (size_t)rows * n + 8);
    float *hx = download(x, (size_t)rows * n), *hw = download(weight, n), *hb = download(b, n);
    difference d;
    for (int r = 0; r < rows; r++) {
        const float *line = hx + (size_t)row[r] * n;
        double mean = 0, variance = 0;
        for (int i = 0; i < n; i++)
            mean += line[i] / (double)n;
        for (int i = 0; i < n; i++)
            variance += (line[i] - mean) * (line[i] - mean) / n;
        for (int i = 0; i < n; i++)
            d.add(number(got[(size_t)r * n + i]),
                  (line[i] - mean) / sqrt(variance + 1e-5) * hw[i] + (bias ? hb[i] : 0));
    }
    for (int i = 0; i < 8; i++)
        d.stray |= !poisoned(got[(size_t)rows * n + i]);
    char name[80];
    snprintf(name, sizeof name, "norm %dx%d %s", rows, n, type == BML_F16 ? "f16" : "bf16");
    d.judge(name, type == BML_F16 ? 4e-4 : 3e-3);
    void *device[] = {x, weight, b, out, rows_at}, *host[] = {got, hx, hw, hb, row};
    for (void *buffer : device)
        CHECK(cudaFree(buffer));
    for (void *buffer : host)
        free(buffer);
}

template <typename T> static void test_all(bml_dtype type)
{
    static const int widths[] = {768, 1600, 1024, 2048, 20, 77, 2052, 5120};
    for (int n : widths) {
        test_norm<T>(type, 37, n, true, false);
        test_norm<T>(type, 6, n, false, true);
    }
    test_attentions<T>(type);
    test_products<T>(type);
    test_far_sums<T>(type);
}

int main(void)
{
    test_all<__nv_bfloat16>(BML_BF16);
    test_all<__half>(BML_F16);
    printf("%d checks, %d failed\n", checks, failures);
    return failures != 0;
}
