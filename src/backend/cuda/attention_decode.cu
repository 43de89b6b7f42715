/*
 * Attention of one query a head: nothing but reading keys and values once. Eight lanes or sixteen
 * share a key. Each warp has a ring in shared memory of what it will look at next, and of that each
 * lane copies what it needs itself: nobody waits for anybody. All keys but a token's own are there
 * before the pass begins, so the first of them come while the kernel in front still runs. Where
 * there are too few queries to keep the memory busy, the blocks of a cluster split the keys and
 * join what they have through each other's shared memory.
 */
#include "backend/cuda/attention_decode.h"
#include "backend/cuda/launch.cuh"

#include <cooperative_groups.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace cg = cooperative_groups;

enum {
    WARPS = 4,
    KEYS = 8,  /* of a lane, in a slot of the ring */
    DEPTH = 2, /* slots */
};

/* Eight 16-bit elements as floats. */
template <class T> __device__ static void widen(float to[8], uint4 from)
{
    const uint32_t words[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float2 f;
        if constexpr (__is_same(T, __nv_bfloat16))
            f = make_float2(__uint_as_float(words[i] << 16),
                            __uint_as_float(words[i] & 0xffff0000u));
        else
            f = __half22float2(*(const __half2 *)&words[i]);
        to[2 * i] = f.x;
        to[2 * i + 1] = f.y;
    }
}

/* A softmax on its way: the largest score, the sum of exp2(score - max), and of that times v. */
struct state {
    float max, sum, v[8];

    __device__ void join(float other_max, float other_sum, const float other_v[8])
    {
        float top = other_max > max || other_max != other_max ? other_max : max; /* NaN stays */
        if (top == -INFINITY) /* both are empty */
            return;
        float mine = exp2f(max - top), theirs = exp2f(other_max - top);
        max = top;
        sum = sum * mine + other_sum * theirs;
#pragma unroll
        for (int i = 0; i < 8; i++)
            v[i] = v[i] * mine + other_v[i] * theirs;
    }

    /* With the lane STEP away. */
    __device__ void join(int step)
    {
        float other_v[8];
#pragma unroll
        for (int i = 0; i < 8; i++)
            other_v[i] = __shfl_xor_sync(~0u, v[i], step);
        join(__shfl_xor_sync(~0u, max, step), __shfl_xor_sync(~0u, sum, step), other_v);
    }
};

