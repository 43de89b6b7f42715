/*
 * The pass of many tokens, kernel after kernel: five a layer, and two norms where these stand
 * alone. Activations between them are of the weights' type; x, sums and logits are float32.
 */
#include "backend/cuda/pass16.h"

#include "backend/cuda/attention_decode.h"
#include "backend/cuda/head.h"
#include "backend/cuda/prefill.h"
#include "backend/cuda/product_batch.h"
#include "backend/cuda/product_few.h"
#include "base/memory.h"

#include <limits.h>
#include <stdlib.h>

/* What a graph depends on: whatever else a pass needs, its kernels read from the batch's arrays. */
typedef struct shape {
    bool alone;
    int n_tokens, n_tiles, n_rows, n_valid;
    bool draws;
    size_t capacity;
    const void *batch, *ids; /* device memory of the arrays, and where ids go on the host */
    const void *scratch;
} shape;

/* A shape that came lately, and the graph of its passes when it has come twice. */
typedef struct known_shape {
    shape shape;
    int n_passes;
    cudaGraphExec_t graph; /* NULL also where it could not be made */
    uint64_t last_pass;
} known_shape;

enum { KNOWN = 8 };

struct bml_cuda_graph {
    known_shape known[KNOWN];
    uint64_t *seen; /* [n_slots]: the pass that a slot was last in */
    uint64_t n_passes;
    int n_slots;
};

static void forget(known_shape *known)
{
    if (known->graph)
        cudaGraphExecDestroy(known->graph);
    *known = (known_shape){0};
}

void bml_cuda_graph_free(bml_cuda_graph *g)
{
    if (!g)
        return;
    for (int i = 0; i < KNOWN; i++)
        forget(&g->known[i]);
    free(g->seen);
    free(g);
}

static bool is16(const bml_weight *w, bml_dtype dtype)
{
    return w->dtype == dtype && (w->format == BML_WEIGHTS_BF16 || w->format == BML_WEIGHTS_F16);
}

bool bml_cuda_takes_cache16(const bml_kv_cache *cache)
{
    /* place16 (epilogue.cuh) counts the cache's rows in an int. */
    size_t heads = (size_t)cache->n_slots * (size_t)cache->n_head;
    return (cache->dtype == BML_BF16 || cache->dtype == BML_F16) && cache->head_dim <= 256 &&
           heads <= (size_t)INT_MAX / (size_t)cache->n_ctx;
}

bool bml_cuda_can_pass16(const bml_weights *w, const bml_kv_cache *cache)
{
    bool fits = bml_cuda_takes_cache16(cache) && is16(&w->lm_head.w, cache->dtype);
    for (int i = 0; i < w->config.n_layer && fits; i++) {
        const bml_layer_weights *l = &w->layers[i];
        fits = is16(&l->c_attn.w, cache->dtype) && is16(&l->c_proj.w, cache->dtype) &&
               is16(&l->c_fc.w, cache->dtype) && is16(&l->mlp_c_proj.w, cache->dtype);
    }
    return fits;
}

/* A pass on its way: what every call needs. */
typedef struct pass {
    bml_queue *queue;
    const bml_weights *w;
    bml_activations *a;
    bml_kv_cache *cache;
    bml_cuda_batch batch;
    const bml_cuda_query_tile *tiles; /* device memory */
    int n_tokens, n_tiles;
    bool alone;   /* no token sees another of the batch */
    bool batched; /* a decoding batch: products of product_batch.h */
    int n_sums;   /* that the residual stream still lacks, in the queue's scratch memory */
} pass;

static bml_cuda_cache16 cache_of(const pass *p, int layer)
{
    const bml_kv_cache *c = p->cache;
    return (bml_cuda_cache16){c->k[layer].data, c->v[layer].data, c->n_slots,
                              c->n_head,        c->n_ctx,         c->head_dim};
}

static bml_cuda_product product_of(const pass *p, bml_buffer *out, const bml_buffer *x,
                                   const bml_linear_weights *l, bml_cuda_epilogue epilogue,
                                   int layer, int n_rows)
{
    bml_cuda_product product = {.type = p->cache->dtype,
                                .m = n_rows,
                                .n = l->w.n_out,
                                .k = l->w.n_in,
                                .a = x->data,
                                .a_pitch = l->w.n_in,
                                .w = l->w.buffer.data,
                                .bias = l->bias.buffer.data,
                                .epilogue = epilogue,
                                .activation = p->w->config.activation,
                                .out = out->data,
                                .out_pitch =
                                    epilogue == BML_CUDA_QKV ? p->w->config.n_embd : l->w.n_out,
                                .slot = p->batch.slot,
                                .position = p->batch.position};
    if (epilogue == BML_CUDA_QKV)
        product.cache = cache_of(p, layer);
    return product;
}

