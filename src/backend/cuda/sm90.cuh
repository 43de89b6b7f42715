/*
 * What Hopper's matrix units and copy engine are told, one PTX instruction a function: bulk tensor
 * copies, wgmma, clusters. Shared-memory addresses are 32-bit, of the shared window.
 */
#ifndef BML_BACKEND_CUDA_SM90_CUH
#define BML_BACKEND_CUDA_SM90_CUH

#include "backend/cuda/kernels/barrier.cuh"

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

/* A ring's place: the slot, and the parity of its current use. */
struct ring_place {
    int slot;
    uint32_t parity;

    /* By N places of a ring of SLOTS; N is at most that. */
    __device__ __forceinline__ void advance(int slots, int n = 1)
    {
        slot += n;
        if (slot >= slots) {
            slot -= slots;
            parity ^= 1;
        }
    }

    /* By any number of places. */
    __device__ __forceinline__ void skip(int slots, int n)
    {
        int rounds = (slot + n) / slots;
        slot += n - rounds * slots;
        parity ^= rounds & 1;
    }
};

/* ---- clusters ---- */

/* Arrives at the barrier in the same place of block RANK of the cluster. */
__device__ __forceinline__ void barrier_arrive_at(uint32_t barrier, uint32_t rank)
{
    asm volatile("{\n.reg .b32 remote;\n"
                 "mapa.shared::cluster.u32 remote, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier),
                 "r"(rank)
                 : "memory");
}

__device__ __forceinline__ uint32_t cluster_rank()
{
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

/* All threads of the cluster come here before any leaves: for barriers, whose initialisation has a
 * fence of its own. */
__device__ __forceinline__ void cluster_meet()
{
    asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait;" ::: "memory");
}

/* What all threads of the cluster did to shared memory before they arrived has been done when one
 * has waited. */
__device__ __forceinline__ void cluster_arrive()
{
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait()
{
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

__device__ __forceinline__ void cluster_exchange()
{
    cluster_arrive();
    cluster_wait();
}

/* What block RANK of the cluster has at an address of this block's. */
__device__ __forceinline__ float4 load_cluster(uint32_t address, uint32_t rank)
{
    float4 v;
    asm volatile("{\n.reg .b32 remote;\n"
                 "mapa.shared::cluster.u32 remote, %4, %5;\n"
                 "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [remote];\n}"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(address), "r"(rank)
                 : "memory");
    return v;
}

__device__ __forceinline__ void store_shared(uint32_t address, float x, float y, float z, float w)
{
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(x), "f"(y), "f"(z),
                 "f"(w)
                 : "memory");
}

/* Four 8x8 blocks of 16-bit elements, held as wgmma's sums are; lane l gives the address of row
 * l % 8 of block l / 8. */
__device__ __forceinline__ void store_blocks(uint32_t row, uint32_t b0, uint32_t b1, uint32_t b2,
                                             uint32_t b3)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
                 "r"(b0), "r"(b1), "r"(b2), "r"(b3)
                 : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t address, float x, float y)
{
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x), "f"(y) : "memory");
}

__device__ __forceinline__ float4 load_shared(uint32_t address)
{
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}

/* *to = v, or not: without a branch. */
__device__ __forceinline__ void store_if(bool condition, void *to, float4 v)
{
    asm volatile("{\n.reg .pred here;\n"
                 "setp.ne.b32 here, %0, 0;\n"
                 "@here st.global.v4.f32 [%1], {%2, %3, %4, %5};\n}" ::"r"((int)condition),
                 "l"(to), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
                 : "memory");
}

/* Waits for THREADS threads of the block, whole warps, at hardware barrier ID. */
__device__ __forceinline__ void barrier_sync(int id, int threads)
{
    asm volatile("barrier.cta.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* Counts for those who wait there, without waiting. */
__device__ __forceinline__ void barrier_arrive(int id, int threads)
{
    asm volatile("barrier.cta.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* ---- the copy engine ---- */

__device__ __forceinline__ void prefetch_map(const CUtensorMap *map)
{
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ __forceinline__ void load_box(uint32_t to, const CUtensorMap *map, uint32_t barrier,
                                         int x, int y)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4}], [%2];" ::"r"(to),
                 "l"(map), "r"(barrier), "r"(x), "r"(y)
                 : "memory");
}

__device__ __forceinline__ void load_box(uint32_t to, const CUtensorMap *map, uint32_t barrier,
                                         int x, int y, int z)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
                 "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z)
                 : "memory");
}

