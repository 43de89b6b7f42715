/* layernorm on the way to a product: a warp a row, float32 in, 16 bits out. */
#include "backend/cuda/epilogue.cuh"
#include "backend/cuda/launch.cuh"

enum { WARPS = 4 };

static __device__ __forceinline__ float warp_sum(float x)
{
    for (int i = 16; i > 0; i /= 2)
        x += __shfl_xor_sync(~0u, x, i);
    return x;
}

/* This block's part of what is to come. */
static __device__ __forceinline__ void fetch(const bml_cuda_ahead &ahead)
{
#if __CUDA_ARCH__ >= 900
#pragma unroll
    for (int i = 0; i < 2; i++) {
        size_t part = (ahead.bytes[i] / 16 + gridDim.x - 1) / gridDim.x * 16;
        size_t from = blockIdx.x * part;
        if (from < ahead.bytes[i])
            asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(
                             (const char *)ahead.weights[i] + from),
                         "r"((uint32_t)min(part, ahead.bytes[i] - from)));
    }
#endif
}

/* The row is held in registers, VECTORS times four a lane; 0: it is read again for each pass. */
template <typename T, int VECTORS>
static __global__ __launch_bounds__(32 * WARPS) void norm(T *out, const float *x,
                                                          const int32_t *row, const float *weight,
                                                          const float *bias, int n_rows, int n,
                                                          float epsilon, bml_cuda_ahead ahead)
{
    int r = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0)
        fetch(ahead);
    float4 scales[VECTORS + 1], shifts[VECTORS + 1]; /* there before x is */
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        int c = 4 * (lane + 32 * i);
        scales[i] = shifts[i] = make_float4(0, 0, 0, 0);
        if (c < n) {
            scales[i] = __ldg((const float4 *)(weight + c));
            if (bias)
                shifts[i] = __ldg((const float4 *)(bias + c));
        }
    }
    allow_next();
    await_previous();
    if (r >= n_rows)
        return;
    x += (size_t)(row ? row[r] : r) * n;
    out += (size_t)r * n;
    float sum = 0, squares = 0;
    if constexpr (VECTORS > 0) {
        float4 v[VECTORS];
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            int c = 4 * (lane + 32 * i);
            v[i] = c < n ? *(const float4 *)(x + c) : make_float4(0, 0, 0, 0);
        }
#pragma unroll
        for (int i = 0; i < VECTORS; i++)
            sum += (v[i].x + v[i].y) + (v[i].z + v[i].w);
        float mean = warp_sum(sum) / n;
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            if (4 * (lane + 32 * i) < n) {
                v[i].x -= mean, v[i].y -= mean, v[i].z -= mean, v[i].w -= mean;
                squares += v[i].x * v[i].x + v[i].y * v[i].y + v[i].z * v[i].z + v[i].w * v[i].w;
            }
        }
        float scale = rsqrtf(warp_sum(squares) / n + epsilon);
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            int c = 4 * (lane + 32 * i);
            float4 w = scales[i], b = shifts[i];
            if (c < n)
                *(uint2 *)(out + c) =
                    make_uint2(pack<T>(v[i].x * scale * w.x + b.x, v[i].y * scale * w.y + b.y),
                               pack<T>(v[i].z * scale * w.z + b.z, v[i].w * scale * w.w + b.w));
        }
    } else {
        for (int c = lane; c < n; c += 32)
            sum += x[c];
        float mean = warp_sum(sum) / n;
        for (int c = lane; c < n; c += 32)
            squares += (x[c] - mean) * (x[c] - mean);
        float scale = rsqrtf(warp_sum(squares) / n + epsilon);
        for (int c = lane; c < n; c += 32)
            out[c] = (T)((x[c] - mean) * scale * weight[c] + (bias ? bias[c] : 0.f));
    }
}

template <typename T> static const void *kernel_for(int n)
{
    if (n % 4 || n > 2048)
        return (const void *)norm<T, 0>;
    return n <= 768    ? (const void *)norm<T, 6>
           : n <= 1024 ? (const void *)norm<T, 8>
                       : (const void *)norm<T, 16>;
}

cudaError_t bml_cuda_norm16(bml_dtype type, void *out, const float *x, const int32_t *row,
                            const float *weight, const float *bias, int n_rows, int n_embd,
                            float epsilon, bml_cuda_ahead ahead, cudaStream_t stream)
{
    const void *kernel =
        type == BML_F16 ? kernel_for<__half>(n_embd) : kernel_for<__nv_bfloat16>(n_embd);
    if (n_rows == 0)
        return cudaSuccess;
    void *arguments[] = {&out, &x, &row, &weight, &bias, &n_rows, &n_embd, &epsilon, &ahead};
    return bml_cuda_launch(kernel, dim3((unsigned)bml_cuda_divided_up(n_rows, WARPS)), 32 * WARPS,
                           1, 0, arguments, stream);
}