/* The most parts that a product's sums may lie in: what begin() makes room for, even where the
 * memory has grown larger, so that a batch's bits do not depend on the passes before it. */
static int max_split(const pass *p)
{
    size_t n = 2 * p->queue->device->max_width / (size_t)p->w->config.n_embd;
    return n < BML_CUDA_MAX_SPLIT ? (int)n : BML_CUDA_MAX_SPLIT;
}

static void multiply(const pass *p, const bml_cuda_product *product)
{
    bml_cuda_note(p->queue, bml_cuda_is_few(product)
                                ? bml_cuda_product_few(product, NULL, p->queue->stream)
                                : bml_cuda_product16(product, p->queue->stream));
}

/* x += product with l; the attention that comes next is that of layer NEXT, -1: none does. */
static void add_product(pass *p, const bml_buffer *x, const bml_linear_weights *l, int next)
{
    bml_cuda_product sum = product_of(p, &p->a->x, x, l, BML_CUDA_RESIDUAL, -1, p->n_tokens);
    if (!p->batched) {
        multiply(p, &sum);
        return;
    }
    sum.epilogue = BML_CUDA_STORE32;
    sum.out = p->queue->scratch;
    bml_cuda_cut cut = bml_cuda_batch_cut(&sum, max_split(p));
    p->n_sums = cut.split;
    bml_cuda_keys_ahead ahead = {cache_of(p, next < 0 ? 0 : next), p->batch.slot, p->batch.position,
                                 p->n_tokens * p->cache->n_head};
    bml_cuda_note(p->queue,
                  bml_cuda_product_batch(&sum, cut, next < 0 ? NULL : &ahead, p->queue->stream));
}

static bml_cuda_ahead ahead_of(const bml_linear_weights *l, const bml_linear_weights *then)
{
    bml_cuda_ahead ahead = {{l->w.buffer.data, NULL}, {0}};
    if (then) {
        ahead.weights[1] = then->w.buffer.data;
        ahead.bytes[0] = 2 * (size_t)l->w.n_in * (size_t)l->w.n_out / 16 * 16;
        ahead.bytes[1] = 2 * (size_t)then->w.n_in * (size_t)then->w.n_out / 16 * 16;
    }
    return ahead;
}

/* To a->normed, the norms of rows of x; AHEAD comes next. */
static void norm(pass *p, const bml_norm_weights *n, const int32_t *row, int n_rows,
                 bml_cuda_ahead ahead)
{
    const bml_hf_config *c = &p->w->config;
    bml_dtype type = p->cache->dtype;
    void *out = p->a->normed.data;
    float *x = p->a->x.data;
    const float *weight = n->weight.buffer.data, *bias = n->bias.buffer.data;
    bml_cuda_note(p->queue,
                  p->batched
                      ? bml_cuda_norm_batch(type, out, x, (const float *)p->queue->scratch,
                                            p->n_sums, p->n_tokens, row, weight, bias, n_rows,
                                            c->n_embd, c->layer_norm_epsilon, p->queue->stream)
                      : bml_cuda_norm16(type, out, x, row, weight, bias, n_rows, c->n_embd,
                                        c->layer_norm_epsilon, ahead, p->queue->stream));
    p->n_sums = 0;
}

/* The product of the norm of rows of x; THEN comes after it, or is NULL. */
static void norm_product(pass *p, bml_buffer *out, const bml_norm_weights *n, const int32_t *row,
                         const bml_linear_weights *l, const bml_linear_weights *then,
                         bml_cuda_epilogue epilogue, int layer, int n_rows)
{
    cudaStream_t stream = p->queue->stream;
    bml_cuda_product normed = product_of(p, out, &p->a->normed, l, epilogue, layer, n_rows);
    if (!p->batched && bml_cuda_takes_norm(&normed)) {
        bml_cuda_norm before = {p->a->x.data, row, n->weight.buffer.data, n->bias.buffer.data,
                                p->w->config.layer_norm_epsilon};
        bml_cuda_note(p->queue, bml_cuda_product_few(&normed, &before, stream));
        return;
    }
    norm(p, n, row, n_rows, ahead_of(l, then));
    if (p->batched && epilogue != BML_CUDA_STORE32)
        bml_cuda_note(p->queue, bml_cuda_product_batch(&normed, bml_cuda_batch_cut(&normed, 1),
                                                       NULL, stream));
    else
        multiply(p, &normed);
}

