/* The CPU backend's own view of the seam's opaque types. */
#ifndef BML_BACKEND_CPU_CPU_H
#define BML_BACKEND_CPU_CPU_H

#include "backend/backend.h"
#include "backend/cpu/pool.h"

typedef struct bml_region bml_region;

struct bml_device {
    bml_pool *pool;      /* for packing weights; NULL until that is needed */
    size_t max_width;    /* the most inputs or outputs that any of its weights has */
    bml_region *regions; /* of weight_memory.c; the latest first */
};

/* The best id that one thread has found in its part of a row of logits. */
typedef struct bml_best {
    size_t id;
    float logit;
    bool any, finite;
} bml_best;

struct bml_queue {
    bml_device *device;
    bml_pool *pool;
    const bml_batch *batch; /* of the pass between begin and end */
    /* Memory for kernels, grown by begin and by nothing else, so that kernels cannot fail. Each
     * thread has a share of .bytes_each: see bml_cpu_begin. */
    char *memory;
    size_t bytes, bytes_each, own_rows_at, own_quantized_at, best_at;
    void *quantized;  /* rows of bml_quant_row for every token */
    float *second;    /* [BML_CPU_OWN_ROWS, the device's max_width]; see linear_rows.c */
    int32_t *of_rows; /* [3, n_rows]; see pass.c */
};

/* Row-major products pack panels of weights, up to BML_CPU_PANEL columns of half of the inputs,
 * into a thread's scratch: as many as fit this, or one; and twice that, as the next ones are packed
 * while these are in use. */
enum { BML_CPU_PACK_BYTES = 384 << 10, BML_CPU_PANEL = 32 };

/* At most this many queries have their scores in a thread's scratch at a time. */
enum { BML_CPU_QUERIES = 4 };

/* Up to this many rows are normed and quantised by every thread for itself. */
enum { BML_CPU_OWN_ROWS = 8 };

static inline void *bml_cpu_scratch(const bml_queue *queue, int part)
{
    return queue->memory + (size_t)part * queue->bytes_each;
}

static inline float *bml_cpu_own_rows(const bml_queue *queue, int part)
{
    return (float *)((char *)bml_cpu_scratch(queue, part) + queue->own_rows_at);
}

static inline void *bml_cpu_own_quantized(const bml_queue *queue, int part)
{
    return (char *)bml_cpu_scratch(queue, part) + queue->own_quantized_at;
}

static inline bml_best *bml_cpu_best(const bml_queue *queue, int part)
{
    return (bml_best *)((char *)bml_cpu_scratch(queue, part) + queue->best_at);
}

/* Splits N items into n_parts runs, each (but the last) a multiple of GRAIN long. */
static inline void bml_split(size_t n, size_t grain, int part, int n_parts, size_t *begin,
                             size_t *end)
{
    size_t grains = (n + grain - 1) / grain;
    *begin = grains * (size_t)part / (size_t)n_parts * grain;
    *end = grains * (size_t)(part + 1) / (size_t)n_parts * grain;
    if (*begin > n)
        *begin = n;
    if (*end > n)
        *end = n;
}

/* The instruction sets that kernels are built for; of one architecture's, best last. */
typedef enum bml_cpu_isa {
    BML_CPU_BASE, /* what every machine of the architecture has: SSE2, NEON */
    BML_CPU_AVX2, /* with FMA and F16C */
    BML_CPU_AVX512,
    BML_CPU_AVX512VNNI,
    BML_CPU_DOTPROD, /* Arm: NEON with the integer dot product, sdot */
    BML_CPU_N_ISAS
} bml_cpu_isa;

/* The backend with the kernels for one instruction set; NULL if this build or this machine does
 * not have it. */
const bml_backend *bml_cpu_backend(bml_cpu_isa isa);

/* "base", "avx2", "avx512", "avx512vnni", "dotprod" */
const char *bml_cpu_isa_name(bml_cpu_isa isa);

#endif
