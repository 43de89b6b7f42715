/*
 * The products and the attention of GPT-2, each on its own, against the machine's limits as
 * measured just before, and sampling: bench_kernels [WIDTH [THREADS]]. WIDTH is n_embd (default
 * 768). A product of few tokens goes round enough copies of its matrix that no cache holds them;
 * one of 512 tokens does not care. Medians of several runs.
 */
#include "backend/cpu/cpu.h"
#include "backend/cpu/quant.h"
#include "base/clock.h"
#include "base/dtype.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { RUNS = 15, MAX_COPIES = 64, TOKENS = 512, HEAD_DIM = 64 };
static const size_t far_more_than_caches = (size_t)256 << 20;

static const bml_backend *b;
static bml_device *device;
static bml_queue *queue;
static bml_limits limits;
static int32_t zeros[TOKENS], positions[TOKENS];

static void *check(void *memory)
{
    if (!memory) {
        fprintf(stderr, "bench_kernels: out of memory\n");
        exit(1);
    }
    return memory;
}

static void require(bml_status status, const bml_error *err)
{
    if (status) {
        fprintf(stderr, "bench_kernels: %s\n", err->message);
        exit(1);
    }
}

static int by_value(const void *x, const void *y)
{
    double a = *(const double *)x, c = *(const double *)y;
    return (a > c) - (a < c);
}

static bml_buffer buffer_of(size_t n)
{
    bml_error err;
    bml_buffer buffer;
    require(b->buffer_new(device, n * sizeof(float), &buffer, &err), &err);
    for (size_t i = 0; i < n; i++)
        ((float *)buffer.data)[i] = (float)(i * 7919 % 1000) * 0.001f - 0.5f;
    return buffer;
}

static void begin(int n_tokens)
{
    static bml_batch batch;
    bml_error err;
    batch = (bml_batch){.n_tokens = n_tokens, .token = zeros, .position = positions, .slot = zeros};
    require(b->begin(queue, &batch, &err), &err);
}

static void product(int n_in, int n_out, bool out_in, bml_weight_format format, int n_tokens)
{
    static const char *const names[] = {"file", "f32", "bf16", "f16", "q8", "q4"};
    bml_error err;
    size_t n = (size_t)n_in * (size_t)n_out;
    bml_buffer x = buffer_of((size_t)n_tokens * (size_t)n_in);
    bml_buffer out = buffer_of((size_t)n_tokens * (size_t)n_out), none = {0};
    bml_buffer values = buffer_of(n);
    bml_matrix matrix = {values.data, BML_F32, out_in ? n_out : n_in, out_in ? n_in : n_out, false};
    bml_weight w[MAX_COPIES];
    size_t copies = 0, bytes = 0;
    do {
        if (format == BML_WEIGHTS_F32) { /* would use the values in place */
            matrix.data = check(malloc(n * sizeof(float)));
            memcpy((void *)matrix.data, values.data, n * sizeof(float));
        }
        require(b->weight_new(device, &matrix, out_in, format, &w[copies], &err), &err);
        bytes += w[copies++].buffer.bytes;
    } while (n_tokens < TOKENS && bytes < far_more_than_caches && copies < MAX_COPIES);

    double seconds[RUNS];
    begin(n_tokens);
    for (int run = 0; run < RUNS; run++) {
        double start = bml_now();
        for (size_t i = 0; i < copies; i++)
            b->linear(queue, &out, &x, &w[i], &none, n_tokens);
        seconds[run] = (bml_now() - start) / (double)copies;
    }
    qsort(seconds, RUNS, sizeof *seconds, by_value);
    double time = seconds[RUNS / 2], flops = 2.0 * (double)n * n_tokens / time;
    double rate = (double)w[0].buffer.bytes / time;
    double peak = bml_is_packed(format) ? limits.int8_ops_per_s : limits.flops_per_s;
    printf("%-4s %5d x %-5d %s %3d tokens %9.3f ms %8.1f GFLOP/s %3.0f%% of peak %6.1f GB/s "
           "%3.0f%% of bandwidth\n",
           names[format], n_in, n_out, out_in ? "[out, in]" : "[in, out]", n_tokens, 1e3 * time,
           1e-9 * flops, 100 * flops / peak, 1e-9 * rate, 100 * rate / limits.read_bytes_per_s);
    for (size_t i = 0; i < copies; i++) {
        if (format == BML_WEIGHTS_F32)
            free(w[i].buffer.data);
        b->weight_free(device, &w[i]);
    }
    b->buffer_free(device, &x);
    b->buffer_free(device, &out);
    b->buffer_free(device, &values);
}

