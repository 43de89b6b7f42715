/*
 * How fast the prefill kernels are: every product of GPT-2 124M and 1558M with every tile, beside
 * cuBLAS; attention; and a whole pass in a graph. Medians of graphs of many launches; weights
 * rotate through more memory than the L2 cache holds.
 *
 *   nvcc -std=c++17 -O3 -gencode arch=compute_90a,code=sm_90a -Isrc -Iinclude \
 *        tests/cuda/prefill_bench.cu src/backend/cuda/{product,attention}*.cu \
 *        src/backend/cuda/{tensor_map,launch,norm16}.cu -lcublas -o prefill_bench
 */
#include "backend/cuda/attention.h"
#include "backend/cuda/product.h"
#include "helpers.cuh"

#include <algorithm>
#include <cublas_v2.h>
#include <string.h>
#include <vector>

static cudaStream_t stream;
static cublasHandle_t cublas;

/* Median seconds of one of COUNT launches captured into a graph. */
template <typename F> static double time_graph(int count, F launch)
{
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    cudaEvent_t begin, end;
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < count; i++)
        launch(i);
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&executable, graph, 0));
    std::vector<float> times;
    for (int i = 0; i < 7; i++) {
        float ms;
        CHECK(cudaEventRecord(begin, stream));
        CHECK(cudaGraphLaunch(executable, stream));
        CHECK(cudaEventRecord(end, stream));
        CHECK(cudaEventSynchronize(end));
        CHECK(cudaEventElapsedTime(&ms, begin, end));
        if (i > 1)
            times.push_back(ms);
    }
    CHECK(cudaGraphExecDestroy(executable));
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaEventDestroy(begin));
    CHECK(cudaEventDestroy(end));
    std::sort(times.begin(), times.end());
    return times[times.size() / 2] * 1e-3 / count;
}

/* ---- products ---- */

static const bml_cuda_tile tiles[] = {{64, 1},  {64, 2},  {96, 1},  {96, 2}, {128, 1},
                                      {128, 2}, {128, 4}, {192, 1}, {256, 1}};

