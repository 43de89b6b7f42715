/*
 * The whole pass of src/gpt2/forward.c as one job of the thread pool: what the kernels do one by
 * one, with the norm folded into the product behind it, bias, activation and residual into the end
 * of the product before, and a barrier only where a thread needs what others have made. Threads
 * split the columns of products and the heads or queries of attention; small things (norms and
 * quantisation of a few rows) every thread does for itself, which is quicker than waiting. Of the
 * tokens of a prompt most want no logits: in the last layer these give keys and values alone.
 */
#include "backend/cpu/kernels/linear.h"

#include <string.h>

typedef struct pass {
    bml_queue *queue;
    const bml_weights *w;
    const bml_batch *batch;
    bml_activations *a;
    bml_kv_cache *cache;
    int n_valid;
    size_t n_embd, n_tokens, n_head, head_dim;
    const struct pass *of_rows; /* the same of the tokens that want logits alone; or NULL */
} pass;

/* A thread's view of the pass. */
typedef struct worker {
    const pass *p;
    int part, n_parts;
    float *scratch; /* see bml_cpu_begin */
} worker;

static void wait_for_all(const worker *w)
{
    bml_pool_barrier(w->p->queue->pool);
}

/* Rows that are made ready for a product: as floats or, for packed weights, as int8. */
typedef struct input {
    const float *x;
    void *quantized;
} input;

/* Rows [0, n) of X, normed by NORM if there is one (through the batch's rows if OF_BATCH), where
 * this thread can read them. */
static input prepare(const worker *w, const float *x, size_t n_rows, size_t n_in,
                     const bml_norm_weights *norm, bool of_batch, const bml_weight *weight)
{
    const pass *p = w->p;
    bool own = n_rows <= BML_CPU_OWN_ROWS, packed = bml_is_packed(weight->format);
    if (!norm && !packed)
        return (input){x, NULL};
    float *normed = own ? bml_cpu_own_rows(p->queue, w->part) : p->a->normed.data;
    void *quantized = own ? bml_cpu_own_quantized(p->queue, w->part) : p->queue->quantized;
    size_t begin = 0, end = n_rows;
    if (!own)
        bml_split(n_rows, 1, w->part, w->n_parts, &begin, &end);
    for (size_t r = begin; r < end; r++) {
        const float *row = x + (of_batch ? (size_t)p->batch->row[r] : r) * n_in;
        if (norm) {
            KERNEL(layernorm_row)
            (normed + r * n_in, row, norm->weight.buffer.data, norm->bias.buffer.data, n_in,
             p->w->config.layer_norm_epsilon);
            row = normed + r * n_in;
        }
        if (packed)
            KERNEL(quantize_row)(row, n_in, bml_quant_row_at(quantized, n_in, r));
    }
    if (!own)
        wait_for_all(w);
    return (input){norm ? normed : x, quantized};
}

/* The first step of a product; columns are finished by finish_cols, in any split. */
static bml_linear_job begin_product(const worker *w, bml_linear_job job, input in)
{
    job.x = in.x;
    job.quantized = in.quantized;
    job.second = w->p->queue->second;
    if (KERNEL(linear_by_halves)(&job, w->n_parts)) {
        KERNEL(linear_part)(&job, w->part, w->n_parts);
        wait_for_all(w);
    }
    return job;
}

static void finish_cols(const worker *w, const bml_linear_job *job, size_t begin, size_t end)
{
    if (KERNEL(linear_by_halves)(job, w->n_parts))
        KERNEL(linear_join)(job, begin, end);
    else
        KERNEL(linear_cols)(job, begin, end, w->scratch);
}

/* A product, of which this thread finishes its share of the columns. */
static void multiply(const worker *w, bml_linear_job job, input in)
{
    size_t begin, end;
    job = begin_product(w, job, in);
    bml_split(job.n_out, KERNEL(linear_grain)(job.w), w->part, w->n_parts, &begin, &end);
    finish_cols(w, &job, begin, end);
}

static bml_linear_job product(const worker *w, bml_buffer *out, const bml_linear_weights *l)
{
    return bml_linear_job_of(out->data, NULL, &l->w, &l->bias.buffer, w->p->n_tokens);
}

static void embed(const worker *w)
{
    const pass *p = w->p;
    size_t begin, end;
    bml_split(p->n_tokens, 1, w->part, w->n_parts, &begin, &end);
    for (size_t t = begin; t < end; t++)
        KERNEL(embedding_row)
    ((float *)p->a->x.data + t * p->n_embd, &p->w->wte, &p->w->wpe, p->batch->token[t],
     p->batch->position[t]);
}

/* Stores keys and values of one token and head, which lie in qkv. */
static void store_kv(const pass *p, int layer, size_t t, size_t head)
{
    const float *k =
        (const float *)p->a->qkv.data + t * 3 * p->n_embd + p->n_embd + head * p->head_dim;
    int32_t slot = p->batch->slot[t], position = p->batch->position[t];
    KERNEL(cache_store)(p->cache, p->cache->k[layer].data, slot, position, head, k);
    KERNEL(cache_store)(p->cache, p->cache->v[layer].data, slot, position, head, k + p->n_embd);
}

