/* The host's side of decode.cu: what a queue keeps between launches, and the launch. */
#include "backend/cuda/decode.cuh"
#include "backend/cuda/launch.cuh"

extern "C" {
#include "base/memory.h"
}

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum {
    MOST_FOR_KEYS = 8 << 10, /* bytes of a stage */
    L2_PARTS = 3,            /* of the L2 cache one is for what is read again in the next step */
};

struct bml_cuda_decoder {
    cudaStream_t launch_stream; /* the queue's */
    bml_cuda_plan plan;
    layer *layers; /* device memory, as what follows */
    struct vectors vectors;
    char *stream;
    size_t *begin; /* and the head's behind them */
    size_t layer_bytes;
    int kept;       /* as of arguments */
    char *exchange; /* two of them: a launch has one, and clears the other one for the next */
    int exchange_bytes, launches;
};

/* Launches of this process take turns: those of two queues must not have a part of the device each,
 * and wait for the rest for ever. A queue's own follow each other as closely as they can. */
static struct {
    pthread_mutex_t lock;
    const bml_cuda_decoder *last;
    cudaEvent_t ended;
} turns = {PTHREAD_MUTEX_INITIALIZER, NULL, NULL};

/* Launches behind what others have launched. CHECKED as for bml_cuda_launch_together. */
static cudaError_t launch_in_turn(const bml_cuda_decoder *d, const void *kernel, int blocks,
                                  size_t bytes, bool checked, arguments *p)
{
    cudaError_t error = cudaSuccess;
    pthread_mutex_lock(&turns.lock);
    if (turns.last && turns.last != d) {
        if (!turns.ended)
            error = cudaEventCreateWithFlags(&turns.ended, cudaEventDisableTiming);
        if (!error)
            error = cudaEventRecord(turns.ended, turns.last->launch_stream);
        if (!error)
            error = cudaStreamWaitEvent(d->launch_stream, turns.ended, 0);
    }
    if (!error)
        error = bml_cuda_launch_together(kernel, blocks, THREADS, CLUSTER, bytes, checked, p,
                                         d->launch_stream);
    if (!error)
        turns.last = d;
    pthread_mutex_unlock(&turns.lock);
    return error;
}

void bml_cuda_decoder_free(bml_cuda_decoder *d)
{
    if (!d)
        return;
    pthread_mutex_lock(&turns.lock);
    if (turns.last == d)
        turns.last = NULL;
    pthread_mutex_unlock(&turns.lock);
    cudaFree(d->layers);
    cudaFree((void *)d->vectors.data);
    cudaFree(d->stream);
    cudaFree(d->begin);
    cudaFree(d->exchange);
    free(d);
}

static int blocks_of(const bml_cuda_plan *plan)
{
    return plan->n_clusters * CLUSTER;
}

static const bml_linear_weights *matrix_of(const bml_layer_weights *l, int m)
{
    const bml_linear_weights *all[] = {&l->c_attn, &l->c_proj, &l->c_fc, &l->mlp_c_proj};
    return all[m];
}

static cudaError_t to_device(void **device, const void *host, size_t bytes)
{
    cudaError_t error = cudaMalloc(device, bytes);
    return error ? error : cudaMemcpy(*device, host, bytes, cudaMemcpyHostToDevice);
}

static cudaError_t fill_layers(bml_cuda_decoder *d, const bml_weights *w, const bml_kv_cache *cache)
{
    size_t n = (size_t)w->config.n_layer;
    layer *host = (layer *)bml_calloc(n, sizeof *host);
    if (!host)
        return cudaErrorMemoryAllocation;
    for (size_t i = 0; i < n; i++)
        host[i] = {(char *)cache->k[i].data, (char *)cache->v[i].data,
                   bml_attention_scale(&w->config, (int)i)};
    cudaError_t error = to_device((void **)&d->layers, host, n * sizeof *host);
    free(host);
    return error;
}

static cudaError_t copy_vector(float *to, const void *from, int n)
{
    return from ? cudaMemcpy(to, from, n * sizeof(float), cudaMemcpyDeviceToDevice) : cudaSuccess;
}

