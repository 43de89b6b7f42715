/*
 * Products of a row of weights in shared memory with an activation vector in shared memory, for
 * every format, in blocks that four lanes share: lane c of 0..3 takes the block's quarter c.
 */
#ifndef BML_BACKEND_CUDA_KERNELS_DOT_CUH
#define BML_BACKEND_CUDA_KERNELS_DOT_CUH

#include "backend/cuda/kernels/common.cuh"

/* An activation vector: floats, or for packed weights int8 with a scale for every 64. */
struct activations {
    float *x;
    int8_t *q;
    float *scale;
};

template <bml_weight_format F> struct dot_format {
    static constexpr bool packed = F == BML_WEIGHTS_Q8 || F == BML_WEIGHTS_Q4;
    static constexpr int block_bytes = F == BML_WEIGHTS_Q4 ? 32 : 64;
    static constexpr int block_inputs = packed ? 64 : F == BML_WEIGHTS_F32 ? 16 : 32;
    /* What lane c reads at once, and so the stride at which rows do not meet in a bank. */
    static constexpr int lane_bytes = block_bytes / 4;

    /* Where block B lies in a row. */
    __host__ __device__ static int at(int b)
    {
        return packed ? (int)bml_cuda_block_at(F, (size_t)b) : b * block_bytes;
    }

    /* Keeps four activations, inputs 4i .. 4i + 3; for packed weights the 16 lanes that share a
     * block of 64 call together. */
    __device__ static void keep(const activations &a, int i, float4 v)
    {
        if (!packed) {
            ((float4 *)a.x)[i] = v;
            return;
        }
        float max = fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
        float poison = (v.x - v.x) + (v.y - v.y) + (v.z - v.z) + (v.w - v.w); /* NaN or 0 */
        unsigned mask = 0xffffu << (threadIdx.x & 16);
        bool finite = __all_sync(mask, poison == 0);
        for (int step = 8; step; step /= 2)
            max = fmaxf(max, __shfl_xor_sync(mask, max, step));
        float inverse = max > 0 && finite ? 127 / max : 0;
        char4 bytes = {};
        if (finite)
            bytes = make_char4((char)rintf(v.x * inverse), (char)rintf(v.y * inverse),
                               (char)rintf(v.z * inverse), (char)rintf(v.w * inverse));
        ((char4 *)a.q)[i] = bytes;
        if (i % 16 == 0)
            a.scale[i / 16] = finite ? max / 127 : NAN;
    }

    /* sum + this lane's part of ROW's block B, whose activations are block B + FIRST. */
    __device__ static float dot(float sum, const char *row, int b, int first, int c,
                                const activations &a, uint4 levels)
    {
        const char *w = row + at(b) + c * lane_bytes;
        if constexpr (F == BML_WEIGHTS_F32) {
            float4 v = *(const float4 *)w, x = ((const float4 *)a.x)[4 * (first + b) + c];
            return fmaf(v.w, x.w, fmaf(v.z, x.z, fmaf(v.y, x.y, fmaf(v.x, x.x, sum))));
        } else if constexpr (F == BML_WEIGHTS_BF16 || F == BML_WEIGHTS_F16) {
            uint4 v = *(const uint4 *)w;
            const float4 *x = (const float4 *)a.x + 8 * (first + b) + 2 * c;
            float4 x0 = x[0], x1 = x[1];
            sum = pair(sum, v.x, x0.x, x0.y);
            sum = pair(sum, v.y, x0.z, x0.w);
            sum = pair(sum, v.z, x1.x, x1.y);
            return pair(sum, v.w, x1.z, x1.w);
        } else if constexpr (F == BML_WEIGHTS_Q8) {
            int4 v = *(const int4 *)w, q = ((const int4 *)a.q)[4 * (first + b) + c];
            int all = __dp4a(v.x, q.x, __dp4a(v.y, q.y, __dp4a(v.z, q.z, __dp4a(v.w, q.w, 0))));
            const __nv_bfloat16 *scales =
                (const __nv_bfloat16 *)(row + bml_cuda_scales_at(F, (size_t)b));
            float scale = to_float(scales[b % BML_CUDA_GROUP]) * a.scale[first + b];
            return fmaf((float)all, scale, sum);
        } else {
            uint2 v = *(const uint2 *)w;
            const int2 *q = (const int2 *)a.q + 8 * (first + b) + c;
            int2 q0 = q[0], q1 = q[4];
            int first_half = __dp4a(q4_levels_of(v.x, levels), q0.x,
                                    __dp4a(q4_levels_of(v.x >> 16, levels), q0.y, 0));
            int second_half = __dp4a(q4_levels_of(v.y, levels), q1.x,
                                     __dp4a(q4_levels_of(v.y >> 16, levels), q1.y, 0));
            const char2 *scales = (const char2 *)(row + bml_cuda_scales_at(F, (size_t)b));
            char2 s = scales[b % BML_CUDA_GROUP];
            return fmaf((float)(first_half * s.x + second_half * s.y), a.scale[first + b], sum);
        }
    }

  private:
    /* Two 16-bit weights with their activations. */
    __device__ static float pair(float sum, uint32_t w, float x0, float x1)
    {
        if constexpr (F == BML_WEIGHTS_BF16)
            return fmaf(__uint_as_float(w & 0xffff0000u), x1,
                        fmaf(__uint_as_float(w << 16), x0, sum));
        float2 f = __half22float2(*(const __half2 *)&w);
        return fmaf(f.y, x1, fmaf(f.x, x0, sum));
    }
};

#endif
