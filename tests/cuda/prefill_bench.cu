/*
 * How fast the prefill kernels are: every product of GPT-2 124M and 1558M with every tile, beside
 * cuBLAS; attention; and a whole pass in a graph. Medians of graphs of many launches; weights
 * rotate through more memory than the L2 cache holds. What cuBLAS does is the product alone, with
 * 16-bit results, and for what is added to the residual stream also the same sum in float32.
 *
 *   nvcc -std=c++17 -O3 -gencode arch=compute_90a,code=sm_90a -Isrc -Iinclude \
 *        tests/cuda/prefill_bench.cu src/backend/cuda/{product,attention}*.cu \
 *        src/backend/cuda/{tensor_map,launch,norm16}.cu -lcublas -o prefill_bench
 */
#include "backend/cuda/attention.h"
#include "backend/cuda/product.h"
#include "backend/cuda/product_few.h"
#include "helpers.cuh"

#include <algorithm>
#include <cublas_v2.h>
#include <functional>
#include <string.h>
#include <vector>

static cudaStream_t stream;
static cublasHandle_t cublas;

using launcher = std::function<void(int)>;

static cudaGraphExec_t graph_of(int count, const launcher &launch)
{
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < count; i++)
        launch(i);
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&executable, graph, 0));
    CHECK(cudaGraphDestroy(graph));
    return executable;
}

/* Median seconds of one of COUNT launches captured into a graph, of each of LAUNCHES. The graphs
 * run in turn, so that none meets a cooler chip than another. */
static std::vector<double> time_graphs(int count, const std::vector<launcher> &launches)
{
    enum { ROUNDS = 7 };
    std::vector<cudaGraphExec_t> graphs;
    std::vector<std::vector<float>> times(launches.size());
    std::vector<double> medians;
    cudaEvent_t begin, end;
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    for (const launcher &launch : launches)
        graphs.push_back(graph_of(count, launch));
    for (int round = -1; round < ROUNDS; round++)
        for (size_t i = 0; i < graphs.size(); i++) {
            float ms;
            CHECK(cudaEventRecord(begin, stream));
            CHECK(cudaGraphLaunch(graphs[i], stream));
            CHECK(cudaEventRecord(end, stream));
            CHECK(cudaEventSynchronize(end));
            CHECK(cudaEventElapsedTime(&ms, begin, end));
            if (round >= 0)
                times[i].push_back(ms);
        }
    for (size_t i = 0; i < graphs.size(); i++) {
        CHECK(cudaGraphExecDestroy(graphs[i]));
        std::sort(times[i].begin(), times[i].end());
        medians.push_back(times[i][ROUNDS / 2] * 1e-3 / count);
    }
    CHECK(cudaEventDestroy(begin));
    CHECK(cudaEventDestroy(end));
    return medians;
}

static double time_graph(int count, const launcher &launch)
{
    return time_graphs(count, {launch})[0];
}

/* ---- products ---- */

static const bml_cuda_tile tiles[] = {
    {64, 96, 1, false},   {128, 64, 1, false},  {128, 64, 2, false},  {128, 96, 1, false},
    {128, 96, 2, false},  {128, 128, 1, false}, {128, 128, 2, false}, {128, 128, 4, false},
    {128, 192, 1, false}, {128, 256, 1, false}, {128, 128, 1, true},  {128, 192, 1, true},
};

