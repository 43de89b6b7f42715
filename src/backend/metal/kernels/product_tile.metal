/*
 * Products with several tokens, in tiles of ROWS tokens and TILE_OUTPUTS outputs: TILE_INPUTS
 * inputs at a time go through threadgroup memory, weights widened to float32 on the way, and into
 * 8 by 8 matrices of the simdgroups, each of which has 16 of the outputs. What lies past an edge is
 * zero. Any shape will do.
 */
#include "product_vector.metal"

enum {
    SIMDGROUP_OUTPUTS = TILE_OUTPUTS / (TILE_THREADS / SIMD_WIDTH),
    SIMDGROUP_MATRICES = SIMDGROUP_OUTPUTS / 8
};

/* Up to four consecutive elements from I on, zeros for those past N. */
static inline float4 some_elements(device const uchar *data, uint format, ulong i, uint n,
                                   bool wide)
{
    if (wide && n >= 4)
        return element4(data, format, i);
    float4 four = float4(0.0f);
    for (uint j = 0; j < min(n, 4u); j++)
        four[j] = element(data, format, i + j);
    return four;
}

/* How many of the elements from FIRST on are before END. */
static inline uint remaining(uint first, uint end)
{
    return first < end ? end - first : 0;
}

/* xs [ROWS][TILE_INPUTS]: inputs from INPUT on of the tokens from TOKEN on */
template <uint ROWS>
static inline void load_inputs(threadgroup float *xs, device const float *x, uint token, uint input,
                               constant product_args &args, uint thread_index)
{
    uint n_in = args.w.n_in;
    for (uint e = thread_index * 4; e < ROWS * TILE_INPUTS; e += TILE_THREADS * 4) {
        uint t = token + e / TILE_INPUTS, i = input + e % TILE_INPUTS;
        float4 four = float4(0.0f);
        if (t < args.n_tokens)
            four = some_elements((device const uchar *)x, FORMAT_F32, ulong(t) * n_in + i,
                                 remaining(i, n_in), n_in % 4 == 0);
        ((threadgroup float4 *)xs)[e / 4] = four;
    }
}

/* Weights from INPUT and OUTPUT on. ws is [TILE_INPUTS][TILE_OUTPUTS] for W stored [n_in, n_out],
 * else [TILE_OUTPUTS][TILE_INPUTS]. */
static inline void load_weights(threadgroup float *ws, device const uchar *w, uint input,
                                uint output, constant product_args &args, uint thread_index)
{
    uint n_in = args.w.n_in, n_out = args.w.n_out;
    for (uint e = thread_index * 4; e < TILE_OUTPUTS * TILE_INPUTS; e += TILE_THREADS * 4) {
        float4 four = float4(0.0f);
        uint to = e;
        if (WEIGHT_FORMAT >= FORMAT_Q8) { /* lanes beside each other: outputs, as in a tile */
            uint o = e / 4 % TILE_OUTPUTS, i = e / 4 / TILE_OUTPUTS * 4;
            if (output + o < n_out && input + i < n_in)
                four =
                    packed_element4(w, WEIGHT_FORMAT, args.w, output + o, input + i, args.w.levels);
            to = o * TILE_INPUTS + i;
        } else if (args.w.out_in) {
            uint o = output + e / TILE_INPUTS, i = input + e % TILE_INPUTS;
            if (o < n_out)
                four = some_elements(w, WEIGHT_FORMAT, ulong(o) * n_in + i, remaining(i, n_in),
                                     args.w.wide);
        } else {
            uint i = input + e / TILE_OUTPUTS, o = output + e % TILE_OUTPUTS;
            if (i < n_in)
                four = some_elements(w, WEIGHT_FORMAT, ulong(i) * n_out + o, remaining(o, n_out),
                                     args.w.wide);
        }
        ((threadgroup float4 *)ws)[to / 4] = four;
    }
}

