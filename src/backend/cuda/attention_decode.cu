/*
 * Attention of one query a head: nothing but reading keys and values once. Matrix units see sixteen
 * keys at a time, and the query as all of their rows, for that costs what one row would. Each warp
 * has a ring in shared memory of what it will look at next: no warp waits for another. All keys but
 * a token's own are there before the pass begins, so the first of them come while the kernel in
 * front still runs. Where there are too few queries to keep the memory busy, the blocks of a
 * cluster split the keys and join what they have through each other's shared memory.
 */
#include "backend/cuda/attention_decode.h"
#include "backend/cuda/epilogue.cuh"
#include "backend/cuda/kernels/softmax.cuh"
#include "backend/cuda/launch.cuh"
#include "backend/cuda/mma_sm80.cuh"

#include <cooperative_groups.h>

namespace cg = cooperative_groups;

enum {
    WARPS = 2,
    KEYS = 16, /* in a slot of a warp's ring */
    DEPTH = 3, /* slots */
    STEP = WARPS * KEYS,
    AT_ONCE = 8,            /* blocks that a multiprocessor has room for, of heads of 64 */
    OTHER_SHARED = 3 << 10, /* bytes of a block besides its ring */
};

/* What is read once is the first to leave L2: weights, and keys that come next, are there too. */
__device__ static uint64_t read_once()
{
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

/* Sixteen bytes of FROM to shared memory; zeros if it is not there. */
__device__ static void copy_async(uint4 *to, const uint4 *from, bool there, uint64_t policy)
{
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(
                     (uint32_t)__cvta_generic_to_shared(to)),
                 "l"(from), "r"(there ? 16 : 0), "l"(policy)
                 : "memory");
}

/* Copies since the last call are a group. */
__device__ static void copies_end()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Until at most PENDING groups are on their way. */
template <int PENDING> __device__ static void copies_wait()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

/* A slot: keys, then their values, whose pieces of 16 bytes lie such that the same piece of eight
 * neighbours is in different banks. */
template <int D> struct slot_of {
    enum { PIECES = D / 8 };
    uint4 pieces[2][KEYS * PIECES];

    __device__ uint4 *at(int which, int key, int piece)
    {
        return &pieces[which][key * PIECES + (piece ^ key % 8)];
    }
};

/* A softmax on its way, of scores that are logarithms to base two: the largest score, the sum of
 * exp2(score - top), of each lane's scores alone, and of that times v as matrix units leave it,
 * rows 0 to 7 and 8 to 15 to be added. */
template <typename T, int D> struct softmax {
    float top = -INFINITY, sum = 0, v[D / 8][4] = {};

    /* Adds a slot's keys, N of which are there. */
    __device__ __forceinline__ void add(slot_of<D> &slot, int n, const uint32_t (&q)[D / 16][2],
                                        float scale)
    {
        int lane = threadIdx.x % 32;
        float s[2][4] = {};
#pragma unroll
        for (int i = 0; i < D / 16; i++) {
            uint32_t k[4], rows[4] = {q[i][0], q[i][0], q[i][1], q[i][1]};
            load_blocks(k, slot.at(0, lane / 16 * 8 + lane % 8, 2 * i + lane / 8 % 2));
            mma<T>(s[0], rows, k[0], k[1]);
            mma<T>(s[1], rows, k[2], k[3]);
        }
        float most = top;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int key = i / 2 * 8 + lane % 4 * 2 + i % 2;
            float &score = s[i / 2][i % 2];
            score = key < n ? score * scale : -INFINITY;
            most = most_of(most, score);
        }
        most = most_of(most, __shfl_xor_sync(~0u, most, 1));
        most = most_of(most, __shfl_xor_sync(~0u, most, 2));
        if (most == -INFINITY)
            return;
        if (most != top) { /* all lanes or none */
            float before = exp2_fast(top - most);
            sum *= before;
#pragma unroll
            for (int i = 0; i < D / 8 * 4; i++)
                v[i / 4][i % 4] *= before;
            top = most;
        }
        uint32_t p[4]; /* rows 0 to 7 have it in T, the others what rounding left of it */
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float a = exp2_fast(s[i][0] - top), b = exp2_fast(s[i][1] - top);
            sum += a + b;
            p[2 * i] = pack<T>(a, b);
            float2 kept = two_of<T>(p[2 * i]);
            p[2 * i + 1] = pack<T>(a - kept.x, b - kept.y);
        }
#pragma unroll
        for (int i = 0; i < D / 16; i++) {
            uint32_t values[4];
            load_blocks_transposed(values, slot.at(1, lane % 16, 2 * i + lane / 16));
            mma<T>(v[2 * i], p, values[0], values[1]);
            mma<T>(v[2 * i + 1], p, values[2], values[3]);
        }
    }
};

/* What a warp or a block has of a head: as above, v complete. */
template <int D> struct state {
    float top, sum;
    float2 v[D / 2];
};

