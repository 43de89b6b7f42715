/* Linear layers the plain way, an output a thread; the fast products are held to these. */
#include "common.metal"

/* out = x W + bias, W stored [n_in, n_out] */
kernel void linear(device float *out [[buffer(0)]], device const float *x [[buffer(1)]],
                   device const uchar *w [[buffer(2)]], device const float *bias [[buffer(3)]],
                   constant product_args &args [[buffer(4)]],
                   uint index [[thread_position_in_grid]])
{
    uint n_in = args.w.n_in, n_out = args.w.n_out, t = index / n_out, o = index % n_out;
    if (t >= args.n_tokens)
        return;
    float sum = 0;
    for (uint i = 0; i < n_in; i++)
        sum += x[ulong(t) * n_in + i] * element(w, args.w.format, ulong(i) * n_out + o);
    out[index] = args.has_bias ? sum + bias[o] : sum;
}

/* The same with W stored [n_out, n_in]. */
kernel void linear_transposed(device float *out [[buffer(0)]], device const float *x [[buffer(1)]],
                              device const uchar *w [[buffer(2)]],
                              device const float *bias [[buffer(3)]],
                              constant product_args &args [[buffer(4)]],
                              uint index [[thread_position_in_grid]])
{
    uint n_in = args.w.n_in, n_out = args.w.n_out, t = index / n_out, o = index % n_out;
    if (t >= args.n_tokens)
        return;
    float sum = 0;
    for (uint i = 0; i < n_in; i++)
        sum += x[ulong(t) * n_in + i] * element(w, args.w.format, ulong(o) * n_in + i);
    out[index] = args.has_bias ? sum + bias[o] : sum;
}

/* The same with packed weights. */
kernel void linear_packed(device float *out [[buffer(0)]], device const float *x [[buffer(1)]],
                          device const uchar *w [[buffer(2)]],
                          device const float *bias [[buffer(3)]],
                          constant product_args &args [[buffer(4)]],
                          uint index [[thread_position_in_grid]])
{
    uint n_in = args.w.n_in, n_out = args.w.n_out, t = index / n_out, o = index % n_out;
    if (t >= args.n_tokens)
        return;
    float sum = 0;
    for (uint first = 0; first < n_in; first += 4) {
        float4 four = packed_element4(w, args.w.format, args.w, o, first, args.w.levels);
        for (uint i = first; i < min(first + 4, n_in); i++)
            sum += x[ulong(t) * n_in + i] * four[i - first];
    }
    out[index] = args.has_bias ? sum + bias[o] : sum;
}
