/* Copies between rows of tokens, heads and the cache of keys and values; one element a thread. */
#pragma once

#include "common.metal"

/* qkv [T, 3C] -> q, k, v, each [H, T, D] */
kernel void qkv_split(device float *q [[buffer(0)]], device float *k [[buffer(1)]],
                      device float *v [[buffer(2)]], device const float *qkv [[buffer(3)]],
                      constant heads_args &args [[buffer(4)]],
                      uint index [[thread_position_in_grid]])
{
    uint width = args.n_head * args.head_dim, t = index / width, c = index % width;
    if (t >= args.n_tokens)
        return;
    uint to = (c / args.head_dim * args.n_tokens + t) * args.head_dim + c % args.head_dim;
    device const float *from = qkv + ulong(t) * 3 * width + c;
    q[to] = from[0];
    k[to] = from[width];
    v[to] = from[2 * width];
}

/* heads [H, T, D] -> out [T, C] */
kernel void heads_merge(device float *out [[buffer(0)]], device const float *heads [[buffer(1)]],
                        constant heads_args &args [[buffer(2)]],
                        uint index [[thread_position_in_grid]])
{
    uint width = args.n_head * args.head_dim, t = index / width, c = index % width;
    if (t >= args.n_tokens)
        return;
    out[index] = heads[(c / args.head_dim * args.n_tokens + t) * args.head_dim + c % args.head_dim];
}

/* The cache's first element of a slot's head. */
static inline ulong cache_head(constant cache_layout &cache, uint slot, uint head)
{
    return (ulong(slot) * cache.n_head + head) * cache.n_ctx * cache.head_dim;
}

/* Keys and values of the batch into a layer of the cache [n_slots, H, n_ctx, D] */
kernel void kv_append(device uchar *cache_k [[buffer(0)]], device uchar *cache_v [[buffer(1)]],
                      device const float *k [[buffer(2)]], device const float *v [[buffer(3)]],
                      device const int *position [[buffer(4)]],
                      device const int *slot [[buffer(5)]],
                      constant append_args &args [[buffer(6)]],
                      uint index [[thread_position_in_grid]])
{
    uint head_dim = args.cache.head_dim, width = args.cache.n_head * head_dim;
    uint t = index / width, head = index % width / head_dim, i = index % head_dim;
    if (t >= args.n_tokens)
        return;
    ulong to = cache_head(args.cache, uint(slot[t]), head) + ulong(position[t]) * head_dim + i;
    ulong from = ulong(t) * args.from.token + ulong(head) * args.from.head + i;
    store_element(cache_k, args.cache.format, to, k[from]);
    store_element(cache_v, args.cache.format, to, v[from]);
}
