/* Attention the plain way, a simdgroup a query; the fast kernels are held to these. */
#include "heads.metal"

/*
 * One query against the first N_KEYS keys, which begin at element FIRST. Scores are folded into
 * the output as they come, scaled to the largest so far (Milakov and Gimelshein 2018).
 */
static inline void attend(device float *out, device const float *q, device const uchar *k,
                          device const uchar *v, uint format, ulong first, uint n_keys,
                          uint head_dim, float scale, uint lane)
{
    float top = -INFINITY, sum = 0;
    for (uint i = lane; i < head_dim; i += SIMD_WIDTH)
        out[i] = 0;
    for (uint key = 0; key < n_keys; key++) {
        ulong row = first + ulong(key) * head_dim;
        float score = 0;
        for (uint i = lane; i < head_dim; i += SIMD_WIDTH)
            score += q[i] * element(k, format, row + i);
        score = scale * simd_sum(score);
        float higher = max(top, score), keep = exp(top - higher), weight = exp(score - higher);
        top = higher;
        sum = sum * keep + weight;
        for (uint i = lane; i < head_dim; i += SIMD_WIDTH)
            out[i] = out[i] * keep + weight * element(v, format, row + i);
    }
    for (uint i = lane; i < head_dim; i += SIMD_WIDTH)
        out[i] /= sum;
}

/* Stateless: q, k, v [H, T, D] of one whole prompt; token t sees tokens 0 to t. */
kernel void attention(device float *out [[buffer(0)]], device const float *q [[buffer(1)]],
                      device const uchar *k [[buffer(2)]], device const uchar *v [[buffer(3)]],
                      constant attention_args &args [[buffer(4)]],
                      uint group [[threadgroup_position_in_grid]],
                      uint lane [[thread_index_in_simdgroup]])
{
    uint n_tokens = args.cache.n_ctx, head_dim = args.cache.head_dim;
    uint head = group / n_tokens, t = group % n_tokens;
    attend(out + ulong(group) * head_dim, q + ulong(group) * head_dim, k, v, FORMAT_F32,
           ulong(head) * n_tokens * head_dim, t + 1, head_dim, args.scale, lane);
}

/* Token t sees positions 0 to position[t] of its slot in the cache. */
kernel void attention_cached(device float *out [[buffer(0)]], device const float *q [[buffer(1)]],
                             device const uchar *k [[buffer(2)]],
                             device const uchar *v [[buffer(3)]],
                             device const int *position [[buffer(4)]],
                             device const int *slot [[buffer(5)]],
                             constant attention_args &args [[buffer(6)]],
                             uint group [[threadgroup_position_in_grid]],
                             uint lane [[thread_index_in_simdgroup]])
{
    uint t = group / args.cache.n_head, head = group % args.cache.n_head;
    attend(out + ulong(t) * args.out.token + ulong(head) * args.out.head,
           q + ulong(t) * args.q.token + ulong(head) * args.q.head, k, v, args.cache.format,
           cache_head(args.cache, uint(slot[t]), head), uint(position[t]) + 1, args.cache.head_dim,
           args.scale, lane);
}
