/* Products: matmul, linear and linear_transposed. */
#include "backend/cuda/kernels/common.cuh"
#include "backend/cuda/launch.cuh"

/* ---- weights of floats: tiles of 64 tokens x 64 outputs, or a warp for each output
 * --------------*/

enum { TILE = 64, DEPTH = 16, TILE_THREADS = 256, WIDE_THREADS = 128, FEW = 8, WARPS = 8 };

/*
 * out [m, n] = a [m, k] w^T + bias, or with BY_INPUTS w is [k, n]. Every output is one chain of
 * multiply-adds over k. A thread has 4 x 4 outputs.
 */
template <class T, bool BY_INPUTS>
static __global__ void __launch_bounds__(TILE_THREADS)
    product_tile(float *out, const float *a, const T *w, const float *bias, int m, int n, int k)
{
    __shared__ float as[DEPTH][TILE + 4], ws[DEPTH][TILE + 4];
    int first_row = blockIdx.y * TILE, first_col = blockIdx.x * TILE;
    int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    float sum[4][4] = {};
    for (int k0 = 0; k0 < k; k0 += DEPTH) {
        for (int e = threadIdx.x; e < TILE * DEPTH; e += TILE_THREADS) {
            int d = e % DEPTH, r = e / DEPTH, row = first_row + r, col = first_col + r;
            bool inside = k0 + d < k;
            as[d][r] = inside && row < m ? a[(size_t)row * k + k0 + d] : 0;
            if (!BY_INPUTS)
                ws[d][r] = inside && col < n ? to_float(w[(size_t)col * k + k0 + d]) : 0;
        }
        for (int e = threadIdx.x; BY_INPUTS && e < TILE * DEPTH; e += TILE_THREADS) {
            int d = e / TILE, col = first_col + e % TILE;
            ws[d][e % TILE] = k0 + d < k && col < n ? to_float(w[(size_t)(k0 + d) * n + col]) : 0;
        }
        __syncthreads();
        for (int d = 0; d < DEPTH; d++)
            for (int i = 0; i < 4; i++)
                for (int j = 0; j < 4; j++)
                    sum[i][j] = fmaf(as[d][4 * ty + i], ws[d][4 * tx + j], sum[i][j]);
        __syncthreads();
    }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) {
            int row = first_row + 4 * ty + i, col = first_col + 4 * tx + j;
            if (row < m && col < n)
                out[(size_t)row * n + col] = sum[i][j] + (bias ? bias[col] : 0);
        }
}

/* Four elements as floats, from where they are aligned. */
__device__ static inline float4 load_four(const float *from)
{
    return *(const float4 *)from;
}

template <class T> __device__ static inline float4 load_four(const T *from)
{
    uint2 words = *(const uint2 *)from;
    const T *v = (const T *)&words;
    return make_float4(to_float(v[0]), to_float(v[1]), to_float(v[2]), to_float(v[3]));
}

__device__ static inline void store_column(float (*to)[TILE + 4], int d, int r, float4 v)
{
    to[d][r] = v.x;
    to[d + 1][r] = v.y;
    to[d + 2][r] = v.z;
    to[d + 3][r] = v.w;
}

/* The same chains for k a multiple of DEPTH and aligned rows: a thread has 8 x 4 outputs, and loads
 * its part of the next step while it multiplies. */
template <class T>
static __global__ void __launch_bounds__(WIDE_THREADS)
    product_wide(float *out, const float *a, const T *w, const float *bias, int m, int n, int k)
{
    __shared__ __align__(16) float as[2][DEPTH][TILE + 4], ws[2][DEPTH][TILE + 4];
    int first_row = blockIdx.y * TILE, first_col = blockIdx.x * TILE;
    int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    int r = threadIdx.x / 4, d4 = threadIdx.x % 4 * 4;
    const float *from_a[2]; /* past the end: the last row, whose sums nobody stores */
    const T *from_w[2];
    for (int i = 0; i < 2; i++) {
        from_a[i] = a + (size_t)min(first_row + r + 32 * i, m - 1) * k + d4;
        from_w[i] = w + (size_t)min(first_col + r + 32 * i, n - 1) * k + d4;
    }
    float sum[8][4] = {};
    float4 next_a[2], next_w[2];
    auto load = [&](int k0) {
        for (int i = 0; i < 2; i++) {
            next_a[i] = load_four(from_a[i] + k0);
            next_w[i] = load_four(from_w[i] + k0);
        }
    };
    load(0);
    for (int k0 = 0, at = 0; k0 < k; k0 += DEPTH, at ^= 1) {
        for (int i = 0; i < 2; i++) {
            store_column(as[at], d4, r + 32 * i, next_a[i]);
            store_column(ws[at], d4, r + 32 * i, next_w[i]);
        }
        __syncthreads(); /* one a step: the step before read the other half */
        if (k0 + DEPTH < k)
            load(k0 + DEPTH);
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            float x[8], y[4];
            *(float4 *)x = *(const float4 *)&as[at][d][8 * ty];
            *(float4 *)(x + 4) = *(const float4 *)&as[at][d][8 * ty + 4];
            *(float4 *)y = *(const float4 *)&ws[at][d][4 * tx];
#pragma unroll
            for (int i = 0; i < 8; i++)
#pragma unroll
                for (int j = 0; j < 4; j++)
                    sum[i][j] = fmaf(x[i], y[j], sum[i][j]);
        }
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int row = first_row + 8 * ty + i, col = first_col + 4 * tx + j;
            if (row < m && col < n)
                out[(size_t)row * n + col] = sum[i][j] + (bias ? bias[col] : 0);
        }
}