static cudaError_t fill_vectors(bml_cuda_decoder *d, const bml_weights *w)
{
    const bml_hf_config *c = &w->config;
    vectors *v = &d->vectors;
    bool scaled = w->layers[0].c_attn.w.format == BML_WEIGHTS_Q4;
    int e = c->n_embd, n = 4 * e;
    for (int m = 0; m < N_MATRICES; m++) {
        v->bias[m] = n;
        n += matrix_of(&w->layers[0], m)->w.n_out;
    }
    for (int m = 0; m < N_MATRICES && scaled; m++) {
        v->row_scale[m] = n;
        n += matrix_of(&w->layers[0], m)->w.n_out;
    }
    v->layer = n;
    size_t bytes = (size_t)n * (c->n_layer + 1) * sizeof(float);
    float *to = NULL;
    cudaError_t error = cudaMalloc((void **)&to, bytes);
    v->data = to;
    if (!error)
        error = cudaMemset(to, 0, bytes);
    for (int i = 0; i <= c->n_layer && !error; i++, to += n) {
        const bml_norm_weights *norms[] = {i < c->n_layer ? &w->layers[i].ln_1 : &w->ln_f,
                                           i < c->n_layer ? &w->layers[i].ln_2 : NULL};
        for (int which = 0; which < 2 && norms[which] && !error; which++) {
            error = copy_vector(to + 2 * which * e, norms[which]->weight.buffer.data, e);
            if (!error)
                error = copy_vector(to + (2 * which + 1) * e, norms[which]->bias.buffer.data, e);
        }
        for (int m = 0; m < N_MATRICES && i < c->n_layer && !error; m++) {
            const bml_linear_weights *l = matrix_of(&w->layers[i], m);
            size_t rows = (size_t)l->w.n_out * bml_cuda_row_bytes(l->w.format, (size_t)l->w.n_in);
            error = copy_vector(to + v->bias[m], l->bias.buffer.data, l->w.n_out);
            if (!error && scaled)
                error =
                    copy_vector(to + v->row_scale[m], (char *)l->w.buffer.data + rows, l->w.n_out);
        }
    }
    return error;
}

static cudaError_t exchange_new(bml_cuda_decoder *d)
{
    size_t sums = 2 * FEW * (size_t)d->plan.n_embd * sizeof(uint64_t);
    d->exchange_bytes = (int)(sums + FEW * blocks_of(&d->plan) * sizeof(uint4));
    cudaError_t error = cudaMalloc((void **)&d->exchange, 2 * (size_t)d->exchange_bytes);
    return error ? error : cudaMemset(d->exchange, 0, 2 * (size_t)d->exchange_bytes);
}

static exchange exchange_of(const bml_cuda_decoder *d)
{
    char *now = d->exchange + d->launches * d->exchange_bytes;
    char *next = d->exchange + !d->launches * d->exchange_bytes;
    uint64_t *sums = (uint64_t *)now;
    return {sums, (uint4 *)(sums + 2 * FEW * d->plan.n_embd), (uint4 *)next,
            d->exchange_bytes / (int)sizeof(uint4)};
}

/* The bits that tiles of the head, of HEAD_BYTES, must not have which stay in L2: as many tiles as
 * there is ROOM for, dealt out evenly, so that some are on their way from there and some from
 * memory at any time. */
static int kept_of(const bml_cuda_plan *plan, size_t head_bytes, size_t room)
{
    int group = together_for(width_of(plan->n_embd, plan->head_dim)), every = 2;
    while (every < 256 && head_bytes / every * group > room)
        every *= 2;
    return every - 1;
}