static void cublas_product(const bml_cuda_product &p, bool wide)
{
    float one = 1, zero = 0;
    cublasOperation_t op = p.out_in ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasStatus_t status =
        cublasGemmEx(cublas, op, CUBLAS_OP_N, p.n, p.m, p.k, &one, p.w, CUDA_R_16BF,
                     p.out_in ? p.k : p.n, p.a, CUDA_R_16BF, p.a_pitch, &zero, p.out,
                     wide ? CUDA_R_32F : CUDA_R_16BF, p.n, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
    if (status)
        printf("cuBLAS: %d\n", (int)status);
}

static void bench_product(const char *name, int m, int n, int k, bml_cuda_epilogue epilogue,
                          bool out_in)
{
    size_t w_count = (size_t)n * k, copies = std::max<size_t>(1, (200u << 20) / (w_count * 2));
    double flops = 2.0 * m * n * k;
    int count = (int)std::min(64.0, std::max(2.0, 3e-3 / (flops / 6e14 + 6e-6)));
    __nv_bfloat16 *a = random_new<__nv_bfloat16>((size_t)m * k, 1);
    __nv_bfloat16 *w = random_new<__nv_bfloat16>(w_count * copies, 0.03f);
    float *bias = random_new<float>(n, 1), *out = random_new<float>((size_t)m * n, 1);
    bml_cuda_product p = {};
    p.type = BML_BF16, p.m = m, p.n = n, p.k = k, p.a = a, p.a_pitch = k, p.out_in = out_in;
    p.bias = out_in ? nullptr : bias, p.epilogue = epilogue, p.out = out, p.out_pitch = n;
    auto at = [&](int i) {
        p.w = w + w_count * (i % copies);
        return &p;
    };
    bool wide = epilogue == BML_CUDA_STORE32;
    double peer = time_graph(count, [&](int i) { cublas_product(*at(i), wide); });
    printf("%-5s %6d %6d %5d | cuBLAS %7.1f us %4.0f |", name, m, n, k, peer * 1e6,
           flops / peer * 1e-12);
    double best = 1;
    const bml_cuda_tile *best_tile = tiles;
    for (const bml_cuda_tile &tile : tiles) {
        double t =
            time_graph(count, [&](int i) { CHECK(bml_cuda_product_sm90(at(i), tile, stream)); });
        printf(" %.4g", t * 1e6);
        if (t < best)
            best = t, best_tile = &tile;
    }
    double ours = time_graph(count, [&](int i) { CHECK(bml_cuda_product16(at(i), stream)); });
    printf(" | best %d/%d %.1f us %.0f, chosen %.1f us %.0f = %.2f of cuBLAS\n", best_tile->columns,
           best_tile->split, best * 1e6, flops / best * 1e-12, ours * 1e6, flops / ours * 1e-12,
           peer / ours);
    fflush(stdout);
    void *device[] = {a, w, bias, out};
    for (void *buffer : device)
        CHECK(cudaFree(buffer));
}

static void bench_products(int c, bool large)
{
    printf("product  m      n     k | us and TFLOP/s; us of tiles");
    for (const bml_cuda_tile &tile : tiles)
        printf(" %d/%d", tile.columns, tile.split);
    printf("\n");
    static const int sizes[] = {1024, 8192, 65536};
    for (int m : sizes) {
        if (m > 8192 && !large)
            break;
        bench_product("qkv", m, 3 * c, c, BML_CUDA_STORE16, false);
        bench_product("proj", m, c, c, BML_CUDA_RESIDUAL, false);
        bench_product("up", m, 4 * c, c, BML_CUDA_ACTIVATION, false);
        bench_product("down", m, c, 4 * c, BML_CUDA_RESIDUAL, false);
        if (m <= 8192)
            bench_product("head", m, 50257, c, BML_CUDA_STORE32, true);
    }
    bench_product("head", 1, 50257, c, BML_CUDA_STORE32, true);
    bench_product("head", 64, 50257, c, BML_CUDA_STORE32, true);
}

/* ---- passes ---- */

/* A model's weights, all random, and room for a pass of SEQUENCES of LENGTH tokens. */
struct pass {
    int layers, c, heads, sequences, length, tokens;
    std::vector<__nv_bfloat16 *> w[4], keys, values;
    __nv_bfloat16 *wte, *normed, *q, *merged, *hidden;
    float *x0, *x, *vector, *logits;
    int32_t *slot, *position, *row;
    bml_cuda_query_tile *query_tiles;
    int n_tiles;
    std::vector<void *> owned;

    template <typename T> T *keep(T *p)
    {
        owned.push_back((void *)p);
        return p;
    }

    pass(int n_layer, int n_embd, int n_sequences, int n_length)
        : layers(n_layer), c(n_embd), heads(n_embd / 64), sequences(n_sequences), length(n_length),
          tokens(n_sequences * n_length)
    {
        size_t cc = (size_t)c * c, tc = (size_t)tokens * c;
        static const int factor[] = {3, 1, 4, 4};
        for (int l = 0; l < layers; l++) {
            for (int i = 0; i < 4; i++)
                w[i].push_back(keep(random_new<__nv_bfloat16>(factor[i] * cc, 0.02f)));
            keys.push_back(keep(random_new<__nv_bfloat16>(tc, 1)));
            values.push_back(keep(random_new<__nv_bfloat16>(tc, 1)));
        }
        wte = keep(random_new<__nv_bfloat16>((size_t)50257 * c, 0.02f));
        normed = keep(random_new<__nv_bfloat16>(tc, 1));
        q = keep(random_new<__nv_bfloat16>(tc, 1));
        merged = keep(random_new<__nv_bfloat16>(tc, 1));
        hidden = keep(random_new<__nv_bfloat16>(4 * tc, 1));
        x0 = keep(random_new<float>(tc, 1));
        x = keep(random_new<float>(tc, 1));
        vector = keep(random_new<float>(4 * c, 1));
        logits = keep(random_new<float>((size_t)sequences * 50257, 1));
        std::vector<int32_t> s(tokens), p(tokens), r(sequences);
        for (int i = 0; i < tokens; i++)
            s[i] = i / length, p[i] = i % length;
        for (int i = 0; i < sequences; i++)
            r[i] = (i + 1) * length - 1;
        std::vector<bml_cuda_query_tile> t(tokens);
        bml_batch batch = {tokens, s.data(), p.data(), s.data(), 0, nullptr};
        n_tiles = bml_cuda_query_tiles(&batch, t.data());
        slot = keep(upload(s.data(), tokens));
        position = keep(upload(p.data(), tokens));
        row = keep(upload(r.data(), sequences));
        query_tiles = keep(upload(t.data(), n_tiles));
    }

    ~pass()
    {
        for (void *p : owned)
            CHECK(cudaFree(p));
    }

    double flops() const
    {
        return 24.0 * layers * tokens * c * c + 2.0 * layers * sequences * length * length * c +
               2.0 * sequences * 50257 * c;
    }

    void product(int n, int k, const void *a, const void *weights, bml_cuda_epilogue epilogue,
                 void *out, int l, int tile = -1)
    {
        bml_cuda_product p = {};
        p.type = BML_BF16, p.m = tokens, p.n = n, p.k = k, p.a = a, p.a_pitch = k, p.w = weights;
        p.bias = vector, p.epilogue = epilogue, p.out = out;
        p.out_pitch = epilogue == BML_CUDA_QKV ? n / 3 : n;
        p.cache = {keys[l], values[l], sequences, heads, length, 64};
        p.slot = slot, p.position = position;
        CHECK(tile < 0 ? bml_cuda_product16(&p, stream)
                       : bml_cuda_product_sm90(&p, tiles[tile], stream));
    }

    void attention(int l, int variant)
    {
        bml_cuda_attention a = {};
        a.type = BML_BF16, a.q = q, a.q_pitch = c, a.out = merged, a.n_tokens = tokens;
        a.cache = {keys[l], values[l], sequences, heads, length, 64};
        a.tiles = query_tiles, a.n_tiles = n_tiles, a.scale = 0.125f;
        CHECK(variant == 0   ? bml_cuda_attention16(&a, stream)
              : variant == 3 ? bml_cuda_attention_sm80(&a, stream)
                             : bml_cuda_attention_sm90(&a, 64 * variant, stream));
    }

    void norm(const int32_t *rows, int n)
    {
        CHECK(bml_cuda_norm16(BML_BF16, normed, x, rows, vector, vector, n, c, 1e-5f, stream));
    }

    void head()
    {
        bml_cuda_product p = {};
        p.type = BML_BF16, p.m = sequences, p.n = 50257, p.k = c, p.a = normed, p.a_pitch = c;
        p.w = wte, p.out_in = true, p.epilogue = BML_CUDA_STORE32, p.out = logits;
        p.out_pitch = 50257;
        CHECK(bml_cuda_product16(&p, stream));
    }

    void all()
    {
        CHECK(cudaMemcpyAsync(x, x0, (size_t)tokens * c * 4, cudaMemcpyDeviceToDevice, stream));
        for (int l = 0; l < layers; l++) {
            norm(nullptr, tokens);
            product(3 * c, c, normed, w[0][l], BML_CUDA_QKV, q, l);
            attention(l, 0);
            product(c, c, merged, w[1][l], BML_CUDA_RESIDUAL, x, l);
            norm(nullptr, tokens);
            product(4 * c, c, normed, w[2][l], BML_CUDA_ACTIVATION, hidden, l);
            product(c, 4 * c, hidden, w[3][l], BML_CUDA_RESIDUAL, x, l);
        }
        norm(row, sequences);
        head();
    }
};

static void bench_pass(const char *name, int layers, int c, int sequences, int length)
{
    pass p(layers, c, sequences, length);
    double t = time_graph(1, [&](int) { p.all(); });
    printf("pass %s %dx%d: %.1f us, %.0f TFLOP/s, %.0f tok/s\n", name, sequences, length, t * 1e6,
           p.flops() / t * 1e-12, p.tokens / t);
    int count = layers;
    double flops = 2.0 * sequences * length * (double)length * c;
    printf("  attention us (TFLOP/s):");
    static const char *variants[] = {"chosen", "64 keys", "128 keys", "mma.sync"};
    for (int v = 0; v < 4; v++) {
        double a = time_graph(count, [&](int l) { p.attention(l, v); });
        printf(" %s %.1f (%.0f)", variants[v], a * 1e6, flops / a * 1e-12);
    }
    double n = time_graph(count, [&](int) { p.norm(nullptr, p.tokens); });
    printf("\n  norm %.1f us (%.0f GB/s)", n * 1e6, p.tokens * 6.0 * c / n * 1e-9);
    n = time_graph(count,
                   [&](int l) { p.product(3 * c, c, p.normed, p.w[0][l], BML_CUDA_QKV, p.q, l); });
    printf(" qkv %.1f", n * 1e6);
    n = time_graph(count,
                   [&](int l) { p.product(c, c, p.merged, p.w[1][l], BML_CUDA_RESIDUAL, p.x, l); });
    printf(" proj %.1f", n * 1e6);
    n = time_graph(count, [&](int l) {
        p.product(4 * c, c, p.normed, p.w[2][l], BML_CUDA_ACTIVATION, p.hidden, l);
    });
    printf(" up %.1f", n * 1e6);
    n = time_graph(
        count, [&](int l) { p.product(c, 4 * c, p.hidden, p.w[3][l], BML_CUDA_RESIDUAL, p.x, l); });
    printf(" down %.1f", n * 1e6);
    n = time_graph(count, [&](int) { p.head(); });
    printf(" head %.1f us\n", n * 1e6);
    fflush(stdout);
}

int main(int argc, char **argv)
{
    const char *what = argc > 1 ? argv[1] : "all";
    CHECK(cudaStreamCreate(&stream));
    if (cublasCreate(&cublas) || cublasSetStream(cublas, stream))
        return fprintf(stderr, "no cuBLAS\n"), 1;
    void *workspace;
    CHECK(cudaMalloc(&workspace, 64 << 20));
    cublasSetWorkspace(cublas, workspace, 64 << 20);
    if (!strcmp(what, "all") || !strcmp(what, "products")) {
        bench_products(768, true);
        bench_products(1600, false);
    }
    if (!strcmp(what, "all") || !strcmp(what, "passes")) {
        bench_pass("124M", 12, 768, 1, 1024);
        bench_pass("124M", 12, 768, 8, 1024);
        bench_pass("124M", 12, 768, 64, 1024);
        bench_pass("1558M", 48, 1600, 1, 1024);
        bench_pass("1558M", 48, 1600, 8, 1024);
    }
    return 0;
}
