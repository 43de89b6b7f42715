/*
 * What blocks of a cluster tell each other: stores into another block's shared memory that arrive
 * at an mbarrier there, which knows how many bytes it waits for. Needs compute capability 9.0.
 */
#ifndef BML_BACKEND_CUDA_KERNELS_CLUSTER_CUH
#define BML_BACKEND_CUDA_KERNELS_CLUSTER_CUH

#include "backend/cuda/kernels/ring.cuh"

#if __CUDA_ARCH__ >= 900

/* The address at which block RANK of the cluster has what is at HERE in this one. */
__device__ static inline uint32_t address_in(uint32_t here, int rank)
{
    uint32_t address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(here), "r"(rank));
    return address;
}

/* Stores 16, 8 or 4 bytes, and arrives with them at BARRIER, addresses in the same block. */
__device__ static inline void send_to(uint32_t to, float4 v, uint32_t barrier)
{
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], "
                 "{%1, %2, %3, %4}, [%5];" ::"r"(to),
                 "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(barrier)
                 : "memory");
}

__device__ static inline void send_to(uint32_t to, float2 v, uint32_t barrier)
{
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], "
                 "{%1, %2}, [%3];" ::"r"(to),
                 "f"(v.x), "f"(v.y), "r"(barrier)
                 : "memory");
}

__device__ static inline void send_to(uint32_t to, float v, uint32_t barrier)
{
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(to),
        "f"(v), "r"(barrier)
        : "memory");
}

/* Says that this thread is here, and waits until every thread of the cluster is; by whole warps. */
__device__ static inline void arrive_at_cluster(void)
{
    asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
}

__device__ static inline void await_cluster(void)
{
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}

#endif

#endif
