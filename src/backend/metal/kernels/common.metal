/* What several families of kernels share: elements of every format, sums over a threadgroup. */
#pragma once

#include <metal_stdlib>

#include "arguments.h"

using namespace metal;

/* The format of a product's weights, known when its pipeline is made. */
constant uint WEIGHT_FORMAT [[function_constant(0)]];

/* A thread's place in its threadgroup. */
struct place {
    uint thread_index, lane, simdgroup;
};

/* ---- elements -------------------------------------------------------------------------------- */

static inline float from_bf16(uint bits)
{
    return as_type<float>(bits << 16);
}

static inline ushort to_bf16(float x)
{
    uint bits = as_type<uint>(x);
    if ((bits & 0x7fffffff) > 0x7f800000)
        return ushort(bits >> 16 | 0x40); /* NaN stays NaN */
    return ushort((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* Element I of row-major data. */
static inline float element(device const uchar *data, uint format, ulong i)
{
    if (format == FORMAT_F32)
        return ((device const float *)data)[i];
    if (format == FORMAT_F16)
        return float(((device const half *)data)[i]);
    return from_bf16(((device const ushort *)data)[i]);
}

/* Elements I to I + 3, aligned for one load. */
static inline float4 element4(device const uchar *data, uint format, ulong i)
{
    if (format == FORMAT_F32)
        return ((device const float4 *)data)[i / 4];
    if (format == FORMAT_F16)
        return float4(((device const half4 *)data)[i / 4]);
    ushort4 bits = ((device const ushort4 *)data)[i / 4];
    return float4(from_bf16(bits.x), from_bf16(bits.y), from_bf16(bits.z), from_bf16(bits.w));
}

static inline void store_element(device uchar *data, uint format, ulong i, float x)
{
    if (format == FORMAT_F32)
        ((device float *)data)[i] = x;
    else if (format == FORMAT_F16)
        ((device half *)data)[i] = half(x);
    else
        ((device ushort *)data)[i] = to_bf16(x);
}

/* ---- packed weights: the tiles of backend/cpu/quant.h ------------------------------------------
 */

enum { PACK_OUTPUTS = 16, PACK_INPUTS = 64 };

static inline device const uchar *packed_tile(device const uchar *w, constant weight_layout &layout,
                                              uint output)
{
    return w + ulong(output / PACK_OUTPUTS) * layout.tile_bytes;
}

/* What a block's weights are multiplied by, for one output of a tile and an input's HALF. */
static inline float packed_scale(device const uchar *tile, uint format, uint block, uint half_block,
                                 uint output)
{
    if (format == FORMAT_Q8)
        return from_bf16(((device const ushort *)tile)[block * PACK_OUTPUTS + output]);
    float row_scale = ((device const float *)tile)[output];
    device const char *scales = (device const char *)(tile + PACK_OUTPUTS * sizeof(float));
    return row_scale * float(scales[(block * 2 + half_block) * PACK_OUTPUTS + output]);
}

/* Four weights of a word before scaling. Of Q4, HIGH are those in the high nibbles. */
static inline float4 unpack_q8(uint word)
{
    return float4(float(word & 255), float(word >> 8 & 255), float(word >> 16 & 255),
                  float(word >> 24)) -
           128.0f;
}

template <typename Levels> static inline float4 unpack_q4(uint word, bool high, Levels levels)
{
    word >>= high ? 4 : 0;
    return float4(levels[word & 15], levels[word >> 8 & 15], levels[word >> 16 & 15],
                  levels[word >> 24 & 15]);
}

/* Inputs I to I + 3 of one output; I is a multiple of 4. */
template <typename Levels>
static inline float4 packed_element4(device const uchar *w, uint format,
                                     constant weight_layout &layout, uint output, uint i,
                                     Levels levels)
{
    device const uchar *tile = packed_tile(w, layout, output);
    device const uint *words = (device const uint *)(tile + layout.tile_header);
    uint o = output % PACK_OUTPUTS, block = i / PACK_INPUTS, in = i % PACK_INPUTS;
    float scale = packed_scale(tile, format, block, in / 32, o);
    if (format == FORMAT_Q8)
        return unpack_q8(words[(block * 16 + in / 4) * PACK_OUTPUTS + o]) * scale;
    return unpack_q4(words[(block * 8 + in / 8) * PACK_OUTPUTS + o], in % 8 >= 4, levels) * scale;
}

/* ---- a threadgroup together --------------------------------------------------------------------
 */

/* The sum over all ROW_THREADS, for each of them. SCRATCH may be used again at once. */
static inline float threadgroup_sum(float x, threadgroup float *scratch, place at)
{
    x = simd_sum(x);
    if (at.lane == 0)
        scratch[at.simdgroup] = x;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    x = simd_sum(at.lane < ROW_THREADS / SIMD_WIDTH ? scratch[at.lane] : 0.0f);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    return x;
}

/* The same for the largest. */
static inline float threadgroup_max(float x, threadgroup float *scratch, place at)
{
    x = simd_max(x);
    if (at.lane == 0)
        scratch[at.simdgroup] = x;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    x = simd_max(at.lane < ROW_THREADS / SIMD_WIDTH ? scratch[at.lane] : -INFINITY);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    return x;
}

static inline float4 simd_shuffle_xor4(float4 x, ushort mask)
{
    return float4(simd_shuffle_xor(x.x, mask), simd_shuffle_xor(x.y, mask),
                  simd_shuffle_xor(x.z, mask), simd_shuffle_xor(x.w, mask));
}