template <uint ROWS>
static inline void product_tile(device float *out, device const float *x, device const uchar *w,
                                device const float *bias, constant product_args &args,
                                threadgroup float *memory, uint group, uint thread_index,
                                uint simdgroup)
{
    threadgroup float *xs = memory, *ws = memory + ROWS * TILE_INPUTS;
    /* Tiles of the same weights follow each other. */
    uint n_row_tiles = (args.n_tokens + ROWS - 1) / ROWS;
    uint token = group % n_row_tiles * ROWS, output = group / n_row_tiles * TILE_OUTPUTS;
    bool by_output = WEIGHT_FORMAT >= FORMAT_Q8 || args.w.out_in;
    simdgroup_float8x8 sum[ROWS / 8][SIMDGROUP_MATRICES];
    for (uint r = 0; r < ROWS / 8; r++)
        for (uint c = 0; c < SIMDGROUP_MATRICES; c++)
            sum[r][c] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);

    for (uint input = 0; input < args.w.n_in; input += TILE_INPUTS) {
        load_inputs<ROWS>(xs, x, token, input, args, thread_index);
        load_weights(ws, w, input, output, args, thread_index);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint i = 0; i < TILE_INPUTS; i += 8)
            for (uint c = 0; c < SIMDGROUP_MATRICES; c++) {
                uint o = simdgroup * SIMDGROUP_OUTPUTS + c * 8;
                simdgroup_float8x8 weights, inputs;
                if (by_output)
                    simdgroup_load(weights, ws + o * TILE_INPUTS + i, TILE_INPUTS, 0, true);
                else
                    simdgroup_load(weights, ws + i * TILE_OUTPUTS + o, TILE_OUTPUTS);
                for (uint r = 0; r < ROWS / 8; r++) {
                    simdgroup_load(inputs, xs + r * 8 * TILE_INPUTS + i, TILE_INPUTS);
                    simdgroup_multiply_accumulate(sum[r][c], inputs, weights, sum[r][c]);
                }
            }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }

    /* Out by way of threadgroup memory, since the edges of the tile may lie outside. */
    for (uint r = 0; r < ROWS / 8; r++)
        for (uint c = 0; c < SIMDGROUP_MATRICES; c++)
            simdgroup_store(sum[r][c],
                            memory + r * 8 * TILE_OUTPUTS + simdgroup * SIMDGROUP_OUTPUTS + c * 8,
                            TILE_OUTPUTS);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint e = thread_index; e < ROWS * TILE_OUTPUTS; e += TILE_THREADS) {
        uint t = token + e / TILE_OUTPUTS, o = output + e % TILE_OUTPUTS;
        if (t < args.n_tokens && o < args.w.n_out)
            finish_output(out, ulong(t) * args.w.n_out + o, memory[e], o, bias, args);
    }
}

kernel void product_tile_8(device float *out [[buffer(0)]], device const float *x [[buffer(1)]],
                           device const uchar *w [[buffer(2)]],
                           device const float *bias [[buffer(3)]],
                           constant product_args &args [[buffer(4)]],
                           threadgroup float *memory [[threadgroup(0)]],
                           uint group [[threadgroup_position_in_grid]],
                           uint thread_index [[thread_index_in_threadgroup]],
                           uint simdgroup [[simdgroup_index_in_threadgroup]])
{
    product_tile<8>(out, x, w, bias, args, memory, group, thread_index, simdgroup);
}

kernel void product_tile_32(device float *out [[buffer(0)]], device const float *x [[buffer(1)]],
                            device const uchar *w [[buffer(2)]],
                            device const float *bias [[buffer(3)]],
                            constant product_args &args [[buffer(4)]],
                            threadgroup float *memory [[threadgroup(0)]],
                            uint group [[threadgroup_position_in_grid]],
                            uint thread_index [[thread_index_in_threadgroup]],
                            uint simdgroup [[simdgroup_index_in_threadgroup]])
{
    product_tile<32>(out, x, w, bias, args, memory, group, thread_index, simdgroup);
}