/* One group of queries of one head, from qkv into merged. */
static void attend(const pass *p, int layer, size_t group, size_t head, float scale, float *scratch)
{
    KERNEL(attend_group)
    (p->batch, group, (float *)p->a->merged.data + head * p->head_dim, p->n_embd,
     (const float *)p->a->qkv.data + head * p->head_dim, 3 * p->n_embd, p->cache, layer, head,
     scale, scratch);
}

/* The product before attention, yet to be finished. */
static bml_linear_job begin_qkv(const worker *w, int l)
{
    const pass *p = w->p;
    const bml_layer_weights *weights = &p->w->layers[l];
    input in =
        prepare(w, p->a->x.data, p->n_tokens, p->n_embd, &weights->ln_1, false, &weights->c_attn.w);
    return begin_product(w, product(w, &p->a->qkv, &weights->c_attn), in);
}

/* This thread's share of the product's columns BEGIN..END. */
static void multiply_qkv(const worker *w, int l, size_t begin, size_t end)
{
    bml_linear_job job = begin_qkv(w, l);
    size_t first, last;
    bml_split(end - begin, KERNEL(linear_grain)(job.w), w->part, w->n_parts, &first, &last);
    finish_cols(w, &job, begin + first, begin + last);
    wait_for_all(w);
}

/* This thread's share of all keys and values. */
static void store_shared(const worker *w, int l)
{
    size_t n_tokens = w->p->n_tokens;
    for (size_t at = (size_t)w->part; at < w->p->n_head * n_tokens; at += (size_t)w->n_parts)
        store_kv(w->p, l, at % n_tokens, at / n_tokens);
}

/* This thread's share of all queries, dealt out one by one. */
static void attend_shared(const worker *w, int l)
{
    float scale = bml_attention_scale(&w->p->w->config, l);
    size_t n_groups = KERNEL(attend_groups)(w->p->batch);
    for (size_t at = (size_t)w->part; at < w->p->n_head * n_groups; at += (size_t)w->n_parts)
        attend(w->p, l, at % n_groups, at / n_groups, scale, w->scratch);
}

/* Whole heads, which this thread takes from the product to the end, waiting for nobody. */
static void attend_heads(const worker *w, int l)
{
    const pass *p = w->p;
    float scale = bml_attention_scale(&p->w->config, l);
    size_t n_groups = KERNEL(attend_groups)(p->batch), d = p->head_dim, begin, end;
    bml_split(p->n_head, 1, w->part, w->n_parts, &begin, &end);
    bml_linear_job job = begin_qkv(w, l);
    for (size_t third = 0; third < 3; third++)
        finish_cols(w, &job, third * p->n_embd + begin * d, third * p->n_embd + end * d);
    for (size_t head = begin; head < end; head++) {
        for (size_t t = 0; t < p->n_tokens; t++)
            store_kv(p, l, t, head);
        for (size_t group = 0; group < n_groups; group++)
            attend(p, l, group, head, scale, w->scratch);
    }
}

/*
 * From the input of a layer to what its heads give, in merged: by whole heads if sharing them out
 * makes even work, else the product by columns, and queries once all keys are stored.
 */
static void self_attention(const worker *w, int l)
{
    const pass *p = w->p;
    size_t n_parts = (size_t)w->n_parts;
    bool even = p->n_head % n_parts == 0 || p->n_tokens * p->n_head < 4 * n_parts;
    if (even && p->head_dim % KERNEL(linear_grain)(&p->w->layers[l].c_attn.w) == 0) {
        attend_heads(w, l);
    } else {
        multiply_qkv(w, l, 0, 3 * p->n_embd);
        store_shared(w, l);
        wait_for_all(w);
        attend_shared(w, l);
    }
    wait_for_all(w);
}

/* From what the heads of a layer give to its output. */
static void finish_layer(const worker *w, int l)
{
    const pass *p = w->p;
    const bml_layer_weights *weights = &p->w->layers[l];
    size_t n = p->n_tokens, n_inner = (size_t)p->w->config.n_inner;
    bml_activations *a = p->a;

    bml_linear_job job = product(w, &a->branch, &weights->c_proj);
    job.epilogue = BML_ADD;
    job.residual = a->x.data;
    input in = prepare(w, a->merged.data, n, p->n_embd, NULL, false, job.w);
    multiply(w, job, in);
    wait_for_all(w);

    job = product(w, &a->hidden, &weights->c_fc);
    job.epilogue = BML_ACTIVATE;
    job.activation = p->w->config.activation;
    in = prepare(w, a->x.data, n, p->n_embd, &weights->ln_2, false, job.w);
    multiply(w, job, in);
    wait_for_all(w);

    job = product(w, &a->branch, &weights->mlp_c_proj);
    job.epilogue = BML_ADD;
    job.residual = a->x.data;
    in = prepare(w, a->hidden.data, n, n_inner, NULL, false, job.w);
    multiply(w, job, in);
    wait_for_all(w);
}

static void layer(const worker *w, int l)
{
    self_attention(w, l);
    finish_layer(w, l);
}

