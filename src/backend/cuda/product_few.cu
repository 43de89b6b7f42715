/*
 * Products of few rows: reading W once is all the work there is. A block has 16 outputs, rows of W,
 * which are the matrix unit's rows; its columns are the tokens. Warps share out the inputs, 32 at a
 * time, and load W straight into registers: the first part of it before the kernel in front of this
 * one has ended.
 */
#include "backend/cuda/kernels/common.cuh"
#include "backend/cuda/launch.cuh"
#include "backend/cuda/mma_sm80.cuh"
#include "backend/cuda/product_few.h"

enum {
    WARPS = 8,
    OUTPUTS = 16,
    STEPS = 6,      /* of 32 inputs that a warp has on their way */
    NORM_ROWS = 8,  /* with a norm, a row a warp, of up to */
    NORM_QUADS = 8, /* times four elements a lane */
    PAD = 32        /* elements between rows in shared memory, so that they lie in other banks */
};

/* Row WARP of x, normed, to shared memory. */
template <class T>
__device__ static void take_norm(T *to, const bml_cuda_norm &n, int n_rows, int k)
{
    int r = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (r >= n_rows)
        return;
    const float4 *x = (const float4 *)(n.x + (size_t)(n.row ? n.row[r] : r) * k);
    float4 v[NORM_QUADS];
    float sum = 0, squares = 0;
#pragma unroll
    for (int i = 0; i < NORM_QUADS; i++) {
        bool has = 4 * (lane + 32 * i) < k;
        v[i] = has ? x[lane + 32 * i] : make_float4(0, 0, 0, 0);
        sum += (v[i].x + v[i].y) + (v[i].z + v[i].w);
    }
    for (int step = 16; step; step /= 2)
        sum += __shfl_xor_sync(~0u, sum, step);
    float mean = sum / k;
#pragma unroll
    for (int i = 0; i < NORM_QUADS; i++)
        if (4 * (lane + 32 * i) < k) {
            v[i] = make_float4(v[i].x - mean, v[i].y - mean, v[i].z - mean, v[i].w - mean);
            squares += v[i].x * v[i].x + v[i].y * v[i].y + v[i].z * v[i].z + v[i].w * v[i].w;
        }
    for (int step = 16; step; step /= 2)
        squares += __shfl_xor_sync(~0u, squares, step);
    float scale = rsqrtf(squares / k + n.epsilon);
#pragma unroll
    for (int i = 0; i < NORM_QUADS; i++) {
        int c = lane + 32 * i;
        if (4 * c < k) {
            float4 w = ((const float4 *)n.weight)[c], b = make_float4(0, 0, 0, 0);
            if (n.bias)
                b = ((const float4 *)n.bias)[c];
            T *at = to + r * (k + PAD) + 4 * c;
            from_float(at, fmaf(v[i].x * scale, w.x, b.x));
            from_float(at + 1, fmaf(v[i].y * scale, w.y, b.y));
            from_float(at + 2, fmaf(v[i].z * scale, w.z, b.z));
            from_float(at + 3, fmaf(v[i].w * scale, w.w, b.w));
        }
    }
}

/* Column O of row T, to where it goes. */
template <class T> __device__ static void put(const bml_cuda_product &p, int t, int o, float sum)
{
    if (p.bias)
        sum += p.bias[o];
    size_t at = (size_t)t * p.out_pitch + o;
    switch (p.epilogue) {
    case BML_CUDA_STORE32:
        ((float *)p.out)[at] = sum;
        return;
    case BML_CUDA_RESIDUAL:
        ((float *)p.out)[at] += sum;
        return;
    case BML_CUDA_ACTIVATION:
        sum = activate(sum, p.activation);
        break;
    case BML_CUDA_QKV: {
        int width = p.cache.n_head * p.cache.head_dim, third = (o >= width) + (o >= 2 * width);
        if (third) {
            int c = o - third * width, h = c / p.cache.head_dim;
            size_t line = ((size_t)p.slot[t] * p.cache.n_head + h) * p.cache.n_ctx + p.position[t];
            T *cache = (T *)(third == 1 ? p.cache.k : p.cache.v);
            from_float(cache + line * p.cache.head_dim + (c - h * p.cache.head_dim), sum);
            return;
        }
        break;
    }
    }
    from_float((T *)p.out + at, sum);
}

