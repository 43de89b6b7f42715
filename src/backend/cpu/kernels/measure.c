/* What this machine can do: the two numbers that every speed is held against. */
#include "backend/cpu/kernels/kernels.h"

#include "base/clock.h"
#include "base/error.h"

#include <stdlib.h>
#include <sys/mman.h>

enum { REPEATS = 7, CHAINS = 12, AHEAD_BYTES = 8192 };
static const size_t read_bytes = (size_t)512 << 20; /* far more than any cache holds */
static const size_t fma_steps = 2000000;

typedef struct job {
    const float *data;
    bool ask;    /* for memory in advance, or leave that to the processor */
    float *sink; /* one element a thread, so that no work can be optimised away */
} job;

static void touch_part(void *context, int part, int n_parts)
{
    size_t begin, end;
    bml_split(read_bytes, 4096, part, n_parts, &begin, &end);
    memset((char *)((job *)context)->data + begin, 0, end - begin);
}

static void read_part(void *context, int part, int n_parts)
{
    const job *j = context;
    size_t begin, end;
    bml_split(read_bytes / sizeof(float), 8 * VL, part, n_parts, &begin, &end);
    vf sum[8] = {0};
    for (const float *p = j->data + begin; p < j->data + end; p += 8 * VL)
        for (int i = 0; i < 8; i++) {
            if (j->ask)
                __builtin_prefetch((const char *)(p + i * VL) + AHEAD_BYTES);
            sum[i] += vf_load(p + i * VL);
        }
    for (int i = 1; i < 8; i++)
        sum[0] += sum[i];
    j->sink[part] = vf_sum(sum[0]);
}

static void fma_part(void *context, int part, int n_parts)
{
    (void)n_parts;
    const job *j = context;
    vf sum[CHAINS], a = vf_set1(j->data[0] + 0.5f), b = vf_set1(j->data[1] + 0.25f);
    for (int i = 0; i < CHAINS; i++) /* all different, or the compiler would run one for all */
        sum[i] = vf_set1((float)i);
    for (size_t step = 0; step < fma_steps; step++)
#pragma GCC unroll 16 /* the chains must be registers */
        for (int i = 0; i < CHAINS; i++)
            sum[i] = vf_fma(sum[i], a, b);
    for (int i = 1; i < CHAINS; i++)
        sum[0] += sum[i];
    j->sink[part] = vf_sum(sum[0]);
}

static void dot_part(void *context, int part, int n_parts)
{
    (void)n_parts;
    const job *j = context;
    int8_t bytes[64];
    for (int i = 0; i < 64; i++)
        bytes[i] = (int8_t)((int)j->data[0] + (i % 2 ? -1 : 1)); /* sums that stay small */
    const fours x = fours_of(bytes);
    vi sum[CHAINS], w = vi_load(bytes);
    for (int i = 0; i < CHAINS; i++)
        sum[i] = i - (vi){0};
    for (size_t step = 0; step < fma_steps; step++) {
#pragma GCC unroll 16 /* the chains must be registers */
        for (int i = 0; i < CHAINS; i++)
            sum[i] = vi_dot4(sum[i], w, &x, (size_t)i);
        w += 1; /* or, made of several instructions, some products would be the same ones */
    }
    vf total = {0};
    for (int i = 0; i < CHAINS; i++)
        total += __builtin_convertvector(sum[i], vf);
    j->sink[part] = vf_sum(total);
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The median time of REPEATS runs. */
static double time_of(bml_queue *queue, void (*work)(void *, int, int), job *j)
{
    double times[REPEATS];
    for (int i = 0; i < REPEATS; i++) {
        double begin = bml_now();
        bml_pool_run(queue->pool, work, j);
        times[i] = bml_now() - begin;
    }
    qsort(times, REPEATS, sizeof *times, by_value);
    return times[REPEATS / 2];
}

bml_status KERNEL(measure)(bml_queue *queue, bml_limits *limits, bml_error *err)
{
    int n_threads = bml_pool_threads(queue->pool);
    const size_t page = (size_t)2 << 20;
    job j = {.data = aligned_alloc(page, read_bytes),
             .sink = calloc((size_t)n_threads, sizeof(float))};
    bml_status status = BML_OK;
    if (!j.data || !j.sink) {
        status = bml_fail_memory(err, read_bytes, "measuring the memory's bandwidth");
    } else {
#ifdef MADV_HUGEPAGE
        madvise((void *)j.data, read_bytes, MADV_HUGEPAGE); /* as weights are, weight_memory.c */
#endif
        bml_pool_run(queue->pool, touch_part, &j);
        double unasked = time_of(queue, read_part, &j);
        j.ask = true;
        double asked = time_of(queue, read_part, &j); /* which is better depends on the machine */
        limits->read_bytes_per_s = (double)read_bytes / (asked < unasked ? asked : unasked);
        double lanes = (double)VL * CHAINS * (double)fma_steps * n_threads;
        limits->flops_per_s = 2 * lanes / time_of(queue, fma_part, &j);
        limits->int8_ops_per_s = 8 * lanes / time_of(queue, dot_part, &j);
    }
    free((void *)j.data);
    free(j.sink);
    return status;
}