/* The last layer where few tokens want logits: keys and values of all, the rest of these few, which
 * move to the front of x. From then on W's pass is theirs. */
static void last_layer(worker *w, int l)
{
    const pass *p = w->p, *rows = p->of_rows;
    size_t c = p->n_embd;
    bool apart = c % KERNEL(linear_grain)(&p->w->layers[l].c_attn.w) == 0;
    multiply_qkv(w, l, apart ? c : 0, 3 * c);
    store_shared(w, l);
    for (size_t r = 0; w->part == 0 && r < rows->n_tokens; r++)
        memmove((float *)p->a->x.data + r * c, (float *)p->a->x.data + (size_t)p->batch->row[r] * c,
                c * sizeof(float));
    wait_for_all(w);
    w->p = rows;
    if (!rows->n_tokens)
        return;
    multiply_qkv(w, l, 0, apart ? c : 3 * c);
    attend_shared(w, l);
    wait_for_all(w);
    finish_layer(w, l);
}

/* Logits of the rows that want them; each thread also finds the best of the ids it has computed. */
static void head(const worker *w)
{
    const pass *p = w->p;
    size_t n = (size_t)p->batch->n_rows, begin, end;
    const bml_linear_weights *lm_head = &p->w->lm_head;
    input in = prepare(w, p->a->x.data, n, p->n_embd, &p->w->ln_f, true, &lm_head->w);
    bml_linear_job job =
        bml_linear_job_of(p->a->logits.data, NULL, &lm_head->w, &lm_head->bias.buffer, n);
    multiply(w, job, in);
    if (!p->n_valid)
        return;
    bml_split(job.n_out, KERNEL(linear_grain)(job.w), w->part, w->n_parts, &begin, &end);
    size_t valid = end < (size_t)p->n_valid ? end : (size_t)p->n_valid;
    bml_best *best = bml_cpu_best(p->queue, w->part);
    for (size_t r = 0; r < n; r++) {
        const float *logits = (const float *)p->a->logits.data + r * job.n_out;
        best[r] = (bml_best){.id = begin, .any = begin < valid};
        if (!best[r].any)
            continue;
        int32_t id = KERNEL(argmax_row)(logits + begin, valid - begin);
        best[r].finite = id >= 0;
        best[r].id = begin + (size_t)(id < 0 ? 0 : id);
        best[r].logit = logits[best[r].id];
    }
    wait_for_all(w);
    if (w->part)
        return;
    for (size_t r = 0; r < n; r++) {
        bml_best all = {.finite = true};
        for (int part = 0; part < w->n_parts; part++) { /* ties stay with the lower id */
            bml_best other = bml_cpu_best(p->queue, part)[r];
            if (!other.any)
                continue;
            all.finite &= other.finite;
            if (!all.any || other.logit > all.logit) {
                all.id = other.id;
                all.logit = other.logit;
            }
            all.any = true;
        }
        ((int32_t *)p->a->ids.data)[r] = all.finite ? (int32_t)all.id : -1;
    }
}

static void run_part(void *context, int part, int n_parts)
{
    const pass *p = context;
    worker w = {p, part, n_parts, bml_cpu_scratch(p->queue, part)};
    embed(&w);
    wait_for_all(&w);
    for (int l = 0; l < p->w->config.n_layer; l++)
        if (p->of_rows && l + 1 == p->w->config.n_layer)
            last_layer(&w, l);
        else
            layer(&w, l);
    if (p->batch->n_rows)
        head(&w);
}

/* The batch's tokens that want logits, as a batch without their ids. */
static bml_batch rows_of(bml_queue *queue, const bml_batch *batch)
{
    int n = batch->n_rows;
    int32_t *position = queue->of_rows, *slot = position + n, *row = slot + n;
    for (int r = 0; r < n; r++) {
        position[r] = batch->position[batch->row[r]];
        slot[r] = batch->slot[batch->row[r]];
        row[r] = r;
    }
    return (bml_batch){.n_tokens = n, .position = position, .slot = slot, .n_rows = n, .row = row};
}

bool KERNEL(forward)(bml_queue *queue, const bml_weights *weights, const bml_batch *batch,
                     bml_activations *activations, bml_kv_cache *cache, int n_valid)
{
    size_t n_head = (size_t)weights->config.n_head, n_embd = (size_t)weights->config.n_embd;
    pass p = {.queue = queue,
              .w = weights,
              .batch = batch,
              .a = activations,
              .cache = cache,
              .n_valid = n_valid,
              .n_embd = n_embd,
              .n_tokens = (size_t)batch->n_tokens,
              .n_head = n_head,
              .head_dim = n_embd / n_head};
    bml_batch rows;
    pass of_rows;
    if (2 * batch->n_rows <= batch->n_tokens) { /* the last layer in two steps is worth it */
        rows = rows_of(queue, batch);
        of_rows = p;
        of_rows.batch = &rows;
        of_rows.n_tokens = (size_t)rows.n_tokens;
        p.of_rows = &of_rows;
    }
    bml_pool_run(queue->pool, run_part, &p);
    return true;
}
