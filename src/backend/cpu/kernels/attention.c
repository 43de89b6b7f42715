/*
 * attention and attention_cached: softmax(scale q k') v, causal (Vaswani et al. 2017, arXiv
 * 1706.03762). One row of scores for each query; its order of operations is fixed, whatever else is
 * in the batch. Queries that follow each other in one sequence go QUERIES at a time, so that each
 * key and value is loaded once for all. attention and attention_cached differ only in where keys
 * and values lie.
 */
#include "backend/cpu/kernels/kernels.h"

enum {
#if VL == 16 || defined(__aarch64__) /* 32 registers */
    QUERIES = 4,
    TOGETHER_VECS = 4, /* of a row of v, while QUERIES queries share it */
#elif VL == 8
    QUERIES = 4,
    TOGETHER_VECS = 2,
#else
    QUERIES = 2,
    TOGETHER_VECS = 4,
#endif
    ALONE_VECS = 4 /* the same for a single query */
};
_Static_assert((int)QUERIES <= (int)BML_CPU_QUERIES, "scratch");

/* Rows of floats that are a fixed distance apart. */
typedef struct rows {
    float *at;
    size_t stride;
} rows;

/* scores[query][first..first+n) = scale * q.k for n <= VL keys, rows of d elements. */
static inline __attribute__((always_inline)) void score_keys(bml_dtype dtype, size_t queries,
                                                             rows scores, rows q, const void *k,
                                                             size_t first, size_t n, size_t d,
                                                             float scale)
{
    vf sums[QUERIES][VL];
    size_t whole = d - d % VL;
    int tail = (int)(d % VL);
    for (size_t key = 0; key < n; key++) {
        size_t at = (first + key) * d;
        vf sum[QUERIES];
        for (size_t t = 0; t < queries; t++)
            sum[t] = (vf){0};
        for (size_t i = 0; i < whole; i += VL) {
            vf ks = vf_load_as(dtype, k, at + i);
            for (size_t t = 0; t < queries; t++)
                sum[t] = vf_fma(vf_load(q.at + t * q.stride + i), ks, sum[t]);
        }
        if (tail) {
            vf ks = vf_load_as_n(dtype, k, at + whole, tail);
            for (size_t t = 0; t < queries; t++)
                sum[t] = vf_fma(vf_load_n(q.at + t * q.stride + whole, tail), ks, sum[t]);
        }
        for (size_t t = 0; t < queries; t++)
            sums[t][key] = sum[t];
    }
    for (size_t t = 0; t < queries; t++) {
        for (size_t key = n; key < VL; key++)
            sums[t][key] = (vf){0};
        vf all = vf_sum_all(sums[t]) * scale;
        float *to = scores.at + t * scores.stride + first;
        if (n == VL)
            vf_store(to, all);
        else
            vf_store_n(to, all, (int)n);
    }
}

/* sum += weight * a row of v: VECS vectors, of which the last has TAIL elements if that is not 0.
 */
static inline __attribute__((always_inline)) void
add_row(bml_dtype dtype, vf *sum, float weight, const void *v, size_t at, size_t vecs, int tail)
{
    vf p = vf_set1(weight);
    for (size_t c = 0; c < vecs; c++) {
        bool partial = tail && c + 1 == vecs;
        sum[c] = vf_fma(p,
                        partial ? vf_load_as_n(dtype, v, at + c * VL, tail)
                                : vf_load_as(dtype, v, at + c * VL),
                        sum[c]);
    }
}

/* Elements i.. of out = the sum over n keys of weight[key] * v[key], times NORM. Even and odd keys
 * are summed apart, so that two chains of additions run side by side. */
static inline __attribute__((always_inline)) void weighted_sum(bml_dtype dtype, float *out,
                                                               const float *weight, float norm,
                                                               const void *v, size_t n, size_t d,
                                                               size_t i, size_t vecs, int tail)
{
    vf even[ALONE_VECS] = {0}, odd[ALONE_VECS] = {0};
    size_t key = 0;
    for (; key + 2 <= n; key += 2) {
        add_row(dtype, even, weight[key], v, key * d + i, vecs, tail);
        add_row(dtype, odd, weight[key + 1], v, (key + 1) * d + i, vecs, tail);
    }
    if (key < n)
        add_row(dtype, even, weight[key], v, key * d + i, vecs, tail);
    for (size_t c = 0; c < vecs; c++)
        if (tail && c + 1 == vecs)
            vf_store_n(out + i + c * VL, (even[c] + odd[c]) * norm, tail);
        else
            vf_store(out + i + c * VL, (even[c] + odd[c]) * norm);
}

/* The same for QUERIES queries, of which each sees one key more than the one before: n for the
 * first. Even keys go first, then odd ones: there are not registers enough for both sums of all. */
