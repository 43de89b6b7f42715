/* The host's side of decode.cu: what a queue keeps between launches, and the launch. */
#include "backend/cuda/decode.cuh"
#include "backend/cuda/launch.cuh"

extern "C" {
#include "base/memory.h"
}

#include <stdlib.h>

enum {
    MIN_STAGES = 4,
    MAX_SLICE = 40,          /* blocks of a row in a stage */
    ON_THEIR_WAY = 40 << 10, /* bytes on their way to a multiprocessor: latency times bandwidth */
    KEYS_OF_SPLIT = 256,     /* what one block attends to before a second one helps */
};

struct bml_cuda_decoder {
    int n_blocks;
    layer *layers; /* device memory, as what follows */
    vectors vectors;
    exchange out; /* one allocation, from out.qkv on */
    size_t exchange_bytes;
    int n_splits; /* that the exchange was last used with */
    uint32_t use, best_use;
    const void *kernel;
};

void bml_cuda_decoder_free(bml_cuda_decoder *d)
{
    if (!d)
        return;
    cudaFree(d->layers);
    cudaFree((void *)d->vectors.data);
    cudaFree(d->out.qkv);
    free(d);
}

static int n_blocks_for(const bml_device *device, const bml_hf_config *c)
{
    return device->n_multiprocessors < c->n_embd ? device->n_multiprocessors : c->n_embd;
}

static const bml_linear_weights *matrix_of(const bml_layer_weights *l, int m)
{
    const bml_linear_weights *all[] = {&l->c_attn, &l->c_proj, &l->c_fc, &l->mlp_c_proj};
    return all[m];
}