/* EACH elements as floats. */
template <int EACH, class T> __device__ static inline void load_some(float *to, const T *from)
{
    if constexpr (EACH == 4)
        *(float4 *)to = load_four(from);
    else
        *to = to_float(*from);
}

/* The same for m <= FEW: a warp reads a row of weights once for all tokens, a lane EACH of them,
 * one or, where k is a multiple of it and rows are aligned, four. */
template <int EACH, class T>
static __global__ void product_warp(float *out, const float *a, const T *w, const float *bias,
                                    int m, int n, int k)
{
    int lane = threadIdx.x % 32, o = blockIdx.x * WARPS + threadIdx.x / 32;
    if (o >= n)
        return;
    float sum[FEW] = {};
#pragma unroll 4
    for (int i = lane * EACH; i < k; i += 32 * EACH) {
        float weight[EACH], x[EACH];
        load_some<EACH>(weight, w + (size_t)o * k + i);
#pragma unroll
        for (int t = 0; t < FEW; t++) {
            if (t >= m)
                break;
            load_some<EACH>(x, a + (size_t)t * k + i);
#pragma unroll
            for (int e = 0; e < EACH; e++)
                sum[t] = fmaf(x[e], weight[e], sum[t]);
        }
    }
#pragma unroll
    for (int t = 0; t < FEW; t++) {
        for (int step = 16; step; step /= 2)
            sum[t] += __shfl_xor_sync(~0u, sum[t], step);
        if (lane == 0 && t < m)
            out[(size_t)t * n + o] = sum[t] + (bias ? bias[o] : 0);
    }
}

void bml_cuda_matmul(bml_queue *queue, bml_buffer *c, const bml_buffer *a, const bml_buffer *b,
                     int m, int n, int k)
{
    dim3 grid(blocks_for(n, TILE), blocks_for(m, TILE));
    product_tile<float, true><<<grid, TILE_THREADS, 0, queue->stream>>>(
        (float *)c->data, (const float *)a->data, (const float *)b->data, nullptr, m, n, k);
    launched(queue);
}

/* ---- packed weights: both sides are int8, in blocks of 64
 * ---------------------------------------*/

/* A half warp has a block of a row: its int8 values and its scale, max / 127. A block that is not
 * finite gets the scale NaN, so that it shows in the result. */
static __global__ void quantize(int8_t *q, float *scales, const float *x, int n_in, int n_blocks,
                                size_t n)
{
    size_t block = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) / 16;
    int part = threadIdx.x % 16;
    if (block >= n)
        return;
    size_t row = block / n_blocks;
    int first = (int)(block % n_blocks) * BML_CUDA_BLOCK + 4 * part;
    float v[4], max = 0;
    bool finite = true;
    for (int i = 0; i < 4; i++) {
        v[i] = first + i < n_in ? x[row * n_in + first + i] : 0;
        finite &= isfinite(v[i]) != 0;
        max = fmaxf(max, fabsf(v[i]));
    }
    unsigned mask = 0xffffu << (threadIdx.x & 16);
    finite = __all_sync(mask, finite);
    for (int step = 8; step; step /= 2)
        max = fmaxf(max, __shfl_xor_sync(mask, max, step));
    float inverse = max > 0 && finite ? 127 / max : 0;
    char4 bytes = {};
    if (finite)
        bytes = make_char4((int8_t)rintf(v[0] * inverse), (int8_t)rintf(v[1] * inverse),
                           (int8_t)rintf(v[2] * inverse), (int8_t)rintf(v[3] * inverse));
    ((char4 *)q)[block * 16 + part] = bytes;
    if (part == 0)
        scales[block] = finite ? max / 127 : NAN;
}

