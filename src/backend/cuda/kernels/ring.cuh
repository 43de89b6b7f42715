/*
 * A ring of stages in shared memory that one warp fills with bulk copies and the others consume.
 * Filling runs ahead of consuming as far as the ring is long: what is to come does not depend on
 * what is being computed. Needs compute capability 9.0.
 */
#ifndef BML_BACKEND_CUDA_KERNELS_RING_CUH
#define BML_BACKEND_CUDA_KERNELS_RING_CUH

#include "backend/cuda/kernels/common.cuh"

struct ring {
    char *stages;
    uint64_t *full, *empty; /* an mbarrier for each stage */
    int n_stages, stage_bytes;
    int at;         /* the stage that comes next */
    uint32_t round; /* parity of the rounds made */

    __device__ char *stage() const
    {
        return stages + at * stage_bytes;
    }

    /* N is at most n_stages. */
    __device__ void skip(int n)
    {
        at += n;
        if (at >= n_stages) {
            at -= n_stages;
            round ^= 1;
        }
    }

    __device__ void next()
    {
        skip(1);
    }
};

#if __CUDA_ARCH__ >= 900

__device__ static inline uint32_t shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

__device__ static inline void barrier_init(uint64_t *barrier, int arrivals)
{
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)),
                 "r"(arrivals));
}

__device__ static inline void barrier_wait(uint64_t *barrier, uint32_t parity)
{
    uint32_t done;
    do
        asm volatile("{\n"
                     ".reg .pred p;\n"
                     "mbarrier.try_wait.parity.shared.b64 p, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, p;\n"
                     "}"
                     : "=r"(done)
                     : "r"(shared_address(barrier)), "r"(parity)
                     : "memory");
    while (!done);
}

__device__ static inline void barrier_arrive(uint64_t *barrier)
{
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

/* Makes initialised barriers known to the copies. */
__device__ static inline void barrier_init_done(void)
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/* Arrives, and announces BYTES that copies will bring. */
__device__ static inline void barrier_expect(uint64_t *barrier, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
                 "r"(bytes)
                 : "memory");
}

/* Sixteen-byte aligned, a multiple of 16 bytes. STREAMED: read once, so last to stay in L2. */
__device__ static inline void bulk_copy(void *to, const void *from, uint32_t bytes,
                                        uint64_t *barrier, bool streamed)
{
    uint64_t policy;
    if (streamed)
        asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    else
        asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1], %2, [%3], %4;" ::"r"(shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
                 : "memory");
}

#endif

#endif
