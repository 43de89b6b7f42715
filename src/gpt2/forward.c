/*
 * GPT-2 (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"): a stack of
 * pre-norm transformer blocks between an embedding and a linear head.
 */
#include "gpt2/forward.h"

#include "base/clock.h"
#include "base/memory.h"

/* A pass on its way: what every kernel call needs. */
typedef struct pass {
    const bml_model *m;
    const bml_backend *b;
    bml_queue *queue;
    const bml_trace *trace; /* NULL: nobody is watching */
    int layer;              /* -1 outside the layers */
    double began;           /* when the kernel began that is running now */
} pass;

static void report(pass *p, const char *kernel)
{
    if (!p->trace)
        return;
    if (p->b->finish)
        p->b->finish(p->queue);
    double now = bml_now();
    p->trace->on_kernel(p->trace->context, kernel, p->layer, p->began, now);
    p->began = now;
}

/* Calls a kernel of the backend, and reports it to whoever traces the pass. */
#define RUN(p, kernel, ...) ((p)->b->kernel((p)->queue, __VA_ARGS__), report(p, #kernel))

static void linear(pass *p, bml_buffer *out, const bml_buffer *x, const bml_linear_weights *w,
                   int n_tokens)
{
    if (w->w.out_in)
        RUN(p, linear_transposed, out, x, &w->w, &w->bias.buffer, n_tokens);
    else
        RUN(p, linear, out, x, &w->w, &w->bias.buffer, n_tokens);
}

static void layernorm(pass *p, bml_buffer *out, const bml_buffer *x, const bml_norm_weights *norm,
                      int n_rows, bool rows_of_batch)
{
    const bml_hf_config *c = &p->m->weights.config;
    RUN(p, layernorm, out, x, &norm->weight.buffer, &norm->bias.buffer, n_rows, c->n_embd,
        c->layer_norm_epsilon, rows_of_batch);
}

void bml_forward(const bml_model *m, bml_queue *queue, const bml_batch *batch, bml_activations *a,
                 bml_kv_cache *cache, int n_valid, const bml_trace *trace)
{
    const bml_hf_config *c = &m->weights.config;
    int n = batch->n_tokens, head_dim = c->n_embd / c->n_head;
    size_t n_x = (size_t)n * (size_t)c->n_embd, n_hidden = (size_t)n * (size_t)c->n_inner;
    pass pass_state = {m, m->backend, queue, trace, -1, trace ? bml_now() : 0}, *p = &pass_state;

    RUN(p, embedding, &a->x, &m->weights.wte, &m->weights.wpe);
    for (int l = p->layer = 0; l < c->n_layer; p->layer = ++l) {
        const bml_layer_weights *layer = &m->weights.layers[l];

        layernorm(p, &a->normed, &a->x, &layer->ln_1, n, false);
        linear(p, &a->qkv, &a->normed, &layer->c_attn, n);
        RUN(p, qkv_split, &a->q, &a->k, &a->v, &a->qkv, n, c->n_head, head_dim);
        RUN(p, kv_append, cache, l, &a->k, &a->v);
        RUN(p, attention_cached, &a->heads, &a->q, cache, l, bml_attention_scale(c, l));
        RUN(p, heads_merge, &a->merged, &a->heads, n, c->n_head, head_dim);
        linear(p, &a->branch, &a->merged, &layer->c_proj, n);
        RUN(p, residual_add, &a->x, &a->branch, n_x);

        layernorm(p, &a->normed, &a->x, &layer->ln_2, n, false);
        linear(p, &a->hidden, &a->normed, &layer->c_fc, n);
        RUN(p, gelu, &a->hidden, n_hidden, c->activation);
        linear(p, &a->branch, &a->hidden, &layer->mlp_c_proj, n);
        RUN(p, residual_add, &a->x, &a->branch, n_x);
    }
    p->layer = -1;
    if (batch->n_rows) {
        layernorm(p, &a->normed, &a->x, &m->weights.ln_f, batch->n_rows, true);
        linear(p, &a->logits, &a->normed, &m->weights.lm_head, batch->n_rows);
        if (n_valid && batch->draw)
            RUN(p, sample, &a->ids, &a->logits, batch->n_rows, c->vocab_size, n_valid);
        else if (n_valid)
            RUN(p, argmax, &a->ids, &a->logits, batch->n_rows, c->vocab_size, n_valid);
    }
}

bml_status bml_activations_new(const bml_model *m, int n_tokens, int n_rows, bml_activations *a,
                               bml_error *err)
{
    size_t t = (size_t)n_tokens, c = (size_t)m->weights.config.n_embd,
           n_inner = (size_t)m->weights.config.n_inner;
    struct {
        bml_buffer *buffer;
        size_t rows, cols;
    } wanted[] = {
        {&a->x, t, c},
        {&a->normed, t, c},
        {&a->qkv, t, 3 * c},
        {&a->q, t, c},
        {&a->k, t, c},
        {&a->v, t, c},
        {&a->heads, t, c},
        {&a->merged, t, c},
        {&a->branch, t, c},
        {&a->hidden, t, n_inner},
        {&a->ids, (size_t)n_rows, 1},
        {&a->scores, (size_t)n_rows, sizeof(bml_row_score) / sizeof(float)},
        {&a->logits, (size_t)n_rows, (size_t)m->weights.config.vocab_size},
    };
    bml_status status = BML_OK;
    *a = (bml_activations){0};
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted && !status; i++) {
        size_t bytes; /* no overflow: a config's sizes fit in int, and there are two factors */
        if (!bml_mul_size(wanted[i].rows * sizeof(float), wanted[i].cols, &bytes))
            bytes = SIZE_MAX;
        status = m->backend->buffer_new(m->device, bytes, wanted[i].buffer, err);
    }
    if (status)
        bml_activations_free(m, a);
    return status;
}

void bml_activations_free(const bml_model *m, bml_activations *a)
{
    bml_buffer *all[] = {&a->x,      &a->normed, &a->qkv,    &a->q,      &a->k,
                         &a->v,      &a->heads,  &a->merged, &a->branch, &a->hidden,
                         &a->logits, &a->ids,    &a->scores};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        m->backend->buffer_free(m->device, all[i]);
}
