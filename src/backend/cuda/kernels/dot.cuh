/*
 * Products of a row of weights in shared memory with an activation vector in shared memory, for
 * every format, in blocks that four lanes share: lane c of 0..3 takes the block's quarter c.
 */
#ifndef BML_BACKEND_CUDA_KERNELS_DOT_CUH
#define BML_BACKEND_CUDA_KERNELS_DOT_CUH

#include "backend/cuda/kernels/common.cuh"

/*
 * An activation vector, as the format wants it: for F32 floats; for packed weights int8 with a
 * scale for every 64; for BF16 and F16, whose products the matrix units make, the same type twice:
 * a value rounded and what rounding left, LOW bytes behind, so that nothing is lost.
 */
struct activations {
    char *memory;
    int low, scales; /* where they begin, in bytes */

    /* For up to WIDEST elements; LOW is half a row of banks away. */
    __host__ __device__ static int bytes_for(int widest)
    {
        return 4 * widest + 64;
    }

    __device__ activations(char *at, int widest) : memory(at), low(2 * widest + 64), scales(widest)
    {
    }

    activations() = default;
};

template <bml_weight_format F> struct dot_format {
    static constexpr bool packed = F == BML_WEIGHTS_Q8 || F == BML_WEIGHTS_Q4;
    static constexpr bool matrix_units = F == BML_WEIGHTS_BF16 || F == BML_WEIGHTS_F16;
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
        if constexpr (F == BML_WEIGHTS_F32) {
            ((float4 *)a.memory)[i] = v;
            return;
        }
        if constexpr (matrix_units) {
            uint2 high = make_uint2(both(v.x, v.y), both(v.z, v.w));
            ((uint2 *)a.memory)[i] = high;
            float2 h0 = apart(high.x), h1 = apart(high.y);
            ((uint2 *)(a.memory + a.low))[i] =
                make_uint2(both(v.x - h0.x, v.y - h0.y), both(v.z - h1.x, v.w - h1.y));
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
            bytes = make_char4((int8_t)rintf(v.x * inverse), (int8_t)rintf(v.y * inverse),
                               (int8_t)rintf(v.z * inverse), (int8_t)rintf(v.w * inverse));
        ((char4 *)a.memory)[i] = bytes;
        if (i % 16 == 0)
            ((float *)(a.memory + a.scales))[i / 16] = finite ? max / 127 : NAN;
    }

    /* What a warp has of eight rows' sums: a row has four lanes, or with matrix units lane l has
     * rows 2 (l % 4) and the next, of the rounded values below lane 4 and the rest below 8. */
    struct sums {
        float d[4] = {}, e[4] = {};
    };

    /* Adds the products with block B of a slice whose first block is FIRST; ROW is that of lane /
     * 4, c is lane % 4. */
    __device__ static void add(sums &sum, const char *row, int b, int first, const activations &a,
                               uint4 levels)
    {
        int c = threadIdx.x % 4;
        const char *w = row + at(b) + c * lane_bytes;
        if constexpr (F == BML_WEIGHTS_F32) {
            float4 v = *(const float4 *)w, x = ((const float4 *)a.memory)[4 * (first + b) + c];
            sum.d[0] = fmaf(v.w, x.w, fmaf(v.z, x.z, fmaf(v.y, x.y, fmaf(v.x, x.x, sum.d[0]))));
        } else if constexpr (matrix_units) {
            /* Lanes from 8 on have rows of x that are not there: what they hold goes nowhere. */
            int lane = threadIdx.x % 32, high = lane / 4 & 1;
            uint4 v = *(const uint4 *)w;
            uint4 x = *(const uint4 *)(a.memory + high * a.low + 64 * (first + b) + 16 * c);
            multiply_add(sum.d, x.x, x.y, v.x, v.y);
            multiply_add(sum.e, x.z, x.w, v.z, v.w);
        } else if constexpr (F == BML_WEIGHTS_Q8) {
            int4 v = *(const int4 *)w, q = ((const int4 *)a.memory)[4 * (first + b) + c];
            int all = __dp4a(v.x, q.x, __dp4a(v.y, q.y, __dp4a(v.z, q.z, __dp4a(v.w, q.w, 0))));
            const __nv_bfloat16 *scales =
                (const __nv_bfloat16 *)(row + bml_cuda_scales_at(F, (size_t)b));
            float scale = to_float(scales[b % BML_CUDA_GROUP]) * scale_of(a, first + b);
            sum.d[0] = fmaf((float)all, scale, sum.d[0]);
        } else {
            uint2 v = *(const uint2 *)w;
            const int2 *q = (const int2 *)a.memory + 8 * (first + b) + c;
            int2 q0 = q[0], q1 = q[4];
            int first_half = __dp4a(q4_levels_of(v.x, levels), q0.x,
                                    __dp4a(q4_levels_of(v.x >> 16, levels), q0.y, 0));
            int second_half = __dp4a(q4_levels_of(v.y, levels), q1.x,
                                     __dp4a(q4_levels_of(v.y >> 16, levels), q1.y, 0));
            const char2 *scales = (const char2 *)(row + bml_cuda_scales_at(F, (size_t)b));
            char2 s = scales[b % BML_CUDA_GROUP];
            sum.d[0] = fmaf((float)(first_half * s.x + second_half * s.y), scale_of(a, first + b),
                            sum.d[0]);
        }
    }

    /* The eight rows' sums to TO. */
    __device__ static void put(sums sum, float *to)
    {
        int lane = threadIdx.x % 32;
        if constexpr (matrix_units) {
            for (int i = 0; i < 2; i++) {
                sum.d[i] += sum.e[i];
                sum.d[i] += __shfl_xor_sync(~0u, sum.d[i], 4);
            }
            if (lane < 4)
                ((float2 *)to)[lane] = make_float2(sum.d[0], sum.d[1]);
        } else {
            sum.d[0] += __shfl_xor_sync(~0u, sum.d[0], 1);
            sum.d[0] += __shfl_xor_sync(~0u, sum.d[0], 2);
            if (lane % 4 == 0)
                to[lane / 4] = sum.d[0];
        }
    }

  private:
    __device__ static float scale_of(const activations &a, int block)
    {
        return ((const float *)(a.memory + a.scales))[block];
    }

    __device__ static uint32_t both(float x, float y)
    {
        if constexpr (F == BML_WEIGHTS_BF16) {
            __nv_bfloat162 v = __floats2bfloat162_rn(x, y);
            return *(uint32_t *)&v;
        }
        __half2 v = __floats2half2_rn(x, y);
        return *(uint32_t *)&v;
    }

    __device__ static float2 apart(uint32_t v)
    {
        if constexpr (F == BML_WEIGHTS_BF16)
            return make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u));
        return __half22float2(*(const __half2 *)&v);
    }

    /* d += x w^T for 16 inputs, in any order that x and w share; rows 8 to 15 of x are zeros. */
    __device__ static void multiply_add(float d[4], uint32_t x0, uint32_t x1, uint32_t w0,
                                        uint32_t w1)
    {
        if constexpr (F == BML_WEIGHTS_BF16)
            asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
                "{%4, %5, %6, %5}, {%7, %8}, {%0, %1, %2, %3};"
                : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                : "r"(x0), "r"(0), "r"(x1), "r"(w0), "r"(w1));
        else
            asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
                "{%4, %5, %6, %5}, {%7, %8}, {%0, %1, %2, %3};"
                : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                : "r"(x0), "r"(0), "r"(x1), "r"(w0), "r"(w1));
    }
};

#endif
