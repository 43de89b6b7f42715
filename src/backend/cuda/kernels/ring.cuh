/*
 * A ring of stages in shared memory that one warp fills with bulk copies and the others consume.
 * Filling runs ahead of consuming as far as the ring is long: what is to come does not depend on
 * what is being computed. Needs compute capability 9.0.
 */
#ifndef BML_BACKEND_CUDA_KERNELS_RING_CUH
#define BML_BACKEND_CUDA_KERNELS_RING_CUH

#include "backend/cuda/kernels/barrier.cuh"

struct ring {
    char *stages;
    uint32_t full, empty; /* addresses: an mbarrier for each stage */
    int n_stages, stage_bytes;
    int at;         /* the stage that comes next */
    uint32_t round; /* parity of the rounds made */

    __device__ char *stage() const
    {
        return stages + at * stage_bytes;
    }

    /* The stage that comes I after that. */
    __device__ char *stage_at(int i) const
    {
        return stages + place(i) * stage_bytes;
    }

    __device__ uint32_t full_at(int i) const
    {
        return full + place(i) * 8;
    }

    __device__ uint32_t round_at(int i) const
    {
        return at + i < n_stages ? round : round ^ 1;
    }

    __device__ uint32_t empty_at(int i) const
    {
        return empty + place(i) * 8;
    }

    __device__ int place(int i) const
    {
        return at + i < n_stages ? at + i : at + i - n_stages;
    }

    __device__ uint32_t full_now() const
    {
        return full + at * 8;
    }

    __device__ uint32_t empty_now() const
    {
        return empty + at * 8;
    }

    __device__ void next(int n = 1)
    {
        at += n;
        if (at >= n_stages) {
            at -= n_stages;
            round ^= 1;
        }
    }
};

#if __CUDA_ARCH__ >= 900

/*
 * compute-sanitizer's racecheck takes a bulk copy for a store of the thread that asks for it, and
 * does not know that it is over when its mbarrier says so, nor that a lane which arrives behind
 * __syncwarp speaks for its warp. For that tool, built with -DBML_RACECHECK, all lanes arrive, also
 * those of the warp that fills the ring, which store what they copy themselves, and arrive when
 * that is done. It is the same ring, with the same waits.
 */
#ifdef BML_RACECHECK
enum { ARRIVALS = 32 };
#else
enum { ARRIVALS = 1 };
#endif

/* Whether the lane is one of those that arrive for their warp. */
__device__ static inline bool lane_speaks(void)
{
    return threadIdx.x % 32 < ARRIVALS;
}

/* Sets up the mbarriers of N_STAGES, those that say that a stage is full and behind them those that
 * say that READERS warps have read it, and behind these N more for one arrival. By N_THREADS. */
__device__ static inline void init_barriers(uint32_t first, int n_stages, int readers, int n,
                                            int n_threads)
{
    for (int i = threadIdx.x; i < 2 * n_stages + n; i += n_threads)
        barrier_init(first + 8 * i, i < n_stages       ? ARRIVALS
                                    : i < 2 * n_stages ? readers * ARRIVALS
                                                       : 1);
    barrier_init_fence();
}

/* A warp has read N stages: ARRIVALS at the mbarrier of each that says that it is empty. */
__device__ static inline void stages_read(const ring &r, int lane, int n)
{
    __syncwarp();
    if (ARRIVALS > 1)
        for (int i = 0; i < n; i++)
            barrier_arrive(r.empty_at(i));
    else if (lane < n)
        barrier_arrive(r.empty_at(lane));
}

/* A group of copies that arrive at one mbarrier: BYTES in all, announced before the first one. */
__device__ static inline void copies_begin(uint32_t barrier, uint32_t bytes)
{
#ifndef BML_RACECHECK
    barrier_expect(barrier, bytes);
#endif
}

/* Sixteen-byte aligned, a multiple of 16 bytes. KEPT: read again, so last to leave L2; if not, the
 * first. */
__device__ static inline void bulk_copy(void *to, const void *from, uint32_t bytes,
                                        uint32_t barrier, bool kept)
{
#ifdef BML_RACECHECK
    for (uint32_t i = threadIdx.x % 32; i < bytes / sizeof(uint4); i += 32)
        ((uint4 *)to)[i] = __ldcg((const uint4 *)from + i);
#else
    uint64_t policy;
    if (kept)
        asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    else
        asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1], %2, [%3], %4;" ::"r"(shared_address(to)),
                 "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
                 : "memory");
#endif
}

__device__ static inline void copies_end(uint32_t barrier)
{
#ifdef BML_RACECHECK
    barrier_arrive(barrier);
#endif
}

#endif

#endif