static void attend(const pass *p, int layer)
{
    const bml_device *device = p->queue->device;
    bml_cuda_attention attention = {.type = p->cache->dtype,
                                    .q = p->a->q.data,
                                    .q_pitch = p->w->config.n_embd,
                                    .out = p->a->merged.data,
                                    .n_tokens = p->n_tokens,
                                    .cache = cache_of(p, layer),
                                    .tiles = p->tiles,
                                    .n_tiles = p->n_tiles,
                                    .scale = bml_attention_scale(&p->w->config, layer)};
    bml_cuda_note(p->queue,
                  p->alone ? bml_cuda_attention_decode(&attention, p->batch.slot, p->batch.position,
                                                       device->capability >= 90, p->queue->stream)
                           : bml_cuda_attention16(&attention, p->queue->stream));
}

/* The ids of the rows' largest logits, where they can be had without the logits; or these. */
static void choose(pass *p, int n_valid)
{
    bml_activations *a = p->a;
    const bml_hf_config *c = &p->w->config;
    int n_rows = p->queue->batch->n_rows;
    bml_cuda_head head = {.type = p->cache->dtype,
                          .m = n_rows,
                          .n = n_valid,
                          .k = c->n_embd,
                          .a = a->normed.data,
                          .w = p->w->lm_head.w.buffer.data,
                          .parts = a->logits.data,
                          .choice = bml_cuda_choice_of(p->queue, &a->ids, n_rows)};
    bool draws = p->queue->batch->draw != NULL;
    if (!draws && bml_cuda_takes_head(&head)) {
        norm(p, &p->w->ln_f, p->batch.row, n_rows, ahead_of(&p->w->lm_head, NULL));
        bml_cuda_note(p->queue, bml_cuda_head_argmax(&head, p->queue->stream));
        return;
    }
    norm_product(p, &a->logits, &p->w->ln_f, p->batch.row, &p->w->lm_head, NULL, BML_CUDA_STORE32,
                 -1, n_rows);
    if (n_valid && draws)
        bml_cuda_sample(p->queue, &a->ids, &a->logits, n_rows, c->vocab_size, n_valid);
    else if (n_valid)
        bml_cuda_argmax(p->queue, &a->ids, &a->logits, n_rows, c->vocab_size, n_valid);
}

/* Whether the products of product_batch.h take a layer of this pass, and so all. */
static bool takes_batch(const pass *p)
{
    const bml_layer_weights *l = &p->w->layers[0];
    bml_activations *a = p->a;
    const struct {
        bml_buffer *out, *x;
        const bml_linear_weights *l;
        bml_cuda_epilogue epilogue;
    } all[] = {{&a->q, &a->normed, &l->c_attn, BML_CUDA_QKV},
               {&a->x, &a->merged, &l->c_proj, BML_CUDA_STORE32},
               {&a->hidden, &a->normed, &l->c_fc, BML_CUDA_ACTIVATION},
               {&a->x, &a->hidden, &l->mlp_c_proj, BML_CUDA_STORE32}};
    bool takes = p->n_tokens > 1 && p->n_tokens <= BML_CUDA_BATCH && max_split(p) > 0 &&
                 bml_cuda_takes_norm_batch(p->w->config.n_embd);
    for (size_t i = 0; i < sizeof all / sizeof *all && takes; i++) {
        bml_cuda_product product =
            product_of(p, all[i].out, all[i].x, all[i].l, all[i].epilogue, 0, p->n_tokens);
        takes = bml_cuda_batch_cut(&product, max_split(p)).columns > 0;
    }
    return takes;
}

static void enqueue(pass *p, int n_valid)
{
    bml_activations *a = p->a;
    int n = p->n_tokens, n_layer = p->w->config.n_layer;
    p->batched = p->alone && takes_batch(p);
    p->n_sums = 0;
    /* The one kernel that starts when all before have ended: the last of them may have written the
     * batch's arrays, which the kernels behind it read without waiting. */
    bml_cuda_embedding(p->queue, &a->x, &p->w->wte, &p->w->wpe);
    for (int i = 0; i < n_layer; i++) {
        const bml_layer_weights *l = &p->w->layers[i];
        norm_product(p, &a->q, &l->ln_1, NULL, &l->c_attn, &l->c_proj, BML_CUDA_QKV, i, n);
        attend(p, i);
        add_product(p, &a->merged, &l->c_proj, -1);
        norm_product(p, &a->hidden, &l->ln_2, NULL, &l->c_fc, &l->mlp_c_proj, BML_CUDA_ACTIVATION,
                     i, n);
        add_product(p, &a->hidden, &l->mlp_c_proj, i + 1 < n_layer ? i + 1 : -1);
    }
    if (p->queue->batch->n_rows)
        choose(p, n_valid);
}

/* Makes the graph of the pass; NULL on failure, which is no reason not to run it without. It is
 * captured on a stream of its own: another thread may just now wait for what is on the queue's
 * (decode_launch.cu), and what waits for a capture becomes part of it. */