/* Copies all weights into the order of the pass. */
static cudaError_t stream_new(bml_cuda_decoder *d, const bml_weights *w, size_t l2_bytes)
{
    int n = blocks_of(&d->plan);
    const bml_weight *head = &w->lm_head.w;
    bml_weight_format format = w->layers[0].c_attn.w.format;
    size_t *begin = (size_t *)bml_calloc(2 * (size_t)n, sizeof *begin), head_bytes = 0;
    if (!begin)
        return cudaErrorMemoryAllocation;
    bml_cuda_unit unit = bml_cuda_unit_of(head->format);
    size_t tile = (size_t)bml_cuda_chunks(&d->plan) * (unit.first_bytes + unit.second_bytes);
    for (int b = 0; b < n; b++) {
        bml_cuda_share s = bml_cuda_share_of(&d->plan, b);
        begin[b] = d->layer_bytes;
        begin[n + b] = head_bytes;
        d->layer_bytes += bml_cuda_stream_of(&d->plan, &s, format).end;
        head_bytes += s.vocab_tiles * tile;
    }
    d->kept = kept_of(&d->plan, head_bytes, l2_bytes / L2_PARTS);
    size_t layers = d->layer_bytes * (size_t)w->config.n_layer;
    cudaError_t error = to_device((void **)&d->begin, begin, 2 * (size_t)n * sizeof *begin);
    free(begin);
    if (!error)
        error = cudaMalloc((void **)&d->stream, layers + head_bytes);
    if (error)
        return error;
    for (int i = 0; i < w->config.n_layer; i++)
        bml_cuda_pack_layer(d->stream + i * d->layer_bytes, d->begin, &w->layers[i], &d->plan);
    bml_cuda_pack_head(d->stream + layers, d->begin + n, head, &d->plan);
    return cudaGetLastError();
}

static bool same_format(const bml_weights *w, bml_weight_format format)
{
    for (int i = 0; i < w->config.n_layer; i++)
        for (int m = 0; m < N_MATRICES; m++)
            if (matrix_of(&w->layers[i], m)->w.format != format)
                return false;
    return w->lm_head.w.format == bml_cuda_head_format(format);
}

static bml_cuda_plan plan_of(const bml_queue *queue, const bml_weights *w)
{
    const bml_hf_config *c = &w->config;
    return {queue->device->n_clusters, c->n_embd,  c->n_head,
            c->n_embd / c->n_head,     c->n_inner, c->vocab_size};
}

/* The kernel of a step of N_TOKENS; NULL if there is none. */
static const void *kernel_for(const bml_weights *w, const bml_cuda_plan *plan, int n_tokens)
{
    bml_weight_format format = w->layers[0].c_attn.w.format;
    return n_tokens == 1 ? bml_cuda_decode_kernel(format, plan->n_embd, plan->head_dim)
                         : bml_cuda_decode_few_kernel(format, plan->n_embd, plan->head_dim);
}

/* Lets both kernels have as much shared memory as the device has. */
static cudaError_t allow_shared(const bml_queue *queue, const bml_weights *w,
                                const bml_cuda_plan *plan)
{
    size_t most = (size_t)queue->device->shared_bytes;
    cudaError_t error = cudaSuccess;
    for (int n_tokens = 1; n_tokens <= 2 && !error; n_tokens++) {
        const void *kernel = kernel_for(w, plan, n_tokens);
        if (kernel)
            error = bml_cuda_allow_shared(kernel, most);
    }
    return error;
}

static cudaError_t decoder_new(bml_queue *queue, const bml_weights *w, const bml_kv_cache *cache)
{
    bml_cuda_decoder *d = (bml_cuda_decoder *)bml_calloc(1, sizeof *d);
    if (!d)
        return cudaErrorMemoryAllocation;
    d->launch_stream = queue->stream;
    d->plan = plan_of(queue, w);
    cudaError_t error = fill_layers(d, w, cache);
    if (!error)
        error = fill_vectors(d, w);
    if (!error)
        error = exchange_new(d);
    if (!error)
        error = stream_new(d, w, (size_t)queue->device->l2_bytes);
    if (!error)
        error = allow_shared(queue, w, &d->plan);
    if (!error) /* the queue's stream does not wait for the copies */
        error = cudaStreamSynchronize(0);
    if (error)
        bml_cuda_decoder_free(d);
    else
        queue->decoder = d;
    return error;
}

/* Whether the queue has its decoder, which is made once: its weights and its cache stay. Without
 * room for it other passes run. */
static bool has_decoder(bml_queue *queue, const bml_weights *w, const bml_kv_cache *cache)
{
    if (!queue->decoder && !queue->no_decoder) {
        cudaError_t error = decoder_new(queue, w, cache);
        queue->no_decoder = error != cudaSuccess;
        if (error == cudaErrorMemoryAllocation)
            cudaGetLastError(); /* nobody is to find it */
        else if (error)
            bml_cuda_note(queue, error);
    }
    return queue->decoder;
}

