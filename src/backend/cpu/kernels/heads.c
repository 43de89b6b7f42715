/* The kernels that move heads about: qkv_split, kv_append, heads_merge. */
#include "backend/cpu/kernels/kernels.h"

typedef struct split_job {
    float *q, *k, *v;
    const float *qkv;
    size_t n_tokens, n_head, head_dim;
} split_job;

static void split_tokens(const void *context, size_t begin, size_t end)
{
    const split_job *j = context;
    size_t d = j->head_dim, n_embd = j->n_head * d;
    for (size_t t = begin; t < end; t++)
        for (size_t h = 0; h < j->n_head; h++) {
            const float *from = j->qkv + t * 3 * n_embd + h * d;
            size_t to = (h * j->n_tokens + t) * d;
            memcpy(j->q + to, from, d * sizeof(float));
            memcpy(j->k + to, from + n_embd, d * sizeof(float));
            memcpy(j->v + to, from + 2 * n_embd, d * sizeof(float));
        }
}

void KERNEL(qkv_split)(bml_queue *queue, bml_buffer *q, bml_buffer *k, bml_buffer *v,
                       const bml_buffer *qkv, int n_tokens, int n_head, int head_dim)
{
    split_job j = {q->data,          k->data,        v->data,         qkv->data,
                   (size_t)n_tokens, (size_t)n_head, (size_t)head_dim};
    KERNEL(parallel)(queue, split_tokens, &j, j.n_tokens, 1, 3 * j.n_head * j.head_dim);
}

typedef struct append_job {
    const bml_kv_cache *cache;
    const bml_batch *batch;
    void *k_cache, *v_cache;
    const float *k, *v;
} append_job;

static void store_as(bml_dtype dtype, void *to, size_t at, const float *from, size_t n)
{
    if (dtype == BML_F32) {
        memcpy((float *)to + at, from, n * sizeof *from);
        return;
    }
    uint16_t *half = (uint16_t *)to + at;
    for (size_t i = 0; i < n; i++)
        half[i] = dtype == BML_BF16 ? bml_f32_to_bf16(from[i]) : bml_f32_to_f16(from[i]);
}

void KERNEL(cache_store)(const bml_kv_cache *cache, void *to, int32_t slot, int32_t position,
                         size_t head, const float *from)
{
    size_t d = (size_t)cache->head_dim, row = (size_t)slot * (size_t)cache->n_head + head;
    store_as(cache->dtype, to, (row * (size_t)cache->n_ctx + (size_t)position) * d, from, d);
}

static void append_tokens(const void *context, size_t begin, size_t end)
{
    const append_job *j = context;
    size_t d = (size_t)j->cache->head_dim, n_tokens = (size_t)j->batch->n_tokens;
    for (size_t t = begin; t < end; t++)
        for (size_t h = 0; h < (size_t)j->cache->n_head; h++) {
            int32_t slot = j->batch->slot[t], position = j->batch->position[t];
            size_t from = (h * n_tokens + t) * d;
            KERNEL(cache_store)(j->cache, j->k_cache, slot, position, h, j->k + from);
            KERNEL(cache_store)(j->cache, j->v_cache, slot, position, h, j->v + from);
        }
}

void KERNEL(kv_append)(bml_queue *queue, bml_kv_cache *cache, int layer, const bml_buffer *k,
                       const bml_buffer *v)
{
    append_job j = {cache,   queue->batch, cache->k[layer].data, cache->v[layer].data,
                    k->data, v->data};
    KERNEL(parallel)
    (queue, append_tokens, &j, (size_t)queue->batch->n_tokens, 1,
     2 * (size_t)cache->n_head * (size_t)cache->head_dim);
}

typedef struct merge_job {
    float *out;
    const float *heads;
    size_t n_tokens, n_head, head_dim;
} merge_job;

static void merge_tokens(const void *context, size_t begin, size_t end)
{
    const merge_job *j = context;
    size_t d = j->head_dim;
    for (size_t t = begin; t < end; t++)
        for (size_t h = 0; h < j->n_head; h++)
            memcpy(j->out + (t * j->n_head + h) * d, j->heads + (h * j->n_tokens + t) * d,
                   d * sizeof(float));
}

void KERNEL(heads_merge)(bml_queue *queue, bml_buffer *out, const bml_buffer *heads, int n_tokens,
                         int n_head, int head_dim)
{
    merge_job j = {out->data, heads->data, (size_t)n_tokens, (size_t)n_head, (size_t)head_dim};
    KERNEL(parallel)(queue, merge_tokens, &j, j.n_tokens, 1, j.n_head * j.head_dim);
}