template <typename T, int D>
static __global__ void __launch_bounds__(32 * WARPS, AT_ONCE * 64 / D)
    attention(bml_cuda_attention a, const int32_t *slot, const int32_t *position)
{
    constexpr int PIECES = D / 8;
    extern __shared__ __align__(128) char shared[];
    __shared__ state<D> states[WARPS];
    int split = blockIdx.x, n_splits = gridDim.x, h = blockIdx.y, t = blockIdx.z;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    slot_of<D> *ring = (slot_of<D> *)shared + warp * DEPTH;
    uint64_t policy = read_once();
    allow_next();
    int n = position[t]; /* keys before the token's own */
    int each = (n + n_splits * KEYS) / (n_splits * KEYS) * KEYS;
    int begin = split * each + warp * KEYS, end = min((split + 1) * each, n + 1);
    size_t head = ((size_t)slot[t] * a.cache.n_head + h) * a.cache.n_ctx;
    const uint4 *k = (const uint4 *)((const T *)a.cache.k + head * D);
    const uint4 *v = (const uint4 *)((const T *)a.cache.v + head * D);
    auto fetch = [&](int first, int place) {
#pragma unroll
        for (int i = lane; i < KEYS * PIECES && first < end; i += 32) {
            int key = i / PIECES, piece = i % PIECES;
            bool there = first + key < end;
            size_t from = there ? (size_t)(first + key) * PIECES + piece : 0;
            copy_async(ring[place].at(0, key, piece), k + from, there, policy);
            copy_async(ring[place].at(1, key, piece), v + from, there, policy);
        }
        copies_end();
    };
    bool early = begin + KEYS <= n; /* one slot: q would have to wait behind more */
    if (early)
        fetch(begin, 0);
    await_previous();

    uint32_t q[D / 16][2];
    const uint32_t *own = (const uint32_t *)((const T *)a.q + (size_t)t * a.q_pitch + h * D);
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
        q[i][0] = own[8 * i + lane % 4];
        q[i][1] = own[8 * i + 4 + lane % 4];
    }
    if (!early)
        fetch(begin, 0);
    for (int i = 1; i < DEPTH; i++)
        fetch(begin + i * STEP, i);
    softmax<T, D> found;
    int place = 0;
    for (int first = begin; first < end; first += STEP) {
        copies_wait<DEPTH - 1>();
        __syncwarp();
        found.add(ring[place], end - first, q, a.scale * 1.44269504f /* log2 e */);
        __syncwarp();
        fetch(first + DEPTH * STEP, place);
        place = place + 1 == DEPTH ? 0 : place + 1;
    }
    state<D> &mine = states[warp];
#pragma unroll
    for (int step = 1; step < 4; step *= 2)
        found.sum += __shfl_xor_sync(~0u, found.sum, step);
    if (lane == 0) {
        mine.top = found.top;
        mine.sum = found.sum;
    }
#pragma unroll
    for (int i = 0; i < D / 8; i++) /* eight lanes have the same: each has its part to write */
        if (i % 8 == lane / 4)
            mine.v[4 * i + lane % 4] =
                make_float2(found.v[i][0] + found.v[i][2], found.v[i][1] + found.v[i][3]);
    __syncthreads();

    /* A thread joins two elements. */
    float top = -INFINITY, sum = 0;
    float2 joined = make_float2(0, 0);
    auto join = [&](const state<D> *of, int n_states) {
        float most = top;
        for (int i = 0; i < n_states; i++)
            most = most_of(most, of[i].top);
        if (most == -INFINITY)
            return;
        float before = exp2_fast(top - most);
        sum *= before;
        joined.x *= before;
        joined.y *= before;
        top = most;
        for (int i = 0; i < n_states; i++) {
            float weight = exp2_fast(of[i].top - most);
            float2 v = of[i].v[threadIdx.x];
            sum = fmaf(weight, of[i].sum, sum);
            joined = make_float2(fmaf(weight, v.x, joined.x), fmaf(weight, v.y, joined.y));
        }
    };
    bool joins = threadIdx.x < D / 2;
    if (joins)
        join(states, WARPS);
#if __CUDA_ARCH__ >= 900
    if (n_splits > 1) {
        cg::cluster_group cluster = cg::this_cluster();
        cluster.sync();
        for (int r = 1; r < n_splits && split == 0 && joins; r++)
            join(cluster.map_shared_rank(states, r), WARPS);
        cluster.sync(); /* nobody ends while it is being read */
    }
#endif
    if (split == 0 && joins)
        ((uint32_t *)((T *)a.out + (size_t)t * a.cache.n_head * D + h * D))[threadIdx.x] =
            pack<T>(joined.x / sum, joined.y / sum);
}

template <class T> static const void *kernel_for(int head_dim)
{
    return head_dim == 64 ? (const void *)attention<T, 64> : (const void *)attention<T, 128>;
}

/* Blocks that are all there at once should be as many on each multiprocessor, also when the first
 * ones come while some still have blocks of the kernel in front: each takes the room of so many. */
static size_t room_of(const bml_cuda_chip *chip, int blocks, size_t needs)
{
    size_t each = (size_t)bml_cuda_divided_up(blocks, chip->units);
    size_t room = (size_t)chip->shared / each;
    return room > needs + OTHER_SHARED ? (room - OTHER_SHARED) / 128 * 128 : needs;
}

cudaError_t bml_cuda_attention_decode(const bml_cuda_attention *a, const int32_t *slot,
                                      const int32_t *position, bool clusters, cudaStream_t stream)
{
    bml_cuda_chip chip;
    cudaError_t error = bml_cuda_current_chip(&chip);
    if (error)
        return error;
    /* Enough blocks that every multiprocessor has two. */
    int n_splits = 1, queries = a->n_tokens * a->cache.n_head;
    while (clusters && n_splits < 8 && queries * n_splits < 2 * chip.units)
        n_splits *= 2;
    const void *kernel = a->type == BML_BF16 ? kernel_for<__nv_bfloat16>(a->cache.head_dim)
                                             : kernel_for<__half>(a->cache.head_dim);
    bml_cuda_attention copy = *a;
    void *arguments[] = {&copy, &slot, &position};
    dim3 grid((unsigned)n_splits, (unsigned)a->cache.n_head, (unsigned)a->n_tokens);
    size_t ring = (size_t)WARPS * DEPTH * KEYS * 2 * a->cache.head_dim * 2;
    return bml_cuda_launch_within(kernel, grid, 32 * WARPS, n_splits,
                                  room_of(&chip, queries * n_splits, ring), room_of(&chip, 1, ring),
                                  arguments, stream);
}