/* The sizes of the model, and the tokens. */
static void fill_sizes(arguments *p, const bml_queue *queue, const bml_weights *w,
                       const bml_kv_cache *cache)
{
    const bml_batch *batch = queue->batch;
    p->plan = plan_of(queue, w);
    p->n_layer = w->config.n_layer;
    p->kv = cache->dtype;
    p->n_ctx = cache->n_ctx;
    p->n_tokens = batch->n_tokens;
    for (int t = 0; t < p->n_tokens; t++) {
        p->position[t] = batch->position[t];
        p->slot[t] = batch->slot[t];
    }
    p->want_row = batch->n_rows > 0;
}

/* Bytes of memory_map in decode.cu, and of few_map in decode_few.cu, but for what both have. */
static size_t bytes_of_one(const arguments *p)
{
    int floats = p->few + p->hidden + MAX_TILES * PARTIAL + FOUND + 64 + 2 * WARPS;
    return 4 * (size_t)floats + (WARPS + 1) * MAX_EACH * 256 + WARPS * sizeof(candidate);
}

static size_t bytes_of_few(const arguments *p)
{
    int partial = p->tiles * WARPS * TILE * FEW;
    int floats = 2 * WARPS + partial + bml_cuda_larger(FOUND, partial) + 64;
    int operands = FEW * (bml_cuda_few_pitch(p->plan.n_embd) + p->hidden);
    return 4 * (size_t)floats + 2 * (size_t)operands + WARPS * FEW * sizeof(candidate);
}

/* How shared memory is cut: what is fixed, and as many stages as the rest has room for.
 * Returns the bytes, or 0 if they are too many. */
static size_t lay_out(arguments *p, const bml_device *device, bml_weight_format format)
{
    const bml_cuda_plan *plan = &p->plan;
    bml_cuda_share most = bml_cuda_most_of(plan);
    int width = width_of(plan->n_embd, plan->head_dim);
    int key_bytes = plan->head_dim * (p->kv == BML_F32 ? 4 : 2);
    if (most.qkv_tiles > MAX_TILES || most.hidden_tiles > MAX_TILES)
        return 0;
    p->chunks = bml_cuda_chunks(plan);
    /* Small models' stages grow, as long as this does not take most of the ring. */
    int parts = key_stages_for(width) == 1 ? 2 : 1;
    int for_keys = KEYS * key_bytes < MOST_FOR_KEYS ? KEYS * key_bytes : MOST_FOR_KEYS;
    p->stage_bytes = bml_cuda_larger(bml_cuda_stage_bytes(plan, &most, format), parts * for_keys);
    p->keys_of_stage = p->stage_bytes / parts / key_bytes;
    p->keys_of_stage = p->keys_of_stage < KEYS ? p->keys_of_stage : KEYS;
    if (p->n_tokens > 1 && width && p->kv != BML_F32)
        p->keys_of_stage = keys_for(width);
    p->few = most.n_heads * plan->head_dim;
    p->hidden = bml_cuda_hidden_room(&most);
    if (p->n_tokens > 1)
        p->hidden = bml_cuda_few_hidden_pitch(p->hidden);
    p->tiles = bml_cuda_larger(most.qkv_tiles, most.hidden_tiles);
    p->inbox_bytes =
        p->n_tokens == 1 ? bml_cuda_inbox_room(plan, &most) : bml_cuda_few_inbox_room(plan, &most);
    size_t fixed = (size_t)p->inbox_bytes + (p->n_tokens == 1 ? bytes_of_one(p) : bytes_of_few(p)) +
                   (size_t)most.qkv_tiles * TILE * sizeof(qkv_row) +
                   BML_CUDA_FEW_INBOXES * sizeof(uint64_t);
    size_t stage = (size_t)p->stage_bytes + 2 * sizeof(uint64_t);
    size_t room = (size_t)device->shared_bytes;
    /* What warps wait for together: two tiles of rows, or two groups of keys. F32, whose stages are
     * long, has one tile or group of two stages, and one stage on its way. */
    size_t least = format == BML_WEIGHTS_F32 && together_for(width) == 1 ? 3 : 4;
    if (fixed + least * stage > room)
        return 0;
    p->n_stages = (int)((room - fixed) / stage);
    /* One token waits for four stages at once where they are a third of the ring at most; where
     * keys need most of it, a stage is used when it is there. */
    p->columns = p->n_tokens == 1 && p->n_stages >= 12 ? 4 : 1;
    return fixed + p->n_stages * stage;
}

