/* embedding: out[t] = wte[token[t]] + wpe[position[t]], one element a thread. */
#include "common.metal"

kernel void embedding(device float *out [[buffer(0)]], device const uchar *wte [[buffer(1)]],
                      device const uchar *wpe [[buffer(2)]], device const int *token [[buffer(3)]],
                      device const int *position [[buffer(4)]],
                      constant embedding_args &args [[buffer(5)]],
                      uint index [[thread_position_in_grid]])
{
    uint width = args.wte.n_in, t = index / width, i = index % width;
    if (t >= args.n_tokens)
        return;
    uint id = uint(token[t]);
    float x = args.wte.format < FORMAT_Q8 ? element(wte, args.wte.format, ulong(id) * width + i)
                                          : packed_element4(wte, args.wte.format, args.wte, id,
                                                            i / 4 * 4, args.wte.levels)[i % 4];
    out[index] = x + element(wpe, args.wpe_format, ulong(position[t]) * width + i);
}
