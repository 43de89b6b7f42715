/*
 * Products with one token: the weights pass by once, and their bandwidth is the limit. The row of
 * inputs is brought into threadgroup memory first, normed on the way where a norm precedes; bias,
 * activation or the residual stream are taken in at the end. ROW_THREADS threads make
 * VECTOR_OUTPUTS outputs; each thread loads four weights at a time.
 */
#pragma once

#include "gelu.metal"
#include "layernorm.metal"

/* A finished output, and to where it belongs. */
static inline void finish_output(device float *out, ulong index, float sum, uint output,
                                 device const float *bias, constant product_args &args)
{
    if (args.has_bias)
        sum += bias[output];
    if (args.epilogue == EPILOGUE_ACTIVATE)
        sum = activate(sum, args.activation);
    if (args.epilogue == EPILOGUE_ADD)
        sum = out[index] + sum;
    out[index] = sum;
}

/* The inputs into XS, with zeros up to a whole block of packed weights. */
static inline void stage_inputs(threadgroup float *xs, device const float *x,
                                device const float *norm_weight, device const float *norm_bias,
                                constant product_args &args, threadgroup float *scratch, place at)
{
    uint n = args.w.n_in, padded = (n + PACK_INPUTS - 1) / PACK_INPUTS * PACK_INPUTS;
    if (args.has_norm)
        normalise_row(xs, x, norm_weight, norm_bias, args.norm, scratch, at);
    for (uint i = at.thread_index; i < n && !args.has_norm; i += ROW_THREADS)
        xs[i] = x[i];
    for (uint i = n + at.thread_index; i < padded; i += ROW_THREADS)
        xs[i] = 0;
    threadgroup_barrier(mem_flags::mem_threadgroup);
}

/* W stored [n_in, n_out], n_out a multiple of 4. Eight lanes take 32 outputs of an input's row,
 * four such rows a simdgroup, 32 a threadgroup. */
kernel void product_vector_rows(
    device float *out [[buffer(0)]], device const float *x [[buffer(1)]],
    device const uchar *w [[buffer(2)]], device const float *bias [[buffer(3)]],
    device const float *norm_weight [[buffer(4)]], device const float *norm_bias [[buffer(5)]],
    constant product_args &args [[buffer(6)]], threadgroup float *memory [[threadgroup(0)]],
    uint group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]])
{
    threadgroup float *xs = memory + SCRATCH_FLOATS;
    stage_inputs(xs, x, norm_weight, norm_bias, args, memory, place{thread_index, lane, simdgroup});
    uint n_in = args.w.n_in, n_out = args.w.n_out;
    uint first = group * VECTOR_OUTPUTS, column = lane % 8 * 4;
    float4 sum = float4(0.0f);
    if (first + column < n_out)
        for (uint i = simdgroup * 4 + lane / 8; i < n_in; i += ROW_THREADS / 8)
            sum += xs[i] * element4(w, WEIGHT_FORMAT, ulong(i) * n_out + first + column);
    sum += simd_shuffle_xor4(sum, 8);
    sum += simd_shuffle_xor4(sum, 16);
    if (lane < 8)
        ((threadgroup float4 *)memory)[simdgroup * 8 + lane] = sum;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (thread_index >= VECTOR_OUTPUTS || first + thread_index >= n_out)
        return;
    float total = 0;
    for (uint s = 0; s < ROW_THREADS / SIMD_WIDTH; s++)
        total += memory[s * VECTOR_OUTPUTS + thread_index];
    finish_output(out, first + thread_index, total, first + thread_index, bias, args);
}