/* out = a W^T, of TYPE; SUM: added to what is there. */
static void cublas_product(const bml_cuda_product &p, cudaDataType type, float sum)
{
    float one = 1;
    cublasStatus_t status = cublasGemmEx(cublas, CUBLAS_OP_T, CUBLAS_OP_N, p.n, p.m, p.k, &one, p.w,
                                         CUDA_R_16BF, p.k, p.a, CUDA_R_16BF, p.a_pitch, &sum, p.out,
                                         type, p.n, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
    if (status)
        printf("cuBLAS: %d\n", (int)status);
}

/* Tokens of sequences of up to 1024: where they go in the cache. */
struct places {
    int32_t *slot, *position;
    int sequences, length;

    places(int tokens) : length(std::min(tokens, 1024))
    {
        std::vector<int32_t> s(tokens), p(tokens);
        for (int i = 0; i < tokens; i++)
            s[i] = i / length, p[i] = i % length;
        sequences = s.back() + 1;
        slot = upload(s.data(), tokens);
        position = upload(p.data(), tokens);
    }

    ~places()
    {
        CHECK(cudaFree(slot));
        CHECK(cudaFree(position));
    }
};

static void bench_product(const char *name, int m, int n, int k, bml_cuda_epilogue epilogue)
{
    size_t w_count = (size_t)n * k, copies = std::max<size_t>(1, (200u << 20) / (w_count * 2));
    double flops = 2.0 * m * n * k;
    int count = (int)std::min(64.0, std::max(2.0, 3e-3 / (flops / 6e14 + 6e-6)));
    __nv_bfloat16 *a = random_new<__nv_bfloat16>((size_t)m * k, 1);
    __nv_bfloat16 *w = random_new<__nv_bfloat16>(w_count * copies, 0.03f);
    float *bias = random_new<float>(n, 1), *out = random_new<float>((size_t)m * n, 1);
    __nv_bfloat16 *cache = random_new<__nv_bfloat16>((size_t)m * n, 1);
    places at(m);
    bml_cuda_product p = {};
    p.type = BML_BF16, p.m = m, p.n = n, p.k = k, p.a = a, p.a_pitch = k;
    p.bias = epilogue == BML_CUDA_STORE32 ? nullptr : bias, p.epilogue = epilogue;
    p.out = out, p.out_pitch = epilogue == BML_CUDA_QKV ? n / 3 : n;
    p.cache = {cache, cache + (size_t)m * (n / 3), at.sequences, n / 3 / 64, at.length, 64};
    p.slot = at.slot, p.position = at.position;
    auto with = [&](int i) {
        p.w = w + w_count * (i % copies);
        return &p;
    };
    auto show = [&](const char *what, double t) {
        printf(" %s %.1f us %.0f", what, t * 1e6, flops / t * 1e-12);
    };
    bool sums = epilogue == BML_CUDA_RESIDUAL;
    cudaDataType type = epilogue == BML_CUDA_STORE32 ? CUDA_R_32F : CUDA_R_16BF;
    std::vector<launcher> launches = {
        [&](int i) { cublas_product(*with(i), type, 0); },
        [&](int i) { cublas_product(*with(i), sums ? CUDA_R_32F : type, sums); },
        [&](int i) { CHECK(bml_cuda_product16(with(i), stream)); }};
    for (const bml_cuda_tile &tile : tiles)
        launches.push_back([&](int i) { CHECK(bml_cuda_product_sm90(with(i), tile, stream)); });
    std::vector<double> times = time_graphs(count, launches);
    double peer = times[0], adding = times[1], ours = times[2];
    printf("%-5s %6d %6d %5d |", name, m, n, k);
    show("cuBLAS", peer);
    if (sums)
        show("adding", adding);
    printf(" |");
    size_t best = 3;
    for (size_t i = 3; i < times.size(); i++) {
        printf(" %.4g", times[i] * 1e6);
        if (times[i] < times[best])
            best = i;
    }
    const bml_cuda_tile *best_tile = tiles + (best - 3);
    printf(" | best %dx%d/%d%s", best_tile->rows, best_tile->columns, best_tile->split,
           best_tile->turns ? "t" : "");
    show("", times[best]);
    show(", chosen", ours);
    printf(" = %.2f of cuBLAS", peer / ours);
    if (sums)
        printf(", %.2f adding", adding / ours);
    printf("\n");
    fflush(stdout);
    void *device[] = {a, w, bias, out, cache};
    for (void *buffer : device)
        CHECK(cudaFree(buffer));
}

static void bench_products(int c, int largest)
{
    printf("product  m      n     k | us and TFLOP/s; us of tiles");
    for (const bml_cuda_tile &tile : tiles)
        printf(" %dx%d/%d%s", tile.rows, tile.columns, tile.split, tile.turns ? "t" : "");
    printf("\n");
    for (int m = 1024; m <= largest; m *= 8) {
        bench_product("qkv", m, 3 * c, c, BML_CUDA_QKV);
        bench_product("proj", m, c, c, BML_CUDA_RESIDUAL);
        bench_product("up", m, 4 * c, c, BML_CUDA_ACTIVATION);
        bench_product("down", m, c, 4 * c, BML_CUDA_RESIDUAL);
    }
    bench_product("head", 1024, 50257, c, BML_CUDA_STORE32);
}

/* ---- passes ---- */

/* A model's weights, all random, and room for a pass of SEQUENCES of LENGTH tokens. */
struct pass {
    int layers, c, heads, sequences, length, tokens;
    std::vector<__nv_bfloat16 *> w[4], keys, values;
    __nv_bfloat16 *wte, *normed, *q, *merged, *hidden;
    float *x0, *x, *vector, *logits;
    int32_t *row;
    places at;
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
          tokens(n_sequences * n_length), at(tokens)
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
                 void *out, int l)
    {
        bml_cuda_product p = {};
        p.type = BML_BF16, p.m = tokens, p.n = n, p.k = k, p.a = a, p.a_pitch = k, p.w = weights;
        p.bias = vector, p.epilogue = epilogue, p.out = out;
        p.out_pitch = epilogue == BML_CUDA_QKV ? n / 3 : n;
        p.cache = {keys[l], values[l], sequences, heads, length, 64};
        p.slot = at.slot, p.position = at.position;
        CHECK(bml_cuda_product16(&p, stream));
    }

    /* STEPS: NULL, what is chosen. */
    void attention(int l, const bml_cuda_steps *steps)
    {
        bml_cuda_attention a = {};
        a.type = BML_BF16, a.q = q, a.q_pitch = c, a.out = merged, a.n_tokens = tokens;
        a.cache = {keys[l], values[l], sequences, heads, length, 64};
        a.tiles = query_tiles, a.n_tiles = n_tiles, a.scale = 0.125f;
        CHECK(steps ? bml_cuda_attention_sm90(&a, *steps, stream)
                    : bml_cuda_attention16(&a, stream));
    }

    /* Products FIRST and SECOND of layer L, unless it is negative, come after it. */
    void norm(const int32_t *rows, int n, int l, int first, int second)
    {
        static const size_t factor[] = {3, 1, 4, 4};
        bml_cuda_ahead ahead = {};
        if (l >= 0)
            ahead = {{w[first][l], w[second][l]},
                     {factor[first] * c * c * 2, factor[second] * c * c * 2}};
        CHECK(
            bml_cuda_norm16(BML_BF16, normed, x, rows, vector, vector, n, c, 1e-5f, ahead, stream));
    }

    void head()
    {
        bml_cuda_product p = {};
        p.type = BML_BF16, p.m = sequences, p.n = 50257, p.k = c, p.a = normed, p.a_pitch = c;
        p.w = wte, p.epilogue = BML_CUDA_STORE32, p.out = logits;
        p.out_pitch = 50257;
        CHECK(bml_cuda_is_few(&p) ? bml_cuda_product_few(&p, nullptr, stream)
                                  : bml_cuda_product16(&p, stream));
    }

    void all()
    {
        CHECK(cudaMemcpyAsync(x, x0, (size_t)tokens * c * 4, cudaMemcpyDeviceToDevice, stream));
        for (int l = 0; l < layers; l++) {
            norm(nullptr, tokens, l, 0, 1);
            product(3 * c, c, normed, w[0][l], BML_CUDA_QKV, q, l);
            attention(l, nullptr);
            product(c, c, merged, w[1][l], BML_CUDA_RESIDUAL, x, l);
            norm(nullptr, tokens, l, 2, 3);
            product(4 * c, c, normed, w[2][l], BML_CUDA_ACTIVATION, hidden, l);
            product(c, 4 * c, hidden, w[3][l], BML_CUDA_RESIDUAL, x, l);
        }
        norm(row, sequences, -1, 0, 0);
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
    static const bml_cuda_steps steps[] = {{64, 1}, {128, 1}, {64, 3}};
    double chosen = time_graph(count, [&](int l) { p.attention(l, nullptr); });
    printf(" chosen %.1f (%.0f)", chosen * 1e6, flops / chosen * 1e-12);
    for (const bml_cuda_steps &s : steps) {
        double a = time_graph(count, [&](int l) { p.attention(l, &s); });
        printf(" %dx%d %.1f (%.0f)", s.keys, s.groups, a * 1e6, flops / a * 1e-12);
    }
    double n = time_graph(count, [&](int) { p.norm(nullptr, p.tokens, -1, 0, 0); });
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
        bench_products(768, 65536);
        bench_products(1600, 8192);
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