/* A warp has an output and up to FEW tokens; a half warp takes a block at a time. */
template <bml_weight_format FORMAT>
static __global__ void product_packed(float *out, const int8_t *q, const float *scales,
                                      const char *w, const float *row_scales, const float *bias,
                                      uint4 levels, int m, int n, int k)
{
    int lane = threadIdx.x % 32, o = blockIdx.x * WARPS + threadIdx.x / 32, part = lane % 16;
    int first_token = blockIdx.y * FEW, n_blocks = (int)bml_cuda_n_blocks(k);
    if (o >= n)
        return;
    const char *row = w + (size_t)o * bml_cuda_row_bytes(FORMAT, k);
    float row_scale = FORMAT == BML_WEIGHTS_Q4 ? row_scales[o] : 1; /* first: sums stay in range */
    float sum[FEW] = {};
    for (int b = lane / 16; b < n_blocks; b += 2) {
        const char *block = row + bml_cuda_block_at(FORMAT, b);
        const char *group = row + bml_cuda_scales_at(FORMAT, b);
        int weights;
        float scale;
        if (FORMAT == BML_WEIGHTS_Q8) {
            weights = ((const int *)block)[part];
            scale = to_float(((const __nv_bfloat16 *)group)[b % BML_CUDA_GROUP]);
        } else {
            uint32_t nibbles = ((const uint32_t *)block)[part % 8 / 2 * 2 + part / 8];
            weights = q4_levels_of(nibbles >> part % 2 * 16, levels);
            scale = row_scale * ((const int8_t *)group)[b % BML_CUDA_GROUP * 2 + part / 8];
        }
#pragma unroll
        for (int t = 0; t < FEW; t++) {
            if (first_token + t < m) {
                size_t at = (size_t)(first_token + t) * n_blocks + b;
                int dot = __dp4a(weights, ((const int *)q)[at * 16 + part], 0);
                sum[t] = fmaf((float)dot, scale * scales[at], sum[t]);
            }
        }
    }
#pragma unroll
    for (int t = 0; t < FEW; t++) {
        for (int step = 16; step; step /= 2)
            sum[t] += __shfl_xor_sync(~0u, sum[t], step);
        if (lane == 0 && first_token + t < m) {
            out[(size_t)(first_token + t) * n + o] = sum[t] + (bias ? bias[o] : 0);
        }
    }
}

static void packed(bml_queue *queue, float *out, const float *x, const bml_weight *w,
                   const float *bias, int m)
{
    int n = w->n_out, k = w->n_in;
    size_t n_blocks = bml_cuda_n_blocks(k), all = m * n_blocks;
    int8_t *q = (int8_t *)queue->scratch;
    float *scales = (float *)(q + all * BML_CUDA_BLOCK);
    const char *rows = (const char *)w->buffer.data;
    const float *row_scales = (const float *)(rows + n * bml_cuda_row_bytes(w->format, k));
    quantize<<<blocks_for(all, 16), 256, 0, queue->stream>>>(q, scales, x, k, (int)n_blocks, all);
    launched(queue);
    dim3 grid(blocks_for(n, WARPS), blocks_for(m, FEW));
    if (w->format == BML_WEIGHTS_Q8)
        product_packed<BML_WEIGHTS_Q8><<<grid, 32 * WARPS, 0, queue->stream>>>(
            out, q, scales, rows, row_scales, bias, q4_levels(), m, n, k);
    else
        product_packed<BML_WEIGHTS_Q4><<<grid, 32 * WARPS, 0, queue->stream>>>(
            out, q, scales, rows, row_scales, bias, q4_levels(), m, n, k);
    launched(queue);
}

void bml_cuda_linear(bml_queue *queue, bml_buffer *out, const bml_buffer *x, const bml_weight *w,
                     const bml_buffer *bias, int n_tokens)
{
    int m = n_tokens, n = w->n_out, k = w->n_in;
    float *to = (float *)out->data;
    const float *from = (const float *)x->data, *b = (const float *)bias->data;
    if (bml_cuda_packed(w->format)) {
        packed(queue, to, from, w, b, m);
        return;
    }
    with_type(w->dtype, [&](auto type) {
        auto rows = (decltype(type))w->buffer.data;
        dim3 tiles(blocks_for(n, TILE), blocks_for(m, TILE));
        bool aligned = k % 4 == 0 && bml_cuda_aligned(from) && bml_cuda_aligned(rows);
        if (m <= FEW && aligned)
            product_warp<4><<<blocks_for(n, WARPS), 32 * WARPS, 0, queue->stream>>>(to, from, rows,
                                                                                    b, m, n, k);
        else if (m <= FEW)
            product_warp<1><<<blocks_for(n, WARPS), 32 * WARPS, 0, queue->stream>>>(to, from, rows,
                                                                                    b, m, n, k);
        else if (aligned && k % DEPTH == 0)
            product_wide<<<tiles, WIDE_THREADS, 0, queue->stream>>>(to, from, rows, b, m, n, k);
        else
            product_tile<std::remove_const_t<std::remove_pointer_t<decltype(type)>>, false>
                <<<tiles, TILE_THREADS, 0, queue->stream>>>(to, from, rows, b, m, n, k);
        launched(queue);
    });
}