static inline __attribute__((always_inline)) void weighted_sums(bml_dtype dtype, rows out,
                                                                rows weight, const float *norm,
                                                                const void *v, size_t n, size_t d,
                                                                size_t i, size_t vecs, int tail)
{
    vf even[QUERIES][TOGETHER_VECS] = {0}, sum[QUERIES][TOGETHER_VECS];
    for (size_t parity = 0; parity < 2; parity++) {
        for (size_t t = 0; t < QUERIES; t++)
            for (size_t c = 0; c < vecs; c++)
                sum[t][c] = (vf){0};
        size_t key = parity;
        for (; key < n; key += 2) {
            vf row[TOGETHER_VECS];
            for (size_t c = 0; c < vecs; c++) {
                size_t at = key * d + i + c * VL;
                bool partial = tail && c + 1 == vecs;
                row[c] = partial ? vf_load_as_n(dtype, v, at, tail) : vf_load_as(dtype, v, at);
            }
            for (size_t t = 0; t < QUERIES; t++) {
                vf p = vf_set1(weight.at[t * weight.stride + key]);
                for (size_t c = 0; c < vecs; c++)
                    sum[t][c] = vf_fma(p, row[c], sum[t][c]);
            }
        }
        for (; key < n + QUERIES - 1; key += 2)
            for (size_t t = key - n + 1; t < QUERIES; t++)
                add_row(dtype, sum[t], weight.at[t * weight.stride + key], v, key * d + i, vecs,
                        tail);
        for (size_t t = 0; t < QUERIES && parity == 0; t++)
            for (size_t c = 0; c < vecs; c++)
                even[t][c] = sum[t][c];
    }
    for (size_t t = 0; t < QUERIES; t++)
        for (size_t c = 0; c < vecs; c++) {
            float *to = out.at + t * out.stride + i + c * VL;
            if (tail && c + 1 == vecs)
                vf_store_n(to, (even[t][c] + sum[t][c]) * norm[t], tail);
            else
                vf_store(to, (even[t][c] + sum[t][c]) * norm[t]);
        }
}

/* One query, or QUERIES, against keys and values, rows of d elements; the first query sees n. */
static inline __attribute__((always_inline)) void queries_of(bml_dtype dtype, size_t queries,
                                                             rows out, rows q, const void *k,
                                                             const void *v, size_t n, size_t d,
                                                             float scale, float *scratch)
{
    size_t n_keys = n + queries - 1, key = 0;
    rows scores = {scratch, n_keys};
    for (; key + VL <= n_keys; key += VL)
        score_keys(dtype, queries, scores, q, k, key, VL, d, scale);
    if (key < n_keys)
        score_keys(dtype, queries, scores, q, k, key, n_keys - key, d, scale);
    float norm[QUERIES]; /* 1 / the sum of a query's weights */
    for (size_t t = 0; t < queries; t++)
        norm[t] = KERNEL(exp_row)(scores.at + t * scores.stride, n + t);
    for (size_t i = 0; i < d;) {
        size_t most = queries == 1 ? ALONE_VECS : TOGETHER_VECS;
        size_t vecs = i + most * VL <= d ? most : 1;
        int tail = d - i < VL ? (int)(d - i) : 0;
        if (queries == 1 && vecs == ALONE_VECS)
            weighted_sum(dtype, out.at, scores.at, norm[0], v, n, d, i, ALONE_VECS, 0);
        else if (queries == 1)
            weighted_sum(dtype, out.at, scores.at, norm[0], v, n, d, i, 1, tail);
        else if (vecs == TOGETHER_VECS)
            weighted_sums(dtype, out, scores, norm, v, n, d, i, TOGETHER_VECS, 0);
        else
            weighted_sums(dtype, out, scores, norm, v, n, d, i, 1, tail);
        i += vecs * VL;
    }
}

/* N_QUERIES of 1 or QUERIES; GPT-2's head size, 64, gets code of its own. */
static inline __attribute__((always_inline)) void attend_as(bml_dtype dtype, size_t n_queries,
                                                            rows out, rows q, const void *k,
                                                            const void *v, size_t n, size_t d,
                                                            float scale, float *scratch)
{
    if (n_queries == 1 && d == 64)
        queries_of(dtype, 1, out, q, k, v, n, 64, scale, scratch);
    else if (n_queries == 1)
        queries_of(dtype, 1, out, q, k, v, n, d, scale, scratch);
    else if (d == 64)
        queries_of(dtype, QUERIES, out, q, k, v, n, 64, scale, scratch);
    else
        queries_of(dtype, QUERIES, out, q, k, v, n, d, scale, scratch);
}

/* ---- stateless --------------------------------------------------------------------------------*/

typedef struct job {
    float *out;
    const float *q, *k, *v;
    size_t n_tokens, n_head, d;
    float scale;
    bml_queue *queue;
} job;

