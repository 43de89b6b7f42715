/*
 * Products of units of weights (decode_plan.h) in shared memory with activations, by a warp.
 *
 * All but F32 goes through the matrix units. Their first operand has sixteen rows of weights, the
 * second eight vectors. Of one token the first vector has the activations as far as the type goes,
 * the second what that left, so that next to nothing is lost; of several each has one. 16-bit
 * weights meet activations of their type. Packed weights meet int8, with a scale for 64 of them: x
 * = scale (256 x[0] + x[1]), and their sums are exact.
 */
#ifndef BML_BACKEND_CUDA_KERNELS_UNIT_CUH
#define BML_BACKEND_CUDA_KERNELS_UNIT_CUH

#include "backend/cuda/decode_plan.h"
#include "backend/cuda/kernels/approximate.cuh"
#include "backend/cuda/kernels/barrier.cuh"
#include "backend/cuda/kernels/common.cuh"
#include "backend/cuda/mma_sm80.cuh"

template <bml_weight_format F> struct unit_format {
    static constexpr bml_cuda_unit unit = bml_cuda_unit_of(F);
    static constexpr bool half = F == BML_WEIGHTS_F16, whole = F == BML_WEIGHTS_F32;
    static constexpr bool packed = F == BML_WEIGHTS_Q8 || F == BML_WEIGHTS_Q4;
    static constexpr bool half_width = !whole && !packed; /* 16 bits */

    /* What a warp has of the sixteen outputs of a tile. */
    struct sums {
        float d[4] = {}; /* 16 bits: of two outputs each x and what it left; else d[0] and d[1] */
        float e[4] = {}; /* the same of the second half of a chunk */

        /* In lanes that are multiples of four: outputs lane / 2 and the next. */
        __device__ float2 result() const
        {
            if constexpr (whole) {
                float a = d[0], b = d[1];
                a += __shfl_xor_sync(~0u, a, 1);
                b += __shfl_xor_sync(~0u, b, 1);
                return make_float2(a + __shfl_xor_sync(~0u, a, 2), b + __shfl_xor_sync(~0u, b, 2));
            }
            if constexpr (packed)
                return make_float2(d[0], d[1]);
            return make_float2((d[0] + d[1]) + (e[0] + e[1]), (d[2] + d[3]) + (e[2] + e[3]));
        }

        /* Of eight vectors, outputs lane / 4 * 2 and the next: the first one's products with
         * vectors lane % 4 * 2 and the next, then the second one's. */
        __device__ float4 of_vectors() const
        {
            return make_float4(d[0] + e[0], d[1] + e[1], d[2] + e[2], d[3] + e[3]);
        }

        /* The same as result(), of columns. */
        __device__ float2 result_of_columns() const
        {
            if constexpr (packed)
                return make_float2(d[0] + __shfl_xor_sync(~0u, d[0], 1),
                                   d[1] + __shfl_xor_sync(~0u, d[1], 1));
            if constexpr (!whole)
                return make_float2(d[0] + d[1], d[2] + d[3]);
            return result();
        }
    };

    /* ---- rows: sixteen of them, BML_CUDA_CHUNK inputs in two units ---- */

    /* A lane's share of a chunk of activations, lane % 4 = c: F32, inputs 16 j + 4 c and on; else
     * inputs 32 h + 8 c and on: lanes 0 to 3 the values, lanes 4 to 7 what they left, the others
     * zeros. */
    struct row_x {
        uint4 x[whole ? 4 : packed ? 1 : 2];
        float scale;
    };

    /* Keeps a chunk, two neighbouring elements from each lane, in 256 bytes of the warp's own
     * memory, and its scale. */
    __device__ static void keep(row_x &r, char *memory, float2 v)
    {
        int lane = threadIdx.x % 32;
        if constexpr (whole) {
            ((float2 *)memory)[lane] = v;
        } else if constexpr (!packed) {
            uint32_t high = both(v.x, v.y);
            float2 h = apart(high);
            ((uint32_t *)memory)[lane] = high;
            ((uint32_t *)memory)[32 + lane] = both(v.x - h.x, v.y - h.y);
        } else {
            uint32_t most = __reduce_max_sync(~0u, max(magnitude(v.x), magnitude(v.y)));
            float inverse = inverse_of(most);
            int x = __float2int_rn(v.x * inverse), y = __float2int_rn(v.y * inverse);
            ((char2 *)memory)[lane] = make_char2((x + 128) >> 8, (y + 128) >> 8);
            ((char2 *)memory)[32 + lane] = make_char2(x, y);
            r.scale = scale_of(most);
        }
    }

    /* Where a lane takes its share from: lanes that have none, 256 bytes of zeros for each chunk.
     */
    __device__ static const char *share_of(const char *memory, const char *zeros)
    {
        int lane = threadIdx.x % 32, c = lane % 4;
        if (whole)
            return memory + 16 * c;
        return lane < 8 ? memory + (packed ? 64 : 128) * (lane / 4) + (packed ? 8 : 16) * c : zeros;
    }

    /* Takes it, after __syncwarp(). */
    __device__ static void take(row_x &r, const char *share)
    {
        if constexpr (packed) {
            uint2 a = *(const uint2 *)share, b = *(const uint2 *)(share + 32);
            r.x[0] = make_uint4(a.x, a.y, b.x, b.y);
        } else {
#pragma unroll
            for (int j = 0; j < (whole ? 4 : 2); j++)
                r.x[j] = *(const uint4 *)(share + 64 * j);
        }
    }

    /* Adds the products of a tile's two units. */
    __device__ static void add_row(sums &s, const char *first, const char *second, const row_x &v,
                                   uint4 levels)
    {
        int lane = threadIdx.x % 32;
        if constexpr (whole) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float4 *w = (const float4 *)(j < 2 ? first : second) + j % 2 * 64 + lane;
                float4 x = *(const float4 *)&v.x[j];
                s.d[0] = dot(w[0], x, s.d[0]);
                s.d[1] = dot(w[32], x, s.d[1]);
            }
        } else if constexpr (!packed) {
            const uint4 *a = (const uint4 *)first + lane, *b = (const uint4 *)second + lane;
            multiply(s.d, a[0], v.x[0].x, v.x[0].y);
            multiply(s.e, b[0], v.x[1].x, v.x[1].y);
            multiply(s.d, a[32], v.x[0].z, v.x[0].w);
            multiply(s.e, b[32], v.x[1].z, v.x[1].w);
        } else {
            const char *scales = first + unit.row_data;
            int t[4] = {}, u[4] = {};
            uint4 x = v.x[0];
            if constexpr (F == BML_WEIGHTS_Q8) {
                multiply(t, at_once((const uint4 *)first + lane), x.x, x.y);
                multiply(t, at_once((const uint4 *)second + lane), x.z, x.w);
                float2 scale = __bfloat1622float2(((const __nv_bfloat162 *)scales)[lane / 4]);
                s.d[0] = fmaf(joined(t[0], t[1]), scale.x * v.scale, s.d[0]);
                s.d[1] = fmaf(joined(t[2], t[3]), scale.y * v.scale, s.d[1]);
            } else {
                multiply(t, four_of(((const uint2 *)first)[lane], levels), x.x, x.y);
                multiply(u, four_of(((const uint2 *)second)[lane], levels), x.z, x.w);
                char2 a = ((const char2 *)scales)[lane / 4];
                char2 b = ((const char2 *)(second + unit.row_data))[lane / 4];
                float one = joined(t[0], t[1]) * a.x, other = joined(t[2], t[3]) * a.y;
                s.d[0] = fmaf(fmaf(joined(u[0], u[1]), b.x, one), v.scale, s.d[0]);
                s.d[1] = fmaf(fmaf(joined(u[2], u[3]), b.y, other), v.scale, s.d[1]);
            }
        }
    }

    /* ---- columns: sixteen rows, BML_CUDA_HIDDEN inputs, and as many more ---- */

    static constexpr bool pairs = !whole; /* F32 takes one unit at a time */

    /* A lane's share of the inputs of both units, which are 4 c and on: F32, of the only one; else
     * the first and the second one's word or two, in lanes as with rows; packed, the second one's
     * are a third and a fourth vector, since their scales differ. */
    struct columns_x {
        uint4 x;
        float scale;
    };

    /* An activation as columns() wants it: with 16 bits, it and what that left. */
    __device__ static float kept(float x)
    {
        if constexpr (whole || packed)
            return x;
        return __uint_as_float(both(x, x - apart(both(x, 0)).x));
    }

    /* Of 32 activations, the second half of which may be none; but for packed weights zeros stand
     * for these. */
    __device__ static columns_x columns(const float *from, bool second)
    {
        columns_x r;
        int lane = threadIdx.x % 32, c = lane % 4;
        if constexpr (whole) {
            r.x = ((const uint4 *)from)[c];
        } else if constexpr (!packed) {
            uint4 a = ((const uint4 *)from)[c], b = ((const uint4 *)from)[4 + c];
            uint32_t halves = lane < 4 ? 0x5410 : 0x7632, here = lane < 8 ? ~0u : 0;
            r.x = make_uint4(
                __byte_perm(a.x, a.y, halves) & here, __byte_perm(a.z, a.w, halves) & here,
                __byte_perm(b.x, b.y, halves) & here, __byte_perm(b.z, b.w, halves) & here);
        } else {
            int vector = lane / 4; /* 2 and 3 are of the second unit */
            float4 v = ((const float4 *)from)[second ? vector / 2 % 2 * 4 + c : c];
            uint32_t most =
                max(max(magnitude(v.x), magnitude(v.y)), max(magnitude(v.z), magnitude(v.w)));
            most = __reduce_max_sync(~0u, most);
            float inverse = inverse_of(most);
            int x = __float2int_rn(v.x * inverse), y = __float2int_rn(v.y * inverse);
            int z = __float2int_rn(v.z * inverse), w = __float2int_rn(v.w * inverse);
            int down = vector % 2 ? 0 : 8, half = vector % 2 ? 0 : 128;
            uint32_t four = bytes((x + half) >> down, (y + half) >> down, (z + half) >> down,
                                  (w + half) >> down);
            r.x = make_uint4(vector < 2 ? four : 0, second && vector / 2 == 1 ? four : 0, 0, 0);
            r.scale = scale_of(most);
        }
        return r;
    }

    /* Where a lane finds its weights of the first tile, and its scales; SECOND is anything if there
     * is no second unit. */
    struct column_units {
        const char *first, *second, *scales;

        __device__ column_units(const char *one, const char *other)
        {
            int lane = threadIdx.x % 32;
            first = one + lane * (whole ? 16 : unit.col_data / 32);
            second = other + lane * (whole ? 16 : unit.col_data / 32);
            scales = (lane % 4 == 1 ? other : one) + unit.col_data +
                     lane / 4 * ((unit.col_bytes - unit.col_data) / 8);
        }
    };

    /* Of the Ith tile. */
    __device__ static void add_columns(sums &s, const column_units &from, int i, const columns_x &v,
                                       uint4 levels)
    {
        const char *first = from.first + i * unit.col_bytes;
        const char *second = from.second + i * unit.col_bytes;
        const char *scales = from.scales + i * unit.col_bytes;
        if constexpr (whole) {
            s.d[0] = dot(((const float4 *)first)[0], *(const float4 *)&v.x, s.d[0]);
            s.d[1] = dot(((const float4 *)first)[32], *(const float4 *)&v.x, s.d[1]);
        } else if constexpr (!packed) {
            multiply(s.d, *(const uint4 *)first, v.x.x, v.x.y);
            multiply(s.d, *(const uint4 *)second, v.x.z, v.x.w);
        } else {
            int t[4] = {};
            float2 scale;
            uint4 w;
            if constexpr (F == BML_WEIGHTS_Q8) {
                uint2 a = *(const uint2 *)first, b = *(const uint2 *)second;
                w = make_uint4(a.x, a.y, b.x, b.y);
                scale = __bfloat1622float2(*(const __nv_bfloat162 *)scales);
            } else {
                uint32_t a = *(const uint32_t *)first, b = *(const uint32_t *)second;
                w = make_uint4(q4_levels_of(a, levels), q4_levels_of(a >> 16, levels),
                               q4_levels_of(b, levels), q4_levels_of(b >> 16, levels));
                char2 two = *(const char2 *)scales;
                scale = make_float2(two.x, two.y);
            }
            multiply(t, w, v.x.x, v.x.y);
            s.d[0] = fmaf(joined(t[0], t[1]) * scale.x, v.scale, s.d[0]);
            s.d[1] = fmaf(joined(t[2], t[3]) * scale.y, v.scale, s.d[1]);
        }
    }

    /* Two activations in the type of 16-bit weights. */
    __device__ static uint32_t both(float x, float y)
    {
        if constexpr (half) {
            __half2 v = __floats2half2_rn(x, y);
            return *(uint32_t *)&v;
        }
        __nv_bfloat162 v = __floats2bfloat162_rn(x, y);
        return *(uint32_t *)&v;
    }

    __device__ static float2 apart(uint32_t v)
    {
        if constexpr (half)
            return __half22float2(*(const __half2 *)&v);
        return make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u));
    }

    /* d += w x^T for 16 inputs, in any order that w and x share. */
    __device__ static void multiply(float d[4], uint4 w, uint32_t x0, uint32_t x1)
    {
        uint32_t a[4] = {w.x, w.y, w.z, w.w};
        if constexpr (half)
            mma<__half>(d, a, x0, x1);
        else
            mma<__nv_bfloat16>(d, a, x0, x1);
    }

  private:
    __device__ static float dot(float4 w, float4 x, float sum)
    {
        return fmaf(w.w, x.w, fmaf(w.z, x.z, fmaf(w.y, x.y, fmaf(w.x, x.x, sum))));
    }

    /* From shared memory; the compiler makes four loads of it where it does not see why not. */
    __device__ static uint4 at_once(const uint4 *from)
    {
        uint4 v;
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                     : "r"(shared_address(from)));
        return v;
    }

    /* Eight nibbles of each of two rows: four int8 of each in turn. */
    __device__ static uint4 four_of(uint2 q, uint4 levels)
    {
        return make_uint4(q4_levels_of(q.x, levels), q4_levels_of(q.y, levels),
                          q4_levels_of(q.x >> 16, levels), q4_levels_of(q.y >> 16, levels));
    }

    /* ---- activations as two int8: 256 x[0] + x[1], from -32512 to 32512 ---- */

    /* Ordered as the magnitudes are, infinity and NaN last. */
    __device__ static uint32_t magnitude(float x)
    {
        return __float_as_uint(x) & 0x7fffffffu;
    }

    /* What is smaller than this counts as that: its inverse would overflow. */
    static constexpr float least = 1e-30f;

    /* A chunk that is not finite gets the scale NaN, so that it shows in the result. */
    __device__ static float scale_of(uint32_t most)
    {
        return most < 0x7f800000u ? fmaxf(__uint_as_float(most), least) * (1 / 32512.0f) : NAN;
    }

    __device__ static float inverse_of(uint32_t most)
    {
        return 32512 * reciprocal_fast(fmaxf(__uint_as_float(most), least));
    }

    __device__ static uint32_t bytes(int x, int y, int z, int w)
    {
        return __byte_perm(__byte_perm(x, y, 0x0040), __byte_perm(z, w, 0x0040), 0x5410);
    }

    /* Whole numbers, exact until here: at most 64 products of 127 and 32512. */
    __device__ static float joined(int sum, int of_left)
    {
        return (float)(sum * 256 + of_left);
    }

    /* The same for 32 int8. */
    __device__ static void multiply(int d[4], uint4 w, uint32_t x0, uint32_t x1)
    {
        asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, "
            "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
            : "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w), "r"(x0), "r"(x1));
    }
};

#endif
