/*
 * mbarriers: where threads and copies meet in shared memory. Addresses are 32-bit, of the shared
 * window. Need compute capability 9.0.
 */
#ifndef BML_BACKEND_CUDA_KERNELS_BARRIER_CUH
#define BML_BACKEND_CUDA_KERNELS_BARRIER_CUH

#include <stdint.h>

__device__ __forceinline__ uint32_t shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

/* Makes initialised barriers visible to the copy engine and to the cluster. */
__device__ __forceinline__ void barrier_init_fence()
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/* Waits for the end of the phase of this parity. compute-sanitizer's racecheck takes long for a
 * look, and others wait meanwhile: built for that tool (kernels/ring.cuh) there is a pause between
 * two. */
#ifdef BML_RACECHECK
#define BETWEEN_LOOKS "@!done nanosleep.u32 20000;\n"
#else
#define BETWEEN_LOOKS ""
#endif
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity)
{
    asm volatile("{\n.reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n" BETWEEN_LOOKS
                 "@!done bra again;\n}" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
}

#endif