/* Sixteen bytes of FROM, which is read once, to shared memory. */
__device__ static void copy_async(uint4 *to, const uint4 *from)
{
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(
                     (uint32_t)__cvta_generic_to_shared(to)),
                 "l"(from)
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

/* The product of a lane's part of the query with that of a key, summed over the LANES of the key.
 */
template <class T, int LANES> __device__ static float score_of(const float q[8], uint4 key)
{
    float f[8], sum = 0;
    widen<T>(f, key);
#pragma unroll
    for (int i = 0; i < 8; i++)
        sum = fmaf(q[i], f[i], sum);
#pragma unroll
    for (int step = LANES / 2; step; step /= 2)
        sum += __shfl_xor_sync(~0u, sum, step);
    return sum;
}

template <class T, int D>
static __global__ void __launch_bounds__(32 * WARPS)
    attention(bml_cuda_attention a, const int32_t *slot, const int32_t *position)
{
    constexpr int LANES = D / 8, AT_ONCE = 32 / LANES; /* keys of a warp's one load */
    constexpr int CHUNK = KEYS * AT_ONCE, STEP = WARPS * CHUNK;
    extern __shared__ uint4 ring[][DEPTH][2 * KEYS][32];
    __shared__ state states[WARPS][LANES];
    int split = blockIdx.x, n_splits = gridDim.x, h = blockIdx.y, t = blockIdx.z;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, part = lane % LANES;
    allow_next();
    int n = position[t]; /* keys before the token's own */
    int each = (n + n_splits * CHUNK - 1) / (n_splits * CHUNK) * CHUNK;
    int begin = min(split * each, n), end = min(begin + each, n);
    size_t head = ((size_t)slot[t] * a.cache.n_head + h) * a.cache.n_ctx;
    const uint4 *k = (const uint4 *)((const T *)a.cache.k + head * D) + part;
    const uint4 *v = (const uint4 *)((const T *)a.cache.v + head * D) + part;
    auto fetch = [&](int first, int place) {
#pragma unroll
        for (int j = 0; j < KEYS && first < end; j++) {
            size_t key = (size_t)min(first + j * AT_ONCE + lane / LANES, end - 1);
            copy_async(&ring[warp][place][j][lane], k + key * LANES);
            copy_async(&ring[warp][place][KEYS + j][lane], v + key * LANES);
        }
        copies_end();
    };
    begin += warp * CHUNK;
    fetch(begin, 0); /* one: q would have to wait behind more */
    await_previous();

    float q[8];
    uint4 own_q = ((const uint4 *)((const T *)a.q + (size_t)t * a.q_pitch + h * D))[part];
    uint4 own_k = k[(size_t)n * LANES], own_v = v[(size_t)n * LANES];
    for (int i = 1; i < DEPTH; i++)
        fetch(begin + i * STEP, i);
    widen<T>(q, own_q);
#pragma unroll
    for (int i = 0; i < 8; i++)
        q[i] *= a.scale * 1.44269504f; /* log2 e */
    state own = {-INFINITY, 0, {}};
    if (split == 0 && warp == 0) { /* the token's own key, which came just now */
        float score = score_of<T, LANES>(q, own_k);
        if (lane < LANES && score != -INFINITY) {
            own.max = score;
            own.sum = 1 + (score - score); /* NaN unless it is finite */
            widen<T>(own.v, own_v);
        }
    }
    int place = 0;
    for (int first = begin; first < end; first += STEP) {
        float score[KEYS], top = own.max;
        copies_wait<DEPTH - 1>();
#pragma unroll
        for (int j = 0; j < KEYS; j++) {
            score[j] = score_of<T, LANES>(q, ring[warp][place][j][lane]);
            if (first + j * AT_ONCE + lane / LANES >= end)
                score[j] = -INFINITY;
            top = score[j] > top || score[j] != score[j] ? score[j] : top; /* NaN stays */
        }
        if (top != -INFINITY) {
            float before = exp2f(own.max - top);
            own.max = top;
            own.sum *= before;
#pragma unroll
            for (int i = 0; i < 8; i++)
                own.v[i] *= before;
#pragma unroll
            for (int j = 0; j < KEYS; j++) {
                float f[8], p = exp2f(score[j] - top);
                widen<T>(f, ring[warp][place][KEYS + j][lane]);
                own.sum += p;
#pragma unroll
                for (int i = 0; i < 8; i++)
                    own.v[i] = fmaf(score[j] == -INFINITY ? 0 : p, f[i], own.v[i]);
            }
        }
        fetch(first + DEPTH * STEP, place);
        place = place + 1 == DEPTH ? 0 : place + 1;
    }
#pragma unroll
    for (int step = LANES; step < 32; step *= 2)
        own.join(step);
    if (lane < LANES)
        states[warp][lane] = own;
    __syncthreads();
    if (warp == 0)
        for (int w = 1; w < WARPS; w++)
            own.join(states[w][part].max, states[w][part].sum, states[w][part].v);
#if __CUDA_ARCH__ >= 900
    if (n_splits > 1) {
        cg::cluster_group cluster = cg::this_cluster();
        if (threadIdx.x < LANES)
            states[0][lane] = own;
        cluster.sync();
        for (int r = 1; r < n_splits && split == 0 && warp == 0; r++) {
            const state *other = cluster.map_shared_rank(&states[0][part], r);
            own.join(other->max, other->sum, other->v);
        }
        cluster.sync(); /* nobody ends while it is being read */
    }
#endif
    if (split == 0 && threadIdx.x < LANES) {
        alignas(16) T out[8];
#pragma unroll
        for (int i = 0; i < 8; i++)
            out[i] = (T)(own.v[i] / own.sum);
        ((uint4 *)((T *)a.out + (size_t)t * a.cache.n_head * D + h * D))[part] = *(uint4 *)out;
    }
}

template <class T> static const void *kernel_for(int head_dim)
{
    return head_dim == 64 ? (const void *)attention<T, 64> : (const void *)attention<T, 128>;
}

cudaError_t bml_cuda_attention_decode(const bml_cuda_attention *a, const int32_t *slot,
                                      const int32_t *position, int n_multiprocessors, bool clusters,
                                      cudaStream_t stream)
{
    /* Enough blocks that every multiprocessor has two. */
    int n_splits = 1, wanted = 2 * n_multiprocessors;
    while (clusters && n_splits < 8 && a->n_tokens * a->cache.n_head * n_splits < wanted)
        n_splits *= 2;
    const void *kernel = a->type == BML_BF16 ? kernel_for<__nv_bfloat16>(a->cache.head_dim)
                                             : kernel_for<__half>(a->cache.head_dim);
    bml_cuda_attention copy = *a;
    void *arguments[] = {&copy, &slot, &position};
    dim3 grid((unsigned)n_splits, (unsigned)a->cache.n_head, (unsigned)a->n_tokens);
    size_t ring = (size_t)WARPS * DEPTH * KEYS * 2 * 32 * sizeof(uint4);
    return bml_cuda_launch(kernel, grid, 32 * WARPS, n_splits, ring, arguments, stream);
}
