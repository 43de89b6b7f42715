/*
 * Causal attention on any chip with 16-bit matrix units, for any head size up to 256: a block takes
 * 64 queries of one head, a warp 16 of them, and goes through the keys from the first on, 32 at a
 * time, with a running maximum and sum.
 */
#include "backend/cuda/attention.h"
#include "backend/cuda/epilogue.cuh"
#include "backend/cuda/launch.cuh"
#include "backend/cuda/mma_sm80.cuh"

enum { QUERIES = 64, KEYS = 32, THREADS = 128 };

/* ROWS rows of N elements, PITCH apart, to rows of HEAD + 8; zeros past their end and past LIMIT.
 */
template <typename T, int HEAD>
static __device__ __forceinline__ void fill(T *to, const T *from, size_t pitch, int rows, int limit,
                                            int n, bool wide)
{
    for (int i = threadIdx.x; i < rows * (HEAD / 8); i += THREADS) {
        int r = i / (HEAD / 8), c = i % (HEAD / 8) * 8;
        *(uint4 *)(to + r * (HEAD + 8) + c) =
            r < limit ? load_eight(from + r * pitch, c, n, wide) : make_uint4(0, 0, 0, 0);
    }
}

template <typename T, int HEAD>
static __global__
__launch_bounds__(THREADS) void attention(const __grid_constant__ bml_cuda_attention a, bool wide)
{
    enum { PITCH = HEAD + 8 };
    extern __shared__ __align__(16) char shared[];
    T *q = (T *)shared, *k = q + QUERIES * PITCH, *v = k + KEYS * PITCH;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, quad = lane & 3;
    int n_head = a.cache.n_head, head_dim = a.cache.head_dim;
    int head = blockIdx.x % n_head, part = blockIdx.x / n_head;

    allow_next();
    await_previous();
    bml_cuda_query_tile tile = a.tiles[part / 2];
    int skip = part % 2 ? 0 : QUERIES, count = min(tile.count - skip, (int)QUERIES);
    if (count <= 0)
        return;
    int token = tile.token + skip, position = tile.position + skip, n_keys = position + count;
    size_t line = ((size_t)tile.slot * n_head + head) * a.cache.n_ctx * head_dim;
    const T *keys = (const T *)a.cache.k + line, *values = (const T *)a.cache.v + line;
    fill<T, HEAD>(q, (const T *)a.q + (size_t)token * a.q_pitch + head * head_dim, a.q_pitch,
                  QUERIES, count, head_dim, wide && a.q_pitch % 8 == 0);

    int row = warp * 16 + lane / 4;
    float o[HEAD / 8][4] = {}, top[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};
    float scale = a.scale * 1.44269504f;
    for (int j = 0; j < n_keys; j += KEYS) {
        __syncthreads();
        fill<T, HEAD>(k, keys + (size_t)j * head_dim, head_dim, KEYS, n_keys - j, head_dim, wide);
        fill<T, HEAD>(v, values + (size_t)j * head_dim, head_dim, KEYS, n_keys - j, head_dim, wide);
        __syncthreads();

        float s[KEYS / 8][4] = {};
#pragma unroll
        for (int d = 0; d < HEAD; d += 16) {
            uint32_t q_blocks[4], k_blocks[4];
            load_blocks(q_blocks, q + (warp * 16 + lane % 16) * PITCH + d + lane / 16 * 8);
#pragma unroll
            for (int i = 0; i < KEYS / 16; i++) {
                load_blocks(k_blocks,
                            k + (16 * i + lane / 16 * 8 + lane % 8) * PITCH + d + lane / 8 % 2 * 8);
                mma<T>(s[2 * i], q_blocks, k_blocks[0], k_blocks[1]);
                mma<T>(s[2 * i + 1], q_blocks, k_blocks[2], k_blocks[3]);
            }
        }
        uint32_t weights[KEYS / 8][2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float old = top[h];
#pragma unroll
            for (int i = 0; i < KEYS / 4; i++) {
                float &x = s[i / 2][2 * h + i % 2];
                if (j + i / 2 * 8 + 2 * quad + i % 2 > position + row + 8 * h)
                    x = -INFINITY;
                top[h] = fmaxf(top[h], x);
            }
            top[h] = fmaxf(top[h], __shfl_xor_sync(~0u, top[h], 1));
            top[h] = fmaxf(top[h], __shfl_xor_sync(~0u, top[h], 2));
            float zero = top[h] * scale, keep = exp2f(old * scale - zero);
            sum[h] *= keep;
#pragma unroll
            for (int i = 0; i < KEYS / 8; i++) {
                float x = exp2f(s[i][2 * h] * scale - zero);
                float y = exp2f(s[i][2 * h + 1] * scale - zero);
                sum[h] += x + y;
                weights[i][h] = pack<T>(x, y);
            }
#pragma unroll
            for (int i = 0; i < HEAD / 8; i++) {
                o[i][2 * h] *= keep;
                o[i][2 * h + 1] *= keep;
            }
        }
#pragma unroll
        for (int i = 0; i < KEYS / 16; i++) {
            uint32_t p[4] = {weights[2 * i][0], weights[2 * i][1], weights[2 * i + 1][0],
                             weights[2 * i + 1][1]};
#pragma unroll
            for (int d = 0; d < HEAD; d += 16) {
                uint32_t v_blocks[4];
                load_blocks_transposed(v_blocks,
                                       v + (16 * i + lane % 16) * PITCH + d + lane / 16 * 8);
                mma<T>(o[d / 8], p, v_blocks[0], v_blocks[1]);
                mma<T>(o[d / 8 + 1], p, v_blocks[2], v_blocks[3]);
            }
        }
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float whole = sum[h];
        whole += __shfl_xor_sync(~0u, whole, 1);
        whole += __shfl_xor_sync(~0u, whole, 2);
        T *out = (T *)a.out + ((size_t)(token + row + 8 * h) * n_head + head) * head_dim;
#pragma unroll
        for (int i = 0; i < HEAD / 4; i++) {
            int c = i / 2 * 8 + 2 * quad + i % 2;
            if (row + 8 * h < count && c < head_dim)
                out[c] = (T)(o[i / 2][2 * h + i % 2] / whole);
        }
    }
}

template <typename T, int HEAD>
static cudaError_t launch(const bml_cuda_attention *a, cudaStream_t stream)
{
    bool wide = a->cache.head_dim % 8 == 0 &&
                ((uintptr_t)a->q | (uintptr_t)a->cache.k | (uintptr_t)a->cache.v) % 16 == 0;
    size_t bytes = (QUERIES + 2 * KEYS) * (HEAD + 8) * sizeof(T);
    void *arguments[] = {(void *)a, &wide};
    return bml_cuda_launch((const void *)attention<T, HEAD>,
                           dim3((unsigned)(2 * a->n_tiles * a->cache.n_head)), THREADS, 1, bytes,
                           arguments, stream);
}

template <typename T>
static cudaError_t launch_head(const bml_cuda_attention *a, cudaStream_t stream)
{
    if (a->cache.head_dim <= 64)
        return launch<T, 64>(a, stream);
    if (a->cache.head_dim <= 128)
        return launch<T, 128>(a, stream);
    if (a->cache.head_dim <= 256)
        return launch<T, 256>(a, stream);
    return cudaErrorInvalidValue;
}

cudaError_t bml_cuda_attention_sm80(const bml_cuda_attention *a, cudaStream_t stream)
{
    return a->type == BML_F16 ? launch_head<__half>(a, stream)
                              : launch_head<__nv_bfloat16>(a, stream);
}