template <class T, int COLUMNS /* of eight tokens */, bool NORM>
static __global__ void __launch_bounds__(32 * WARPS)
    product(const __grid_constant__ bml_cuda_product p, const __grid_constant__ bml_cuda_norm norm)
{
    extern __shared__ __align__(16) char normed[];
    __shared__ float sums[WARPS][8 * COLUMNS][OUTPUTS + 1];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4;
    int first = blockIdx.x * OUTPUTS, n_steps = p.k / 32;
    /* The lane's inputs of a step are 8c .. 8c + 7, of rows g and g + 8: an order of the inputs
     * that both operands share. */
    const uint4 *low = (const uint4 *)((const T *)p.w + (size_t)min(first + g, p.n - 1) * p.k) + c;
    const uint4 *high =
        (const uint4 *)((const T *)p.w + (size_t)min(first + g + 8, p.n - 1) * p.k) + c;
    float d[COLUMNS][4] = {};
    uint4 w[STEPS][2];
    auto load = [&](int begin) {
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            int step = min(begin + i * WARPS, n_steps - 1);
            w[i][0] = __ldcs(low + step * 4);
            w[i][1] = __ldcs(high + step * 4);
        }
    };
    allow_next();
    load(warp);
    await_previous();
    const T *a = (const T *)p.a;
    int a_pitch = p.a_pitch;
    if constexpr (NORM) {
        take_norm((T *)normed, norm, p.m, p.k);
        __syncthreads();
        a = (const T *)normed;
        a_pitch = p.k + PAD;
    }
    for (int begin = warp; begin < n_steps; begin += STEPS * WARPS) {
        if (begin != warp)
            load(begin);
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            int step = begin + i * WARPS;
            if (step >= n_steps)
                break;
            uint32_t rows[2][4] = {{w[i][0].x, w[i][1].x, w[i][0].y, w[i][1].y},
                                   {w[i][0].z, w[i][1].z, w[i][0].w, w[i][1].w}};
#pragma unroll
            for (int j = 0; j < COLUMNS; j++) {
                int t = min(8 * j + g, p.m - 1);
                uint4 x = ((const uint4 *)(a + (size_t)t * a_pitch))[step * 4 + c];
                mma<T>(d[j], rows[0], x.x, x.y);
                mma<T>(d[j], rows[1], x.z, x.w);
            }
        }
    }
#pragma unroll
    for (int j = 0; j < COLUMNS; j++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            sums[warp][8 * j + 2 * c + i % 2][g + i / 2 * 8] = d[j][i];
    __syncthreads();
    for (int e = threadIdx.x; e < p.m * OUTPUTS; e += 32 * WARPS) {
        int t = e / OUTPUTS, o = e % OUTPUTS;
        float sum = 0;
#pragma unroll
        for (int i = 0; i < WARPS; i++)
            sum += sums[i][t][o];
        if (first + o < p.n)
            put<T>(p, t, first + o, sum);
    }
}

bool bml_cuda_is_few(const bml_cuda_product *p)
{
    return p->m <= BML_CUDA_FEW && p->k % 32 == 0 && p->a_pitch % 8 == 0 &&
           bml_cuda_aligned(p->a) && bml_cuda_aligned(p->w);
}

bool bml_cuda_takes_norm(const bml_cuda_product *p)
{
    return p->m <= NORM_ROWS && p->k <= 128 * NORM_QUADS && p->k % 4 == 0 && bml_cuda_is_few(p);
}

template <class T> static const void *kernel_for(int m, bool norm)
{
    return norm      ? (const void *)product<T, 1, true>
           : m <= 8  ? (const void *)product<T, 1, false>
           : m <= 16 ? (const void *)product<T, 2, false>
                     : (const void *)product<T, 4, false>;
}

cudaError_t bml_cuda_product_few(const bml_cuda_product *p, const bml_cuda_norm *norm,
                                 cudaStream_t stream)
{
    const void *kernel = p->type == BML_BF16 ? kernel_for<__nv_bfloat16>(p->m, norm)
                                             : kernel_for<__half>(p->m, norm);
    bml_cuda_norm none = {};
    void *arguments[] = {(void *)p, (void *)(norm ? norm : &none)};
    dim3 grid((unsigned)((p->n + OUTPUTS - 1) / OUTPUTS));
    size_t bytes = norm ? (size_t)p->m * (p->k + PAD) * 2 : 0;
    return bml_cuda_launch(kernel, grid, 32 * WARPS, 1, bytes, arguments, stream);
}
