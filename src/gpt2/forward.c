/*
 * GPT-2 (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"): a stack of
 * pre-norm transformer blocks between an embedding and a linear head.
 */
#include "gpt2/forward.h"

#include "base/memory.h"

static void linear(const bml_model *m, bml_queue *queue, bml_buffer *out, const bml_buffer *x,
                   const bml_linear_weights *w, int n_tokens)
{
    if (w->w.out_in)
        m->backend->linear_transposed(queue, out, x, &w->w, &w->bias.buffer, n_tokens);
    else
        m->backend->linear(queue, out, x, &w->w, &w->bias.buffer, n_tokens);
}

static void layernorm(const bml_model *m, bml_queue *queue, bml_buffer *out, const bml_buffer *x,
                      const bml_norm_weights *norm, int n_rows, bool rows_of_batch)
{
    m->backend->layernorm(queue, out, x, &norm->weight.buffer, &norm->bias.buffer, n_rows,
                          m->weights.config.n_embd, m->weights.config.layer_norm_epsilon,
                          rows_of_batch);
}

void bml_forward(const bml_model *m, bml_queue *queue, const bml_batch *batch, bml_activations *a,
                 bml_kv_cache *cache, int n_valid)
{
    const bml_backend *b = m->backend;
    int n = batch->n_tokens, n_head = m->weights.config.n_head,
        head_dim = m->weights.config.n_embd / n_head;
    size_t n_x = (size_t)n * (size_t)m->weights.config.n_embd;

    b->embedding(queue, &a->x, &m->weights.wte, &m->weights.wpe);
    for (int l = 0; l < m->weights.config.n_layer; l++) {
        const bml_layer_weights *layer = &m->weights.layers[l];

        layernorm(m, queue, &a->normed, &a->x, &layer->ln_1, n, false);
        linear(m, queue, &a->qkv, &a->normed, &layer->c_attn, n);
        b->qkv_split(queue, &a->q, &a->k, &a->v, &a->qkv, n, n_head, head_dim);
        b->kv_append(queue, cache, l, &a->k, &a->v);
        b->attention_cached(queue, &a->heads, &a->q, cache, l,
                            bml_attention_scale(&m->weights.config, l));
        b->heads_merge(queue, &a->merged, &a->heads, n, n_head, head_dim);
        linear(m, queue, &a->branch, &a->merged, &layer->c_proj, n);
        b->residual_add(queue, &a->x, &a->branch, n_x);

        layernorm(m, queue, &a->normed, &a->x, &layer->ln_2, n, false);
        linear(m, queue, &a->hidden, &a->normed, &layer->c_fc, n);
        b->gelu(queue, &a->hidden, (size_t)n * (size_t)m->weights.config.n_inner,
                m->weights.config.activation);
        linear(m, queue, &a->branch, &a->hidden, &layer->mlp_c_proj, n);
        b->residual_add(queue, &a->x, &a->branch, n_x);
    }
    if (batch->n_rows) {
        layernorm(m, queue, &a->normed, &a->x, &m->weights.ln_f, batch->n_rows, true);
        linear(m, queue, &a->logits, &a->normed, &m->weights.lm_head, batch->n_rows);
        if (n_valid)
            b->argmax(queue, &a->ids, &a->logits, batch->n_rows, m->weights.config.vocab_size,
                      n_valid);
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
    bml_buffer *all[] = {&a->x,     &a->normed, &a->qkv,    &a->q,      &a->k,      &a->v,
                         &a->heads, &a->merged, &a->branch, &a->hidden, &a->logits, &a->ids};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        m->backend->buffer_free(m->device, all[i]);
}