/* The same box to the same place in every block of MASK, each told at its own barrier. */
__device__ __forceinline__ void load_box_multicast(uint32_t to, const CUtensorMap *map,
                                                   uint32_t barrier, int x, int y, uint16_t mask)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
                 "l"(map), "r"(barrier), "r"(x), "r"(y), "h"(mask)
                 : "memory");
}

/* Adds a box of float32 to what is there; a thread's such copies can be waited for once bound. */
__device__ __forceinline__ void add_box(const CUtensorMap *map, uint32_t from, int x, int y)
{
    asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group "
                 "[%0, {%2, %3}], [%1];" ::"l"(map),
                 "r"(from), "r"(x), "r"(y)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/* Until all but PENDING of this thread's copies from shared memory have read it. */
template <int PENDING> __device__ __forceinline__ void boxes_read()
{
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

/* Until they are done. */
__device__ __forceinline__ void boxes_written()
{
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

/* Four bytes to shared memory, zeros where there are none. */
__device__ __forceinline__ void copy_word(uint32_t to, const void *from, bool there)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from),
                 "r"(there ? 4 : 0)
                 : "memory");
}

/* Until this thread's words have come. */
__device__ __forceinline__ void words_here()
{
    asm volatile("cp.async.wait_all;" ::: "memory");
}

/* Brings a line into the L2 cache. */
__device__ __forceinline__ void prefetch_line(const void *address)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

/* Makes a thread's own writes to shared memory visible to wgmma and the copy engine. */
__device__ __forceinline__ void shared_written_fence()
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* ---- wgmma ---- */

/* What the warps of a warpgroup hold of the block's registers. */
template <int REGISTERS> __device__ __forceinline__ void registers_grow()
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS> __device__ __forceinline__ void registers_shrink()
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

__device__ __forceinline__ void wgmma_begin()
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit()
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/* Until at most PENDING committed groups run. */
template <int PENDING> __device__ __forceinline__ void wgmma_wait()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

/* Keeps what reads the sums behind the wait before this, which the compiler does not see in them.
 */
template <int N> __device__ __forceinline__ void sums_ready(float (&d)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++)
        asm volatile("" : "+f"(d[i])::"memory");
}

/*
 * A tile in shared memory, 128-byte rows swizzled by the copy engine, 1024-byte aligned: rows of 64
 * elements along k ("k-major"). Eight rows of a tile are one 1024-byte atom.
 */
__device__ __forceinline__ uint64_t tile_descriptor(uint32_t address)
{
    return (uint64_t)((address & 0x3ffff) >> 4) | (uint64_t)1 << 16 | (uint64_t)(1024 >> 4) << 32 |
           (uint64_t)1 << 62;
}

/* Operand lists: 10 numbers from a tens digit, and 8 accumulators from an index. */
#define TEN(t)                                                                                     \
    "%" #t "0, %" #t "1, %" #t "2, %" #t "3, %" #t "4, %" #t "5, %" #t "6, %" #t "7, %" #t "8, "   \
    "%" #t "9, "
#define LIST24 TEN() TEN(1) "%20, %21, %22, %23"
#define LIST32 TEN() TEN(1) TEN(2) "%30, %31"
#define LIST48 TEN() TEN(1) TEN(2) TEN(3) "%40, %41, %42, %43, %44, %45, %46, %47"
#define LIST64 TEN() TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) "%60, %61, %62, %63"
#define LIST96 LIST90 "%90, %91, %92, %93, %94, %95"
#define LIST128 LIST90 TEN(9) TEN(10) TEN(11) "%120, %121, %122, %123, %124, %125, %126, %127"
#define LIST90 TEN() TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) TEN(6) TEN(7) TEN(8)
#define SUMS8(i)                                                                                   \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]),    \
        "+f"(d[i + 6]), "+f"(d[i + 7])
