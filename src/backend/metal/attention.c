/* Which kernel attends, and what goes into the cache. */
#include "backend/metal/metal.h"

static cache_layout layout_of(const bml_kv_cache *cache)
{
    return (cache_layout){.format = (uint32_t)cache->dtype,
                          .n_ctx = (uint32_t)cache->n_ctx,
                          .n_head = (uint32_t)cache->n_head,
                          .head_dim = (uint32_t)cache->head_dim};
}

/* Heads as [H, T, D]. */
static head_strides by_head(int n_tokens, int head_dim)
{
    return (head_strides){.token = (uint32_t)head_dim, .head = (uint32_t)(n_tokens * head_dim)};
}

typedef struct variant {
    int most_head_dim;
    bool groups; /* of queries that follow each other */
    bml_metal_kernel kernel;
} variant;

/*
 * The first that fits is used. A prompt's queries share the loads of keys and values; where most
 * follow no other, each query gets a threadgroup to itself. The latter needs heads of whole loads.
 */
static const variant variants[] = {
    {128, true, BML_METAL_ATTENTION_GROUP},
    {64, false, BML_METAL_ATTENTION_QUERY_64},
    {128, false, BML_METAL_ATTENTION_QUERY_128},
    {256, false, BML_METAL_ATTENTION_QUERY_256},
};

static bml_metal_kernel choose(const bml_queue *queue, int head_dim)
{
    const bml_metal_batch *batch = &queue->batch;
    bool groups = queue->device->has_matrices && 2 * batch->n_groups <= batch->n_tokens;
    for (size_t i = 0; i < sizeof variants / sizeof *variants && !queue->plain; i++)
        if (head_dim <= variants[i].most_head_dim &&
            (variants[i].groups ? groups : head_dim % 4 == 0))
            return variants[i].kernel;
    return BML_METAL_ATTENTION_CACHED;
}

bool bml_metal_attention_appends(const bml_queue *queue, const bml_kv_cache *cache)
{
    bml_metal_kernel kernel = choose(queue, cache->head_dim);
    return queue->batch.one_a_slot &&
           (kernel == BML_METAL_ATTENTION_QUERY_64 || kernel == BML_METAL_ATTENTION_QUERY_128 ||
            kernel == BML_METAL_ATTENTION_QUERY_256);
}

/* Floats of threadgroup memory; see the kernels. */
static size_t memory_of(bml_metal_kernel kernel, size_t head_dim)
{
    size_t width = (head_dim + 7) / 8 * 8, simdgroups = QUERY_THREADS / SIMD_WIDTH;
    switch (kernel) {
    case BML_METAL_ATTENTION_GROUP:
        return QUERY_GROUP * QUERY_GROUP_KEYS + QUERY_GROUP * QUERY_GROUP +
               (QUERY_GROUP + QUERY_GROUP_KEYS) * width;
    case BML_METAL_ATTENTION_QUERY_64:
        return simdgroups * (2 + 64);
    case BML_METAL_ATTENTION_QUERY_128:
        return simdgroups * (2 + 128);
    case BML_METAL_ATTENTION_QUERY_256:
        return simdgroups * (2 + 256);
    default:
        return 0;
    }
}

void bml_metal_attend(bml_queue *queue, const bml_metal_attention *a)
{
    const bml_metal_batch *batch = &queue->batch;
    bml_metal_kernel kernel = choose(queue, a->cache->head_dim);
    bool groups = kernel == BML_METAL_ATTENTION_GROUP;
    attention_args args = {.cache = layout_of(a->cache),
                           .q = a->q_strides,
                           .out = a->out_strides,
                           .scale = a->scale,
                           .append = a->append};
    bml_metal_dispatch(
        queue, &(bml_metal_call){.kernel = kernel,
                                 .buffers = {{a->out, 0},
                                             {a->q, 0},
                                             {&a->cache->k[a->layer], 0},
                                             {&a->cache->v[a->layer], 0},
                                             {&batch->buffer, batch->position},
                                             {&batch->buffer, batch->slot},
                                             {&batch->buffer, batch->group_first},
                                             {&batch->buffer, batch->group_size}},
                                 .n_buffers = groups ? 8 : 6,
                                 .args = &args,
                                 .args_bytes = sizeof args,
                                 .memory = {memory_of(kernel, (size_t)a->cache->head_dim)},
                                 .n_groups = (size_t)(groups ? batch->n_groups : batch->n_tokens) *
                                             (size_t)a->cache->n_head});
}

void bml_metal_append(bml_queue *queue, const bml_kv_cache *cache, int layer, bml_metal_binding k,
                      bml_metal_binding v, head_strides from)
{
    const bml_metal_batch *batch = &queue->batch;
    append_args args = {
        .cache = layout_of(cache), .from = from, .n_tokens = (uint32_t)batch->n_tokens};
    size_t n = (size_t)batch->n_tokens * (size_t)cache->n_head * (size_t)cache->head_dim;
    bml_metal_dispatch(queue,
                       &(bml_metal_call){.kernel = BML_METAL_KV_APPEND,
                                         .buffers = {{&cache->k[layer], 0},
                                                     {&cache->v[layer], 0},
                                                     k,
                                                     v,
                                                     {&batch->buffer, batch->position},
                                                     {&batch->buffer, batch->slot}},
                                         .n_buffers = 6,
                                         .args = &args,
                                         .args_bytes = sizeof args,
                                         .n_groups = bml_metal_groups_for(BML_METAL_KV_APPEND, n)});
}

/* ---- the seam's kernels -----------------------------------------------------------------------*/

void bml_metal_kv_append(bml_queue *queue, bml_kv_cache *cache, int layer, const bml_buffer *k,
                         const bml_buffer *v)
{
    bml_metal_append(queue, cache, layer, (bml_metal_binding){k, 0}, (bml_metal_binding){v, 0},
                     by_head(queue->batch.n_tokens, cache->head_dim));
}

void bml_metal_attention_cached(bml_queue *queue, bml_buffer *out, const bml_buffer *q,
                                const bml_kv_cache *cache, int layer, float scale)
{
    head_strides strides = by_head(queue->batch.n_tokens, cache->head_dim);
    bml_metal_attend(queue, &(bml_metal_attention){.out = out,
                                                   .q = q,
                                                   .out_strides = strides,
                                                   .q_strides = strides,
                                                   .cache = cache,
                                                   .layer = layer,
                                                   .scale = scale});
}

void bml_metal_attention_stateless(bml_queue *queue, bml_buffer *out, const bml_buffer *q,
                                   const bml_buffer *k, const bml_buffer *v, int n_tokens,
                                   int n_head, int head_dim, float scale)
{
    attention_args args = {.cache = {.n_ctx = (uint32_t)n_tokens,
                                     .n_head = (uint32_t)n_head,
                                     .head_dim = (uint32_t)head_dim},
                           .scale = scale};
    bml_metal_dispatch(queue, &(bml_metal_call){.kernel = BML_METAL_ATTENTION,
                                                .buffers = {{out, 0}, {q, 0}, {k, 0}, {v, 0}},
                                                .n_buffers = 4,
                                                .args = &args,
                                                .args_bytes = sizeof args,
                                                .n_groups = (size_t)n_tokens * (size_t)n_head});
}