static cudaGraphExec_t capture(pass *p, int n_valid)
{
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    cudaStream_t own = p->queue->stream, side = NULL;
    if (!cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking) &&
        !cudaStreamBeginCapture(side, cudaStreamCaptureModeThreadLocal)) {
        p->queue->stream = side;
        enqueue(p, n_valid);
        p->queue->stream = own;
        if (!cudaStreamEndCapture(side, &graph) && !p->queue->error &&
            cudaGraphInstantiate(&exec, graph, 0))
            exec = NULL;
        p->queue->error = cudaSuccess;
    }
    if (graph)
        cudaGraphDestroy(graph);
    if (side)
        cudaStreamDestroy(side);
    cudaGetLastError();
    return exec;
}

static bool same(const shape *a, const shape *b)
{
    return a->alone == b->alone && a->n_tokens == b->n_tokens && a->n_tiles == b->n_tiles &&
           a->n_rows == b->n_rows && a->n_valid == b->n_valid && a->draws == b->draws &&
           a->capacity == b->capacity && a->batch == b->batch && a->ids == b->ids &&
           a->scratch == b->scratch;
}

/* What is known of a shape; if nothing is, in the place of what was not needed for longest. */
static known_shape *find(bml_cuda_graph *g, const shape *wanted)
{
    known_shape *oldest = g->known;
    for (known_shape *k = g->known; k < g->known + KNOWN; k++) {
        if (same(&k->shape, wanted))
            return k;
        if (k->last_pass < oldest->last_pass)
            oldest = k;
    }
    forget(oldest);
    oldest->shape = *wanted;
    return oldest;
}

/* The third pass of a shape is a graph, which is made while the second runs: launching a decode
 * step's kernels takes longer than they do, and a prompt's follow each other faster in a graph. */
static void run(pass *p, int n_valid)
{
    bml_queue *queue = p->queue;
    shape wanted = {.alone = p->alone,
                    .n_tokens = p->n_tokens,
                    .n_tiles = p->n_tiles,
                    .n_rows = queue->batch->n_rows,
                    .n_valid = n_valid,
                    .draws = queue->batch->draw != NULL,
                    .capacity = queue->batch_capacity,
                    .batch = queue->batch_device,
                    .ids = queue->ids_host,
                    .scratch = queue->scratch};
    known_shape *known = find(queue->graph, &wanted);
    known->last_pass = queue->graph->n_passes;
    if (known->graph) {
        bml_cuda_note(queue, cudaGraphLaunch(known->graph, queue->stream));
        return;
    }
    enqueue(p, n_valid);
    if (++known->n_passes == 2 && !queue->error)
        known->graph = capture(p, n_valid);
}

/* Whether all tokens are of different slots, which is noted in SEEN. */
static bool slots_differ(bml_cuda_graph *g, const bml_batch *batch, int n_slots)
{
    if (g->n_slots < n_slots) {
        free(g->seen);
        g->seen = bml_calloc((size_t)n_slots, sizeof *g->seen);
        g->n_slots = g->seen ? n_slots : 0;
    }
    bool differ = g->seen != NULL;
    for (int t = 0; t < batch->n_tokens && differ; t++) {
        differ = g->seen[batch->slot[t]] != g->n_passes;
        g->seen[batch->slot[t]] = g->n_passes;
    }
    return differ;
}

void bml_cuda_pass16(bml_queue *queue, const bml_weights *w, bml_activations *a,
                     bml_kv_cache *cache, int n_valid)
{
    pass p = {.queue = queue, .w = w, .a = a, .cache = cache, .n_tokens = queue->batch->n_tokens};
    if (!queue->graph)
        queue->graph = bml_calloc(1, sizeof *queue->graph);
    if (queue->graph)
        queue->graph->n_passes++;
    p.alone = queue->graph && (cache->head_dim == 64 || cache->head_dim == 128) &&
              p.n_tokens <= 65535 && /* what a grid can have along z */
              slots_differ(queue->graph, queue->batch, cache->n_slots);
    if (!p.alone)
        p.n_tiles = queue->n_tiles =
            bml_cuda_query_tiles(queue->batch, (bml_cuda_query_tile *)bml_cuda_tiles_host(queue));
    p.batch = bml_cuda_batch_of(queue); /* the tiles travel with it */
    p.tiles = (const bml_cuda_query_tile *)bml_cuda_tiles_device(queue);
    queue->chain.followed = p.alone && n_valid && !queue->batch->draw && /* one half of draws */
                            queue->batch->n_rows == p.n_tokens;
    if (queue->graph)
        run(&p, n_valid);
    else
        enqueue(&p, n_valid);
    if (n_valid && queue->batch->n_rows)
        queue->ids = a->ids.data; /* a graph's argmax does not say so */
}
