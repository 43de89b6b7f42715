/*
 * Attention for one token a slot: a threadgroup takes one query of one head, eight lanes a key and
 * four elements a load, so that a threadgroup has 32 keys on its way. Each eight lanes fold their
 * own keys in as they come; their results are joined at the end.
 */
#include "heads.metal"

enum {
    KEY_LANES = 8,
    KEY_STEP = KEY_LANES * 4, /* elements of a key that its lanes load at a time */
    QUERY_SIMDGROUPS = QUERY_THREADS / SIMD_WIDTH,
    KEYS_AT_ONCE = QUERY_THREADS / KEY_LANES
};

/* Stores the query's own key and value, which lie behind it in qkv, for the whole threadgroup. */
static inline void append_own(device const float *q, device uchar *k, device uchar *v, ulong to,
                              constant attention_args &args, uint thread_index)
{
    uint head_dim = args.cache.head_dim, width = args.cache.n_head * head_dim;
    for (uint i = thread_index; i < head_dim; i += QUERY_THREADS) {
        store_element(k, args.cache.format, to + i, q[width + i]);
        store_element(v, args.cache.format, to + i, q[2 * width + i]);
    }
    threadgroup_barrier(mem_flags::mem_device);
}

/* What some lanes know: the largest score, the sum of weights, and values by weight. */
template <uint STEPS> struct partial {
    float top, sum;
    float4 value[STEPS];
};

/* Scales to a largest score of TOP. */
template <uint STEPS> static inline void rescale(thread partial<STEPS> &p, float top)
{
    /* Nothing folded in yet: there is nothing to keep, and no difference of infinities. */
    float keep = p.sum == 0 ? 0 : exp(p.top - top);
    p.top = top;
    p.sum *= keep;
    for (uint j = 0; j < STEPS; j++)
        p.value[j] *= keep;
}

/* STEPS loads cover a head. */
template <uint STEPS>
static inline void attend_query(device float *out, device const float *q, device uchar *k,
                                device uchar *v, uint position, uint slot,
                                constant attention_args &args, threadgroup float *memory, uint t,
                                uint head, uint thread_index, uint lane, uint simdgroup)
{
    uint head_dim = args.cache.head_dim, format = args.cache.format, own = lane % KEY_LANES * 4;
    ulong first = cache_head(args.cache, slot, head);
    q += ulong(t) * args.q.token + ulong(head) * args.q.head;
    out += ulong(t) * args.out.token + ulong(head) * args.out.head;
    if (args.append)
        append_own(q, k, v, first + ulong(position) * head_dim, args, thread_index);

    float4 query[STEPS];
    partial<STEPS> p;
    p.top = -INFINITY;
    p.sum = 0;
    for (uint j = 0; j < STEPS; j++) {
        uint i = own + j * KEY_STEP;
        query[j] = i < head_dim ? element4((device const uchar *)q, FORMAT_F32, i) : float4(0.0f);
        p.value[j] = float4(0.0f);
    }
    /* All lanes go round equally often, for they exchange what they have. */
    for (uint base = 0; base <= position; base += KEYS_AT_ONCE) {
        uint key = base + simdgroup * (SIMD_WIDTH / KEY_LANES) + lane / KEY_LANES;
        ulong row = first + ulong(min(key, position)) * head_dim + own;
        float score = 0;
        for (uint j = 0; j < STEPS; j++)
            if (own + j * KEY_STEP < head_dim)
                score += dot(query[j], element4(k, format, row + j * KEY_STEP));
        score += simd_shuffle_xor(score, 1);
        score += simd_shuffle_xor(score, 2);
        score += simd_shuffle_xor(score, 4);
        if (key > position)
            continue;
        score *= args.scale;
        rescale(p, max(p.top, score));
        float weight = exp(score - p.top);
        p.sum += weight;
        for (uint j = 0; j < STEPS; j++)
            if (own + j * KEY_STEP < head_dim)
                p.value[j] += weight * element4(v, format, row + j * KEY_STEP);
    }

    /* Join the four keys of a simdgroup, then the simdgroups. */
    for (ushort mask = KEY_LANES; mask < SIMD_WIDTH; mask *= 2) {
        rescale(p, max(p.top, simd_shuffle_xor(p.top, mask)));
        p.sum += simd_shuffle_xor(p.sum, mask);
        for (uint j = 0; j < STEPS; j++)
            p.value[j] += simd_shuffle_xor4(p.value[j], mask);
    }
    threadgroup float *tops = memory, *sums = memory + QUERY_SIMDGROUPS;
    threadgroup float4 *values = (threadgroup float4 *)(memory + 2 * QUERY_SIMDGROUPS);
    uint quads = STEPS * KEY_LANES; /* of a simdgroup's values */
    for (uint j = 0; j < STEPS && lane < KEY_LANES; j++)
        values[simdgroup * quads + j * KEY_LANES + lane] = p.value[j];
    if (lane == 0) {
        tops[simdgroup] = p.top;
        sums[simdgroup] = p.sum;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float top = -INFINITY, sum = 0, value = 0;
    for (uint s = 0; s < QUERY_SIMDGROUPS; s++)
        top = max(top, tops[s]);
    uint i = thread_index;
    for (uint s = 0; s < QUERY_SIMDGROUPS && i < head_dim; s++) {
        float keep = sums[s] == 0 ? 0 : exp(tops[s] - top);
        sum += keep * sums[s];
        value += keep * memory[2 * QUERY_SIMDGROUPS + s * quads * 4 + i];
    }
    if (i < head_dim)
        out[i] = value / sum;
}

/* Heads of up to 64 elements, a multiple of 4. */
kernel void attention_query_64(
    device float *out [[buffer(0)]], device const float *q [[buffer(1)]],
    device uchar *k [[buffer(2)]], device uchar *v [[buffer(3)]],
    device const int *position [[buffer(4)]], device const int *slot [[buffer(5)]],
    constant attention_args &args [[buffer(6)]], threadgroup float *memory [[threadgroup(0)]],
    uint group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]])
{
    uint t = group / args.cache.n_head, head = group % args.cache.n_head;
    attend_query<2>(out, q, k, v, uint(position[t]), uint(slot[t]), args, memory, t, head,
                    thread_index, lane, simdgroup);
}

/* Heads of up to 128 elements, a multiple of 4. */
kernel void attention_query_128(
    device float *out [[buffer(0)]], device const float *q [[buffer(1)]],
    device uchar *k [[buffer(2)]], device uchar *v [[buffer(3)]],
    device const int *position [[buffer(4)]], device const int *slot [[buffer(5)]],
    constant attention_args &args [[buffer(6)]], threadgroup float *memory [[threadgroup(0)]],
    uint group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]])
{
    uint t = group / args.cache.n_head, head = group % args.cache.n_head;
    attend_query<4>(out, q, k, v, uint(position[t]), uint(slot[t]), args, memory, t, head,
                    thread_index, lane, simdgroup);
}

/* Heads of up to 256 elements, a multiple of 4. */
kernel void attention_query_256(
    device float *out [[buffer(0)]], device const float *q [[buffer(1)]],
    device uchar *k [[buffer(2)]], device uchar *v [[buffer(3)]],
    device const int *position [[buffer(4)]], device const int *slot [[buffer(5)]],
    constant attention_args &args [[buffer(6)]], threadgroup float *memory [[threadgroup(0)]],
    uint group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]])
{
    uint t = group / args.cache.n_head, head = group % args.cache.n_head;
    attend_query<8>(out, q, k, v, uint(position[t]), uint(slot[t]), args, memory, t, head,
                    thread_index, lane, simdgroup);
}