/* A prompt of TOKENS, or one token behind as many. */
static void attention(int n_head, bml_dtype dtype, int n_tokens)
{
    size_t n = (size_t)n_head * TOKENS * HEAD_DIM;
    bml_buffer k = buffer_of(n), v = buffer_of(n), q = buffer_of(n), out = buffer_of(n);
    memset(k.data, 0, k.bytes); /* the values do not matter, but must be finite in every dtype */
    memset(v.data, 0, v.bytes);
    bml_kv_cache cache = {dtype, 1, 1, TOKENS, n_head, HEAD_DIM, &k, &v};
    for (int t = 0; t < TOKENS; t++)
        positions[t] = n_tokens == 1 ? TOKENS - 1 : t;
    double seconds[RUNS], keys = n_tokens == 1 ? TOKENS : TOKENS * (TOKENS + 1) / 2.0;
    begin(n_tokens);
    for (int run = 0; run < RUNS; run++) {
        double start = bml_now();
        b->attention_cached(queue, &out, &q, &cache, 0, 0.125f);
        seconds[run] = bml_now() - start;
    }
    qsort(seconds, RUNS, sizeof *seconds, by_value);
    printf("attention, %-4s cache, %3d tokens %9.3f ms, %.2f ns a key and head\n",
           bml_dtype_name(dtype), n_tokens, 1e3 * seconds[RUNS / 2],
           1e9 * seconds[RUNS / 2] / (keys * n_head));
    b->buffer_free(device, &k);
    b->buffer_free(device, &v);
    b->buffer_free(device, &q);
    b->buffer_free(device, &out);
    memset(positions, 0, sizeof positions);
}

/* A draw from logits that are about as far apart as a language model's. */
static void sampling(int top_k, float top_p)
{
    enum { VOCAB = 50257 };
    static float logits[VOCAB];
    bml_sampling s = bml_sampling_default();
    bml_error err;
    double seconds[RUNS];
    uint32_t random = 1;
    for (int i = 0; i < VOCAB; i++) {
        logits[i] = -30;
        for (int j = 0; j < 12; j++) {
            random = random * 1664525 + 1013904223;
            logits[i] += 5 * ((float)(random >> 8) * 0x1p-24f - 0.5f);
        }
    }
    s.top_k = top_k;
    s.top_p = top_p;
    for (int run = 0; run < RUNS; run++) {
        int32_t token;
        double start = bml_now();
        require(bml_sample(&s, logits, VOCAB, NULL, 0, (uint64_t)run, &token, &err), &err);
        seconds[run] = bml_now() - start;
    }
    qsort(seconds, RUNS, sizeof *seconds, by_value);
    printf("sampling, top_k %2d, top_p %.2f, of %d logits %9.3f ms\n", top_k, (double)top_p, VOCAB,
           1e3 * seconds[RUNS / 2]);
}

int main(int n_arguments, char **arguments)
{
    int width = n_arguments > 1 ? atoi(arguments[1]) : 768;
    int n_threads = n_arguments > 2 ? atoi(arguments[2]) : 0;
    bml_error err;
    if (width < HEAD_DIM || width > 8192 || width % HEAD_DIM) {
        fprintf(stderr, "bench_kernels: WIDTH must be a multiple of 64 up to 8192\n");
        return 2;
    }
    b = bml_backend_cpu();
    require(b->open(&device, &err), &err);
    require(b->queue_new(device, n_threads, &queue, &err), &err);
    require(b->measure(queue, &limits, &err), &err);
    printf("%d threads: reads %.1f GB/s, float32 %.0f GFLOP/s, int8 %.0f GOP/s\n",
           b->queue_threads(queue), 1e-9 * limits.read_bytes_per_s, 1e-9 * limits.flops_per_s,
           1e-9 * limits.int8_ops_per_s);
    static const int tokens[] = {1, 8, TOKENS};
    for (int t = 0; t < 3; t++)
        for (int format = BML_WEIGHTS_F32; format <= BML_WEIGHTS_Q4; format++) {
            product(width, 4 * width, false, (bml_weight_format)format, tokens[t]);
            product(4 * width, width, false, (bml_weight_format)format, tokens[t]);
            product(width, 16384, true, (bml_weight_format)format, tokens[t]);
        }
    for (int dtype = BML_F32; dtype <= BML_BF16; dtype++)
        for (int n_tokens = 1; n_tokens <= TOKENS; n_tokens += TOKENS - 1)
            attention(width / HEAD_DIM, (bml_dtype)dtype, n_tokens);
    sampling(40, 1);
    sampling(0, 1);
    sampling(0, 0.95f);
    b->queue_free(queue);
    b->close(device);
    return 0;
}