/* W stored [n_out, n_in], n_in a multiple of 4. A simdgroup takes four outputs. */
kernel void product_vector_dots(
    device float *out [[buffer(0)]], device const float *x [[buffer(1)]],
    device const uchar *w [[buffer(2)]], device const float *bias [[buffer(3)]],
    device const float *norm_weight [[buffer(4)]], device const float *norm_bias [[buffer(5)]],
    constant product_args &args [[buffer(6)]], threadgroup float *memory [[threadgroup(0)]],
    uint group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]])
{
    threadgroup float *xs = memory + SCRATCH_FLOATS;
    stage_inputs(xs, x, norm_weight, norm_bias, args, memory, place{thread_index, lane, simdgroup});
    uint n_in = args.w.n_in, n_out = args.w.n_out;
    uint first = group * VECTOR_OUTPUTS + simdgroup * 4;
    ulong row[4]; /* those past the end read the last one again, for nothing */
    for (uint r = 0; r < 4; r++)
        row[r] = ulong(min(first + r, n_out - 1)) * n_in;
    float sum[4] = {0, 0, 0, 0};
    for (uint i = lane * 4; i < n_in; i += SIMD_WIDTH * 4) {
        float4 inputs = ((threadgroup const float4 *)xs)[i / 4];
        for (uint r = 0; r < 4; r++)
            sum[r] += dot(inputs, element4(w, WEIGHT_FORMAT, row[r] + i));
    }
    float own = 0; /* lane r finishes output r */
    for (uint r = 0; r < 4; r++) {
        float total = simd_sum(sum[r]);
        own = lane == r ? total : own;
    }
    if (lane < 4 && first + lane < n_out)
        finish_output(out, first + lane, own, first + lane, bias, args);
}

/*
 * Packed weights. Four simdgroups share a tile of 16 outputs and take every fourth of its blocks;
 * a lane loads the words of four outputs and four inputs (Q4: eight), so that a simdgroup reads
 * 512 bytes in a row.
 */
kernel void product_vector_packed(
    device float *out [[buffer(0)]], device const float *x [[buffer(1)]],
    device const uchar *w [[buffer(2)]], device const float *bias [[buffer(3)]],
    device const float *norm_weight [[buffer(4)]], device const float *norm_bias [[buffer(5)]],
    constant product_args &args [[buffer(6)]], threadgroup float *memory [[threadgroup(0)]],
    threadgroup float *levels [[threadgroup(1)]], uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]])
{
    threadgroup float *xs = memory + SCRATCH_FLOATS;
    if (thread_index < 16)
        levels[thread_index] = float(args.w.levels[thread_index]);
    stage_inputs(xs, x, norm_weight, norm_bias, args, memory, place{thread_index, lane, simdgroup});
    uint n_blocks = (args.w.n_in + PACK_INPUTS - 1) / PACK_INPUTS;
    uint first = group * VECTOR_OUTPUTS, tile_first = first + simdgroup / 4 * PACK_OUTPUTS;
    uint outputs = lane % 4 * 4, row = lane / 4; /* within the tile; of 64 bytes within the block */
    float4 sum = float4(0.0f);
    if (tile_first < args.w.n_out) {
        device const uchar *tile = packed_tile(w, args.w, tile_first);
        device const uint4 *words = (device const uint4 *)(tile + args.w.tile_header);
        threadgroup const float4 *inputs = (threadgroup const float4 *)xs;
        for (uint block = simdgroup % 4; block < n_blocks; block += 4) {
            if (WEIGHT_FORMAT == FORMAT_Q8) {
                uint4 lower = words[block * 64 + lane], upper = words[block * 64 + 32 + lane];
                float4 in_lower = inputs[block * 16 + row], in_upper = inputs[block * 16 + 8 + row];
                for (uint o = 0; o < 4; o++)
                    sum[o] +=
                        packed_scale(tile, FORMAT_Q8, block, 0, outputs + o) *
                        (dot(unpack_q8(lower[o]), in_lower) + dot(unpack_q8(upper[o]), in_upper));
            } else {
                uint4 word = words[block * 32 + lane];
                float4 in_low = inputs[block * 16 + row * 2],
                       in_high = inputs[block * 16 + row * 2 + 1];
                for (uint o = 0; o < 4; o++)
                    sum[o] += packed_scale(tile, FORMAT_Q4, block, row / 4, outputs + o) *
                              (dot(unpack_q4(word[o], false, levels), in_low) +
                               dot(unpack_q4(word[o], true, levels), in_high));
            }
        }
    }
    sum += simd_shuffle_xor4(sum, 4);
    sum += simd_shuffle_xor4(sum, 8);
    sum += simd_shuffle_xor4(sum, 16);
    if (lane < 4)
        ((threadgroup float4 *)memory)[simdgroup * 4 + lane] = sum;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (thread_index >= VECTOR_OUTPUTS || first + thread_index >= args.w.n_out)
        return;
    float total = 0;
    for (uint s = 0; s < 4; s++)
        total += memory[(thread_index / PACK_OUTPUTS * 4 + s) * PACK_OUTPUTS +
                        thread_index % PACK_OUTPUTS];
    finish_output(out, first + thread_index, total, first + thread_index, bias, args);
}
