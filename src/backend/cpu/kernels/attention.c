/*
 * attention and attention_cached: softmax(scale q k') v, causal (Vaswani et al. 2017, arXiv
 * 1706.03762). One row of scores at a time; each query's order of operations is fixed, whatever
 * else is in the batch. The two differ only in where keys and values lie.
 */
#include "backend/cpu/kernels/kernels.h"

/* scores[0..n) = scale * q.k for n <= VL keys, rows of d elements. */
static inline __attribute__((always_inline)) void score_keys(bml_dtype dtype, float *scores,
                                                             const float *q, const void *k,
                                                             size_t first, size_t n, size_t d,
                                                             float scale)
{
    vf sums[VL];
    size_t whole = d - d % VL;
    int tail = (int)(d % VL);
    for (size_t key = 0; key < n; key++) {
        size_t at = (first + key) * d;
        vf sum = {0};
        for (size_t i = 0; i < whole; i += VL)
            sum = vf_fma(vf_load(q + i), vf_load_as(dtype, k, at + i), sum);
        if (tail)
            sum = vf_fma(vf_load_n(q + whole, tail), vf_load_as_n(dtype, k, at + whole, tail), sum);
        sums[key] = sum;
    }
    for (size_t key = n; key < VL; key++)
        sums[key] = (vf){0};
    vf all = vf_sum_all(sums) * scale;
    if (n == VL)
        vf_store(scores + first, all);
    else
        vf_store_n(scores + first, all, (int)n);
}

/* sum += weight * a row of v: VECS vectors, of which the last has TAIL elements if that is not 0.
 */
static inline __attribute__((always_inline)) void
add_row(bml_dtype dtype, vf sum[4], float weight, const void *v, size_t at, size_t vecs, int tail)
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

/* Elements i.. of out = the sum over n keys of weight[key] * v[key]. Even and odd keys are summed
 * apart, so that two chains of additions run side by side. */
static inline __attribute__((always_inline)) void weighted_sum(bml_dtype dtype, float *out,
                                                               const float *weight, const void *v,
                                                               size_t n, size_t d, size_t i,
                                                               size_t vecs, int tail)
{
    vf even[4] = {0}, odd[4] = {0};
    size_t key = 0;
    for (; key + 2 <= n; key += 2) {
        add_row(dtype, even, weight[key], v, key * d + i, vecs, tail);
        add_row(dtype, odd, weight[key + 1], v, (key + 1) * d + i, vecs, tail);
    }
    if (key < n)
        add_row(dtype, even, weight[key], v, key * d + i, vecs, tail);
    for (size_t c = 0; c < vecs; c++)
        if (tail && c + 1 == vecs)
            vf_store_n(out + i + c * VL, even[c] + odd[c], tail);
        else
            vf_store(out + i + c * VL, even[c] + odd[c]);
}

/* One query against n keys and values, rows of d elements. */
static inline __attribute__((always_inline)) void query_of(bml_dtype dtype, float *out,
                                                           const float *q, const void *k,
                                                           const void *v, size_t n, size_t d,
                                                           float scale, float *scores)
{
    size_t key = 0, i = 0;
    for (; key + VL <= n; key += VL)
        score_keys(dtype, scores, q, k, key, VL, d, scale);
    if (key < n)
        score_keys(dtype, scores, q, k, key, n - key, d, scale);
    KERNEL(softmax_row)(scores, n);
    for (; i + 4 * VL <= d; i += 4 * VL)
        weighted_sum(dtype, out, scores, v, n, d, i, 4, 0);
    for (; i < d; i += VL)
        weighted_sum(dtype, out, scores, v, n, d, i, 1, d - i < VL ? (int)(d - i) : 0);
}

/* GPT-2's head size, 64, gets code of its own. */
static inline __attribute__((always_inline)) void query(bml_dtype dtype, float *out, const float *q,
                                                        const void *k, const void *v, size_t n,
                                                        size_t d, float scale, float *scores)
{
    if (d == 64)
        query_of(dtype, out, q, k, v, n, 64, scale, scores);
    else
        query_of(dtype, out, q, k, v, n, d, scale, scores);
}

/* ---- stateless --------------------------------------------------------------------------------*/

typedef struct job {
    float *out;
    const float *q, *k, *v;
    size_t n_tokens, n_head, d;
    float scale;
    bml_queue *queue;
} job;

/* Queries are dealt out in turn: the later ones of a prompt have more keys to look at. */
static void stateless_part(void *context, int part, int n_parts)
{
    const job *j = context;
    float *scores = bml_cpu_scratch(j->queue, part);
    for (size_t at = (size_t)part; at < j->n_head * j->n_tokens; at += (size_t)n_parts) {
        size_t first = at / j->n_tokens * j->n_tokens, t = at % j->n_tokens;
        query(BML_F32, j->out + at * j->d, j->q + at * j->d, j->k + first * j->d,
              j->v + first * j->d, t + 1, j->d, j->scale, scores);
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

void KERNEL(attend)(float *out, const float *q, const bml_kv_cache *cache, int layer, int32_t slot,
                    int32_t position, size_t head, float scale, float *scores)
{
    size_t d = (size_t)cache->head_dim, n = (size_t)position + 1;
    size_t row = (size_t)slot * (size_t)cache->n_head + head;
    size_t offset = row * (size_t)cache->n_ctx * d * bml_dtype_size(cache->dtype);
    const void *k = (const char *)cache->k[layer].data + offset;
    const void *v = (const char *)cache->v[layer].data + offset;
    switch (cache->dtype) {
    case BML_F32:
        query(BML_F32, out, q, k, v, n, d, scale, scores);
        break;
    case BML_BF16:
        query(BML_BF16, out, q, k, v, n, d, scale, scores);
        break;
    default:
        query(BML_F16, out, q, k, v, n, d, scale, scores);
    }
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
    size_t n_tokens = (size_t)batch->n_tokens, d = (size_t)j->cache->head_dim;
    size_t n = (size_t)j->cache->n_head * n_tokens;
    for (size_t at = (size_t)part; at < n; at += (size_t)n_parts) {
        size_t t = at % n_tokens;
        KERNEL(attend)
        (j->out + at * d, j->q + at * d, j->cache, j->layer, batch->slot[t], batch->position[t],
         at / n_tokens, j->scale, bml_cpu_scratch(j->queue, part));
    }
}

void KERNEL(attention_cached)(bml_queue *queue, bml_buffer *out, const bml_buffer *q,
                              const bml_kv_cache *cache, int layer, float scale)
{
    cached_job j = {out->data, q->data, cache, layer, scale, queue};
    bml_pool_run(queue->pool, cached_part, &j);
}