#define SUMS24(i) SUMS8(i), SUMS8(i + 8), SUMS8(i + 16)
#define SUMS32(i) SUMS8(i), SUMS8(i + 8), SUMS8(i + 16), SUMS8(i + 24)
#define SUMS48(i) SUMS32(i), SUMS8(i + 32), SUMS8(i + 40)
#define SUMS64(i) SUMS32(i), SUMS32(i + 32)
#define SUMS96(i) SUMS64(i), SUMS32(i + 64)
#define SUMS128(i) SUMS64(i), SUMS64(i + 64)

/* R is the number of accumulators; A, B and S are the operands after them. */
#define WGMMA(N, R, TYPE, A, B, S)                                                                 \
    asm volatile("{\n.reg .pred sum;\n"                                                            \
                 "setp.ne.b32 sum, %" #S ", 0;\n"                                                  \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" LIST##R      \
                 "}, "                                                                             \
                 "%" #A ", %" #B ", sum, 1, 1, 0, 0;\n}"                                           \
                 : SUMS##R(0)                                                                      \
                 : "l"(a), "l"(b), "r"(sum))

/* d (+)= a b over 16 of k: a 64 rows of a k-major tile, b N rows of another. Row 16 w + l / 4 (+ 8)
 * and columns 8 j + 2 (l % 4) (+ 1) of warp w, lane l are d[4 j], d[4 j + 1] (d[4 j + 2], ...). */
template <typename T, int N>
__device__ __forceinline__ void wgmma(float (&d)[N / 2], uint64_t a, uint64_t b, int sum)
{
    constexpr bool bf16 = __is_same(T, __nv_bfloat16);
    if constexpr (N == 48 && bf16)
        WGMMA(48, 24, "bf16", 24, 25, 26);
    else if constexpr (N == 48)
        WGMMA(48, 24, "f16", 24, 25, 26);
    else if constexpr (N == 64 && bf16)
        WGMMA(64, 32, "bf16", 32, 33, 34);
    else if constexpr (N == 64)
        WGMMA(64, 32, "f16", 32, 33, 34);
    else if constexpr (N == 96 && bf16)
        WGMMA(96, 48, "bf16", 48, 49, 50);
    else if constexpr (N == 96)
        WGMMA(96, 48, "f16", 48, 49, 50);
    else if constexpr (N == 128 && bf16)
        WGMMA(128, 64, "bf16", 64, 65, 66);
    else if constexpr (N == 128)
        WGMMA(128, 64, "f16", 64, 65, 66);
    else if constexpr (N == 192 && bf16)
        WGMMA(192, 96, "bf16", 96, 97, 98);
    else if constexpr (N == 192)
        WGMMA(192, 96, "f16", 96, 97, 98);
    else if constexpr (N == 256 && bf16)
        WGMMA(256, 128, "bf16", 128, 129, 130);
    else
        WGMMA(256, 128, "f16", 128, 129, 130);
}

#define WGMMA_ROWS(TYPE)                                                                           \
    asm volatile("{\n.reg .pred sum;\n"                                                            \
                 "setp.ne.b32 sum, %37, 0;\n"                                                      \
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" LIST32 "}, "     \
                 "{%32, %33, %34, %35}, %36, sum, 1, 1, 1;\n}"                                     \
                 : SUMS32(0)                                                                       \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1))

/* The same sum for 64 columns of an n-major tile, the rows of a in registers. */
template <typename T>
__device__ __forceinline__ void wgmma_rows(float (&d)[32], const uint32_t (&a)[4], uint64_t b)
{
    if constexpr (__is_same(T, __nv_bfloat16))
        WGMMA_ROWS("bf16");
    else
        WGMMA_ROWS("f16");
}

#undef TEN
#undef LIST24
#undef LIST32
#undef LIST48
#undef LIST64
#undef LIST96
#undef LIST128
#undef LIST90
#undef SUMS8
#undef SUMS24
#undef SUMS32
#undef SUMS48
#undef SUMS64
#undef SUMS96
#undef SUMS128
#undef WGMMA
#undef WGMMA_ROWS

#endif