static cudaError_t fill_layers(bml_cuda_decoder *d, const bml_weights *w, const bml_kv_cache *cache)
{
    size_t n = (size_t)w->config.n_layer;
    layer *host = (layer *)bml_calloc(n, sizeof *host);
    if (!host)
        return cudaErrorMemoryAllocation;
    for (size_t i = 0; i < n; i++) {
        for (int m = 0; m < N_MATRICES; m++)
            host[i].rows[m] = (const char *)matrix_of(&w->layers[i], m)->w.buffer.data;
        host[i].k = (char *)cache->k[i].data;
        host[i].v = (char *)cache->v[i].data;
        host[i].scale = bml_attention_scale(&w->config, (int)i);
    }
    cudaError_t error = cudaMalloc((void **)&d->layers, n * sizeof *host);
    if (!error)
        error = cudaMemcpy(d->layers, host, n * sizeof *host, cudaMemcpyHostToDevice);
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

static cudaError_t exchange_new(bml_cuda_decoder *d, const bml_hf_config *c)
{
    size_t e = (size_t)c->n_embd, head_dim = e / (size_t)c->n_head;
    size_t heads = (size_t)c->n_head * MAX_SPLITS * (head_dim + 4);
    size_t words = 5 * e + heads + (size_t)c->n_inner + (size_t)d->n_blocks * RECORD;
    d->exchange_bytes = words * sizeof(float);
    cudaError_t error = cudaMalloc((void **)&d->out.qkv, d->exchange_bytes);
    d->out.heads = d->out.qkv + 3 * e;
    d->out.x[0] = d->out.heads + heads;
    d->out.x[1] = d->out.x[0] + e;
    d->out.hidden = d->out.x[1] + e;
    d->out.best = d->out.hidden + c->n_inner;
    return error;
}

/* The queue's decoder, made at the first call: the weights and the cache of a queue stay. */
static cudaError_t decoder_of(bml_queue *queue, const bml_weights *w, const bml_kv_cache *cache)
{
    if (queue->decoder)
        return cudaSuccess;
    bml_cuda_decoder *d = (bml_cuda_decoder *)bml_calloc(1, sizeof *d);
    if (!d)
        return cudaErrorMemoryAllocation;
    d->n_blocks = n_blocks_for(queue->device, &w->config);
    d->kernel = bml_cuda_decode_kernel(w->layers[0].c_attn.w.format);
    cudaError_t error = fill_layers(d, w, cache);
    if (!error)
        error = fill_vectors(d, w);
    if (!error)
        error = exchange_new(d, &w->config);
    if (!error)
        error = cudaFuncSetAttribute(d->kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     queue->device->shared_bytes);
    if (!error) /* the queue's stream does not wait for the copies */
        error = cudaStreamSynchronize(0);
    if (error)
        bml_cuda_decoder_free(d);
    else
        queue->decoder = d;
    return error;
}

/* What dot_format says of a format, for code that learns the format at run time. */
struct shape {
    bool packed;
    int block_bytes, block_inputs, lane_bytes;
};

template <bml_weight_format F> static shape shape_for(void)
{
    typedef dot_format<F> format;
    return {format::packed, format::block_bytes, format::block_inputs, format::lane_bytes};
}

static shape shape_of(bml_weight_format format)
{
    switch (format) {
    case BML_WEIGHTS_F32:
        return shape_for<BML_WEIGHTS_F32>();
    case BML_WEIGHTS_Q8:
        return shape_for<BML_WEIGHTS_Q8>();
    case BML_WEIGHTS_Q4:
        return shape_for<BML_WEIGHTS_Q4>();
    default:
        return shape_for<BML_WEIGHTS_BF16>();
    }
}

static slicing slicing_of(bml_weight_format format, int n_embd)
{
    shape f = shape_of(format);
    int n_blocks = n_embd / f.block_inputs;
    int blocks = bml_cuda_divided_up(n_blocks, bml_cuda_divided_up(n_blocks, MAX_SLICE)),
        apart = 4 * f.lane_bytes;
    if (f.packed) /* slices begin where groups do */
        blocks = bml_cuda_divided_up(blocks, BML_CUDA_GROUP) * BML_CUDA_GROUP;
    int bytes = f.packed ? (int)bml_cuda_scales_at(format, (size_t)blocks) : blocks * f.block_bytes;
    /* Rows lie APART bytes further in the banks than the one before. */
    return {blocks, bml_cuda_divided_up(bytes - apart, 128) * 128 + apart};
}

static product product_of(const arguments *p, bml_weight_format format, int n_in, slicing cut)
{
    int n_blocks = n_in / shape_of(format).block_inputs;
    int n_slices = bml_cuda_divided_up(n_blocks, cut.blocks), tiles = p->units / n_slices;
    tiles = tiles < 1 ? 1 : tiles > ROWS / TILE ? ROWS / TILE : tiles;
    return {n_blocks, n_slices, cut.blocks, tiles * TILE};
}

/* The sizes of a model, and how its rows are cut. */
static void fill_sizes(arguments *p, const bml_weights *w, const bml_kv_cache *cache)
{
    const bml_hf_config *c = &w->config;
    p->n_layer = c->n_layer;
    p->n_head = c->n_head;
    p->head_dim = cache->head_dim;
    p->n_embd = c->n_embd;
    p->n_inner = c->n_inner;
    p->vocab_size = c->vocab_size;
    p->kv = cache->dtype;
    p->n_ctx = cache->n_ctx;
    p->layers_slicing = slicing_of(w->layers[0].c_attn.w.format, c->n_embd);
    p->head_slicing = slicing_of(w->lm_head.w.format, c->n_embd);
}

/* How shared memory is cut: what is fixed, and as many stages as the rest has room for, of which
 * there must be MIN_STAGES. Returns the bytes, or 0 if they are too many. */
static size_t lay_out(arguments *p, const bml_device *device)
{
    int widest = p->n_embd > p->n_inner ? p->n_embd : p->n_inner;
    size_t floats = (size_t)activations::bytes_for(widest) / 4 +
                    (size_t)p->n_head * p->n_splits * (p->head_dim + 4) + 4 * WARPS +
                    SPLITS * SPLITS + SPLITS + N_MATRICES * ROWS / 2 + 2 * 6 + 2 * WARPS * TILE +
                    WARPS * STATE + 3 * MAX_DIM;
    int pitch = p->layers_slicing.pitch > p->head_slicing.pitch ? p->layers_slicing.pitch
                                                                : p->head_slicing.pitch;
    p->stage_bytes = TILE * pitch;
    size_t stage = (size_t)p->stage_bytes + 2 * sizeof(uint64_t);
    if (floats * sizeof(float) + MIN_STAGES * stage > (size_t)device->shared_bytes)
        return 0;
    p->n_stages = (int)(((size_t)device->shared_bytes - floats * sizeof(float)) / stage);
    p->on_their_way = bml_cuda_divided_up(ON_THEIR_WAY, p->stage_bytes) + 1;
    if (p->on_their_way > p->n_stages)
        p->on_their_way = p->n_stages;
    p->units = p->n_stages / 2 < WARPS ? p->n_stages / 2 : WARPS;
    int key_bytes = p->head_dim * (p->kv == BML_F32 ? 4 : 2);
    p->keys_of_stage = p->stage_bytes / key_bytes;
    return floats * sizeof(float) + p->n_stages * stage;
}

bool bml_cuda_can_decode(const bml_queue *queue, const bml_weights *w, const bml_kv_cache *cache)
{
    const bml_hf_config *c = &w->config;
    int d = cache->head_dim, n_blocks = n_blocks_for(queue->device, c);
    int most_rows = c->n_inner > 3 * c->n_embd ? c->n_inner : 3 * c->n_embd;
    bml_weight_format format = w->layers[0].c_attn.w.format;
    bml_weight_format head = format == BML_WEIGHTS_Q4 ? BML_WEIGHTS_Q8 : format;
    bool fits = queue->device->capability >= 90 && queue->device->cooperative &&
                queue->batch->n_tokens == 1 && c->n_embd % 64 == 0 && c->n_inner % 64 == 0 &&
                c->n_embd <= MAX_EMBD && c->n_head <= n_blocks && (d == 64 || d == MAX_DIM) &&
                (most_rows + n_blocks - 1) / n_blocks <= ROWS &&
                c->n_head * MAX_SPLITS * (d + 4) <= 4 * QUADS * COMPUTE &&
                c->n_inner <= 4 * QUADS * COMPUTE && c->vocab_size < 1 << 24 &&
                w->lm_head.w.format == head;
    for (int i = 0; i < c->n_layer && fits; i++) {
        const bml_layer_weights *l = &w->layers[i];
        fits = l->c_attn.w.format == format && l->c_proj.w.format == format &&
               l->c_fc.w.format == format && l->mlp_c_proj.w.format == format;
    }
    arguments p = {};
    if (fits) {
        fill_sizes(&p, w, cache);
        p.n_splits = MAX_SPLITS;
    }
    return fits && lay_out(&p, queue->device) > 0;
}

void bml_cuda_decode(bml_queue *queue, const bml_weights *w, bml_activations *a,
                     bml_kv_cache *cache, int n_valid)
{
    const bml_hf_config *c = &w->config;
    const bml_batch *batch = queue->batch;
    cudaError_t error = decoder_of(queue, w, cache);
    if (error) {
        bml_cuda_note(queue, error);
        return;
    }
    bml_cuda_decoder *d = queue->decoder;
    arguments p = {};
    fill_sizes(&p, w, cache);
    p.layers = d->layers;
    p.vectors = d->vectors;
    p.activation = c->activation;
    p.epsilon = c->layer_norm_epsilon;
    p.inverse_embd = 1.0f / c->n_embd;
    p.inverse_halves = 64.0f / c->n_embd;
    p.wte = (const char *)w->wte.buffer.data;
    p.wte_format = w->wte.format;
    p.wpe = (const char *)w->wpe.buffer.data;
    p.wpe_format = w->wpe.format;
    p.head = (const char *)w->lm_head.w.buffer.data;
    p.levels = q4_levels();
    if (batch->token)
        p.token = batch->token[0];
    else
        p.from = (const int32_t *)a->ids.data;
    p.position = batch->position[0];
    p.slot = batch->slot[0];
    int most_splits = d->n_blocks / c->n_head < MAX_SPLITS ? d->n_blocks / c->n_head : MAX_SPLITS;
    p.n_splits = p.position / KEYS_OF_SPLIT + 1;
    p.n_splits = p.n_splits < most_splits ? p.n_splits : most_splits;
    p.keys_of_split = (p.position + p.n_splits - 1) / p.n_splits;
    p.out = d->out;
    p.want_row = batch->n_rows == 1;
    p.n_valid = n_valid;
    p.logits = (float *)a->logits.data;
    p.id = (int32_t *)a->ids.data;
    queue->chain.followed = p.want_row && n_valid;
    p.host_id = bml_cuda_chain_word(queue, 0);
    size_t bytes = lay_out(&p, queue->device);
    for (int m = 0; m < N_MATRICES; m++) {
        const bml_weight *matrix = &matrix_of(&w->layers[0], m)->w;
        p.products[m] = product_of(&p, matrix->format, matrix->n_in, p.layers_slicing);
    }
    p.products[N_MATRICES] = product_of(&p, w->lm_head.w.format, c->n_embd, p.head_slicing);
    while (8 << p.lanes_log2 < p.head_dim)
        p.lanes_log2++;

    /* Other splits write other words: their tags would not be one use old. */
    if (p.n_splits != d->n_splits) {
        error = cudaMemsetAsync(d->out.qkv, 0, d->exchange_bytes, queue->stream);
        d->use = d->best_use = 0;
        d->n_splits = p.n_splits;
    }
    p.use = d->use;
    p.best_use = d->best_use;
    void *arguments[] = {&p};
    if (!error)
        error = cudaLaunchCooperativeKernel(d->kernel, d->n_blocks, THREADS, arguments, bytes,
                                            queue->stream);
    if (error) { /* nothing was written: the next launch begins with cleared words */
        bml_cuda_note(queue, error);
        d->n_splits = 0;
        return;
    }
    d->use += (uint32_t)c->n_layer;
    if (p.want_row && n_valid) {
        d->best_use++;
        queue->ids = a->ids.data;
    }
}
