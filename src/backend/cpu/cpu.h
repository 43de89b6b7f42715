/* The CPU backend's own view of the seam's opaque types. */
#ifndef BML_BACKEND_CPU_CPU_H
#define BML_BACKEND_CPU_CPU_H

#include "backend/backend.h"
#include "backend/cpu/pool.h"

struct bml_queue {
    bml_pool *pool;
    const bml_batch *batch; /* of the pass between begin and end */
    /* Scratch memory of each thread, for kernels that pack or keep scores; grown by begin and by
     * nothing else, so that kernels cannot fail. */
    size_t scratch_bytes;
    char *scratch; /* n_threads * scratch_bytes, 64-byte aligned */
};

/* What linear packs panels of weights into. */
enum { BML_CPU_PACK_BYTES = 256 << 10 };

static inline void *bml_cpu_scratch(const bml_queue *queue, int part)
{
    return queue->scratch + (size_t)part * queue->scratch_bytes;
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

/* The instruction sets that kernels are built for, best last. */
typedef enum bml_cpu_isa { BML_CPU_BASE, BML_CPU_AVX2, BML_CPU_AVX512, BML_CPU_N_ISAS } bml_cpu_isa;

/* The backend with the kernels for one instruction set; NULL if this build or this machine does
 * not have it. */
const bml_backend *bml_cpu_backend(bml_cpu_isa isa);

#endif