/* Groups of queries are dealt out in turn: the later ones of a prompt have more keys to look at. */
static void stateless_part(void *context, int part, int n_parts)
{
    const job *j = context;
    float *scratch = bml_cpu_scratch(j->queue, part);
    size_t n_groups = (j->n_tokens + QUERIES - 1) / QUERIES;
    for (size_t at = (size_t)part; at < j->n_head * n_groups; at += (size_t)n_parts) {
        size_t head = at / n_groups * j->n_tokens * j->d, t = at % n_groups * QUERIES;
        size_t last = t + QUERIES <= j->n_tokens ? t + QUERIES : j->n_tokens;
        for (size_t together = last - t == QUERIES ? QUERIES : 1; t < last; t += together)
            attend_as(BML_F32, together, (rows){j->out + head + t * j->d, j->d},
                      (rows){(float *)j->q + head + t * j->d, j->d}, j->k + head, j->v + head,
                      t + 1, j->d, j->scale, scratch);
    }
}

void KERNEL(attention)(bml_queue *queue, bml_buffer *out, const bml_buffer *q, const bml_buffer *k,
                       const bml_buffer *v, int n_tokens, int n_head, int head_dim, float scale)
{
    job j = {out->data,      q->data,          k->data, v->data, (size_t)n_tokens,
             (size_t)n_head, (size_t)head_dim, scale,   queue};
    bml_pool_run(queue->pool, stateless_part, &j);
}

/* ---- cached -----------------------------------------------------------------------------------*/

static void attend(rows out, rows q, size_t n_queries, const bml_kv_cache *cache, int layer,
                   int32_t slot, int32_t position, size_t head, float scale, float *scratch)
{
    size_t d = (size_t)cache->head_dim, n = (size_t)position + 1;
    size_t row = (size_t)slot * (size_t)cache->n_head + head;
    size_t offset = row * (size_t)cache->n_ctx * d * bml_dtype_size(cache->dtype);
    const void *k = (const char *)cache->k[layer].data + offset;
    const void *v = (const char *)cache->v[layer].data + offset;
    switch (cache->dtype) {
    case BML_F32:
        attend_as(BML_F32, n_queries, out, q, k, v, n, d, scale, scratch);
        break;
    case BML_BF16:
        attend_as(BML_BF16, n_queries, out, q, k, v, n, d, scale, scratch);
        break;
    default:
        attend_as(BML_F16, n_queries, out, q, k, v, n, d, scale, scratch);
    }
}

size_t KERNEL(attend_groups)(const bml_batch *batch)
{
    return ((size_t)batch->n_tokens + QUERIES - 1) / QUERIES;
}

void KERNEL(attend_group)(const bml_batch *batch, size_t group, float *out, size_t out_stride,
                          const float *q, size_t q_stride, const bml_kv_cache *cache, int layer,
                          size_t head, float scale, float *scratch)
{
    size_t t = group * QUERIES, n_tokens = (size_t)batch->n_tokens;
    size_t last = t + QUERIES <= n_tokens ? t + QUERIES : n_tokens;
    bool follow = last - t == QUERIES; /* all, each other in one sequence */
    for (size_t i = t + 1; i < last; i++)
        follow &= batch->slot[i] == batch->slot[t] &&
                  (size_t)batch->position[i] == (size_t)batch->position[t] + i - t;
    for (size_t together = follow ? QUERIES : 1; t < last; t += together)
        attend((rows){out + t * out_stride, out_stride},
               (rows){(float *)q + t * q_stride, q_stride}, together, cache, layer, batch->slot[t],
               batch->position[t], head, scale, scratch);
}

typedef struct cached_job {
    float *out;
    const float *q;
    const bml_kv_cache *cache;
    int layer;
    float scale;
    bml_queue *queue;
} cached_job;

static void cached_part(void *context, int part, int n_parts)
{
    const cached_job *j = context;
    const bml_batch *batch = j->queue->batch;
    size_t d = (size_t)j->cache->head_dim, n_groups = KERNEL(attend_groups)(batch);
    size_t n = (size_t)j->cache->n_head * n_groups;
    for (size_t at = (size_t)part; at < n; at += (size_t)n_parts) {
        size_t head = at / n_groups, offset = head * (size_t)batch->n_tokens * d;
        KERNEL(attend_group)
        (batch, at % n_groups, j->out + offset, d, j->q + offset, d, j->cache, j->layer, head,
         j->scale, bml_cpu_scratch(j->queue, part));
    }
}

void KERNEL(attention_cached)(bml_queue *queue, bml_buffer *out, const bml_buffer *q,
                              const bml_kv_cache *cache, int layer, float scale)
{
    cached_job j = {out->data, q->data, cache, layer, scale, queue};
    bml_pool_run(queue->pool, cached_part, &j);
}