/* Whether the tokens are of one slot each, and all or none of them want logits. */
static bool are_steps(const bml_batch *batch)
{
    return batch->n_tokens <= FEW && (!batch->n_rows || batch->n_rows == batch->n_tokens) &&
           bml_batch_one_a_slot(batch);
}

bool bml_cuda_can_decode(bml_queue *queue, const bml_weights *w, const bml_kv_cache *cache)
{
    const bml_hf_config *c = &w->config;
    int d = cache->head_dim;
    bml_weight_format format = w->layers[0].c_attn.w.format;
    if (queue->device->n_clusters < 1 || !are_steps(queue->batch) || c->n_embd % CHUNK ||
        c->n_embd < TILE * CLUSTER || c->n_embd > MAX_EMBD || c->n_inner % HIDDEN ||
        (d != 64 && d != 128) || !same_format(w, format))
        return false;
    arguments p = {};
    fill_sizes(&p, queue, w, cache);
    return kernel_for(w, &p.plan, p.n_tokens) && lay_out(&p, queue->device, format) > 0 &&
           has_decoder(queue, w, cache);
}

void bml_cuda_decode(bml_queue *queue, const bml_weights *w, bml_activations *a,
                     bml_kv_cache *cache, int n_valid)
{
    const bml_hf_config *c = &w->config;
    bml_weight_format format = w->layers[0].c_attn.w.format;
    bml_cuda_decoder *d = queue->decoder;
    arguments p = {};
    fill_sizes(&p, queue, w, cache);
    size_t bytes = lay_out(&p, queue->device, format);
    p.layers = d->layers;
    p.vectors = d->vectors;
    p.stream = d->stream;
    p.begin = d->begin;
    p.head_begin = d->begin + blocks_of(&d->plan);
    p.layer_bytes = d->layer_bytes;
    p.kept = d->kept;
    p.activation = c->activation;
    p.epsilon = c->layer_norm_epsilon;
    p.inverse_embd = 1.0f / c->n_embd;
    p.wte = (const char *)w->wte.buffer.data;
    p.wte_format = w->wte.format;
    p.wpe = (const char *)w->wpe.buffer.data;
    p.wpe_format = w->wpe.format;
    p.levels = q4_levels();
    p.out = exchange_of(d);
    bool draws = queue->batch->draw != NULL;
    p.n_valid = draws ? 0 : n_valid;
    p.logits = (float *)a->logits.data;
    p.ids = (int32_t *)a->ids.data;
    queue->chain.followed = p.want_row && n_valid;
    for (int t = 0; t < p.n_tokens; t++)
        p.host_id[t] = bml_cuda_chain_word(queue, t);
    if (queue->batch->token)
        memcpy(p.token, queue->batch->token, (size_t)p.n_tokens * sizeof *p.token);
    else
        p.from = p.ids;
    cudaError_t error = launch_in_turn(d, kernel_for(w, &d->plan, p.n_tokens), blocks_of(&d->plan),
                                       bytes, queue->device->shared, &p);
    if (error) { /* nothing was written */
        bml_cuda_note(queue, error);
        return;
    }
    d->launches ^= 1;
    if (!p.want_row || !n_valid)
        return;
    queue->ids = a->ids.data;
    if (draws) {
        bml_cuda_choice choice = {p.ids, queue->ids_host, (int)queue->batch_capacity};
        for (int t = 0; t < p.n_tokens; t++)
            choice.odd |= (uint32_t)bml_cuda_chain_half(queue->batch, t) << t;
        bml_cuda_draw_rows(queue, &choice, &a->logits, p.n_tokens, c->vocab_size, n_valid);
    }
}

int bml_cuda_decode_clusters(int shared_bytes)
{
    const void *kernel = bml_cuda_decode_kernel(BML_WEIGHTS_BF16, 768, 64);
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = CLUSTER;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(CLUSTER * PARTS);
    config.blockDim = dim3(THREADS);
    config.dynamicSmemBytes = (size_t)shared_bytes;
    config.attrs = &attribute;
    config.numAttrs = 1;
    int n = 0;
    if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes) ||
        cudaOccupancyMaxActiveClusters(&n, kernel, &config)) {
        cudaGetLastError();
        return 0;
    }
    return n < PARTS ? n : PARTS;
}
