/*
 * Attention for prompts: a threadgroup takes up to QUERY_GROUP queries of one head that follow
 * each other in a slot, and QUERY_GROUP_KEYS keys at a time, as 8 by 8 matrices. Its four
 * simdgroups share out the keys of the scores, two rows of the softmax each, and the columns of the
 * values. Heads of up to 128 elements.
 *
 * A key that a query must not see has the weight 0; if its value is NaN or infinite, so is then
 * what the queries of the group before it get.
 */
#include "heads.metal"

enum {
    GROUP_SIMDGROUPS = TILE_THREADS / SIMD_WIDTH,
    GROUP_ROWS = QUERY_GROUP / GROUP_SIMDGROUPS, /* queries in the care of a simdgroup */
    MOST_COLUMNS = 128 / 8 / GROUP_SIMDGROUPS    /* matrices of values in its care */
};

/* kv [QUERY_GROUP_KEYS][width]: cached rows from KEY on, zeros past N_KEYS and past head_dim */
static inline void load_keys(threadgroup float *kv, device const uchar *cached, ulong first,
                             uint key, uint n_keys, uint width, constant cache_layout &cache,
                             uint thread_index)
{
    bool wide = cache.head_dim % 4 == 0;
    for (uint e = thread_index * 4; e < QUERY_GROUP_KEYS * width; e += TILE_THREADS * 4) {
        uint row = key + e / width, i = e % width;
        float4 four = float4(0.0f);
        ulong from = first + ulong(row) * cache.head_dim + i;
        if (row < n_keys && wide && i < cache.head_dim)
            four = element4(cached, cache.format, from);
        for (uint j = 0; j < 4 && row < n_keys && !wide; j++)
            four[j] = i + j < cache.head_dim ? element(cached, cache.format, from + j) : 0;
        ((threadgroup float4 *)kv)[e / 4] = four;
    }
}

kernel void attention_group(
    device float *out [[buffer(0)]], device const float *q [[buffer(1)]],
    device const uchar *k [[buffer(2)]], device const uchar *v [[buffer(3)]],
    device const int *position [[buffer(4)]], device const int *slot [[buffer(5)]],
    device const int *group_first [[buffer(6)]], device const int *group_size [[buffer(7)]],
    constant attention_args &args [[buffer(8)]], threadgroup float *memory [[threadgroup(0)]],
    uint group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]])
{
    uint head_dim = args.cache.head_dim, width = (head_dim + 7) / 8 * 8;
    uint head = group % args.cache.n_head, queries = group / args.cache.n_head;
    uint token = uint(group_first[queries]), n_queries = uint(group_size[queries]);
    uint begin = uint(position[token]), n_keys = begin + n_queries;
    ulong first = cache_head(args.cache, uint(slot[token]), head);
    threadgroup float *weights = memory; /* [QUERY_GROUP][QUERY_GROUP_KEYS], scores at first */
    threadgroup float *scales = weights + QUERY_GROUP * QUERY_GROUP_KEYS; /* 8 by 8, a diagonal */
    threadgroup float *qs = scales + QUERY_GROUP * QUERY_GROUP;           /* [QUERY_GROUP][width] */
    threadgroup float *kv = qs + QUERY_GROUP * width; /* [QUERY_GROUP_KEYS][width] */

    q += ulong(head) * args.q.head;
    for (uint e = thread_index; e < QUERY_GROUP * width; e += TILE_THREADS) {
        uint r = e / width, i = e % width;
        bool there = r < n_queries && i < head_dim;
        qs[e] = there ? args.scale * q[ulong(token + r) * args.q.token + i] : 0;
    }
    for (uint e = thread_index; e < QUERY_GROUP * QUERY_GROUP; e += TILE_THREADS)
        scales[e] = 0;
    float top[GROUP_ROWS], sum[GROUP_ROWS];
    for (uint r = 0; r < GROUP_ROWS; r++) {
        top[r] = -INFINITY;
        sum[r] = 0;
    }
    simdgroup_float8x8 value[MOST_COLUMNS];
    for (uint c = 0; c < MOST_COLUMNS; c++)
        value[c] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);

    for (uint base = 0; base < n_keys; base += QUERY_GROUP_KEYS) {
        load_keys(kv, k, first, base, n_keys, width, args.cache, thread_index);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        simdgroup_float8x8 score = make_filled_simdgroup_matrix<float, 8, 8>(0.0f), a, b;
        for (uint i = 0; i < width; i += 8) {
            simdgroup_load(a, qs + i, width);
            simdgroup_load(b, kv + simdgroup * 8 * width + i, width, 0, true);
            simdgroup_multiply_accumulate(score, a, b, score);
        }
        simdgroup_store(score, weights + simdgroup * 8, QUERY_GROUP_KEYS);
        threadgroup_barrier(mem_flags::mem_threadgroup);

        load_keys(kv, v, first, base, n_keys, width, args.cache, thread_index);
        for (uint r = 0; r < GROUP_ROWS; r++) {
            uint row = simdgroup * GROUP_ROWS + r;
            bool seen = base + lane <= begin + min(row, n_queries - 1);
            float s = seen ? weights[row * QUERY_GROUP_KEYS + lane] : -INFINITY;
            float higher = max(top[r], simd_max(s));
            /* The first keys are seen by every query, so higher is a score from then on. */
            float keep = base == 0 ? 0 : exp(top[r] - higher);
            float weight = seen ? exp(s - higher) : 0;
            top[r] = higher;
            sum[r] = sum[r] * keep + simd_sum(weight);
            weights[row * QUERY_GROUP_KEYS + lane] = weight;
            if (lane == 0)
                scales[row * (QUERY_GROUP + 1)] = keep;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        simdgroup_float8x8 scale;
        simdgroup_load(scale, scales, QUERY_GROUP);
        for (uint c = 0; c < MOST_COLUMNS; c++) {
            uint column = (simdgroup + c * GROUP_SIMDGROUPS) * 8;
            if (column >= width)
                continue;
            simdgroup_multiply(value[c], scale, value[c]);
            for (uint i = 0; i < QUERY_GROUP_KEYS; i += 8) {
                simdgroup_load(a, weights + i, QUERY_GROUP_KEYS);
                simdgroup_load(b, kv + i * width + column, width);
                simdgroup_multiply_accumulate(value[c], a, b, value[c]);
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }

    /* The queries are done with: the results leave by way of their place. */
    for (uint c = 0; c < MOST_COLUMNS; c++)
        if ((simdgroup + c * GROUP_SIMDGROUPS) * 8 < width)
            simdgroup_store(value[c], qs + (simdgroup + c * GROUP_SIMDGROUPS) * 8, width);
    if (lane == 0)
        for (uint r = 0; r < GROUP_ROWS; r++)
            scales[simdgroup * GROUP_ROWS + r] = sum[r];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out += ulong(head) * args.out.head;
    for (uint e = thread_index; e < QUERY_GROUP * width; e += TILE_THREADS) {
        uint r = e / width, i = e % width;
        if (r < n_queries && i < head_dim)
            out[ulong(token + r) * args.out.token + i] = qs[e] / scales[r];
    }
}
