/*
 * The whole pass of src/gpt2/forward.c with as few dispatches as will do: norms are folded into the
 * products behind them, bias, activation and residual stream into the products before, keys and
 * values into attention, each where the kernel for the shape can; five dispatches a layer for one
 * token a slot. Every step gives the bits of the kernels one by one.
 */
#include "backend/metal/metal.h"

typedef struct pass {
    bml_queue *queue;
    const bml_weights *w;
    bml_activations *a;
    bml_kv_cache *cache;
    int n_tokens;
} pass;

/* out = norm(x) W + bias, then what EPILOGUE says. */
static void product(const pass *p, bml_buffer *out, const bml_buffer *x,
                    const bml_norm_weights *norm, const bml_linear_weights *l, int epilogue)
{
    const bml_hf_config *c = &p->w->config;
    bml_metal_product product = {.out = out,
                                 .x = x,
                                 .bias = &l->bias.buffer,
                                 .w = &l->w,
                                 .n_tokens = p->n_tokens,
                                 .norm = norm,
                                 .epsilon = c->layer_norm_epsilon,
                                 .epilogue = epilogue,
                                 .activation = c->activation};
    if (norm && !bml_metal_takes_norm(p->queue, &l->w, p->n_tokens)) {
        bml_metal_layernorm(p->queue, &p->a->normed, x, &norm->weight.buffer, &norm->bias.buffer,
                            p->n_tokens, c->n_embd, c->layer_norm_epsilon, false);
        product.x = &p->a->normed;
        product.norm = NULL;
    }
    if (bml_metal_takes_epilogue(p->queue, &l->w, p->n_tokens)) {
        bml_metal_multiply(p->queue, &product);
        return;
    }
    size_t n = (size_t)p->n_tokens * (size_t)l->w.n_out;
    product.epilogue = EPILOGUE_NONE;
    if (epilogue == EPILOGUE_ADD)
        product.out = &p->a->branch;
    bml_metal_multiply(p->queue, &product);
    if (epilogue == EPILOGUE_ADD)
        bml_metal_residual_add(p->queue, out, &p->a->branch, n);
    if (epilogue == EPILOGUE_ACTIVATE)
        bml_metal_gelu(p->queue, out, n, c->activation);
}

/* From a layer's qkv to what its heads give, in merged. */
static void self_attention(const pass *p, int layer)
{
    uint32_t width = (uint32_t)p->w->config.n_embd, head_dim = (uint32_t)p->cache->head_dim;
    head_strides in_qkv = {.token = 3 * width, .head = head_dim};
    head_strides in_merged = {.token = width, .head = head_dim};
    bool append = bml_metal_attention_appends(p->queue, p->cache);
    if (!append)
        bml_metal_append(p->queue, p->cache, layer,
                         (bml_metal_binding){&p->a->qkv, width * sizeof(float)},
                         (bml_metal_binding){&p->a->qkv, 2 * width * sizeof(float)}, in_qkv);
    bml_metal_attend(p->queue,
                     &(bml_metal_attention){.out = &p->a->merged,
                                            .q = &p->a->qkv,
                                            .out_strides = in_merged,
                                            .q_strides = in_qkv,
                                            .cache = p->cache,
                                            .layer = layer,
                                            .scale = bml_attention_scale(&p->w->config, layer),
                                            .append = append});
}

bool bml_metal_forward(bml_queue *queue, const bml_weights *weights, const bml_batch *batch,
                       bml_activations *a, bml_kv_cache *cache, int n_valid)
{
    const bml_hf_config *c = &weights->config;
    pass p = {queue, weights, a, cache, batch->n_tokens};
    bml_metal_embedding(queue, &a->x, &weights->wte, &weights->wpe);
    for (int l = 0; l < c->n_layer; l++) {
        const bml_layer_weights *layer = &weights->layers[l];
        product(&p, &a->qkv, &a->x, &layer->ln_1, &layer->c_attn, EPILOGUE_NONE);
        self_attention(&p, l);
        product(&p, &a->x, &a->merged, NULL, &layer->c_proj, EPILOGUE_ADD);
        product(&p, &a->hidden, &a->x, &layer->ln_2, &layer->c_fc, EPILOGUE_ACTIVATE);
        product(&p, &a->x, &a->hidden, NULL, &layer->mlp_c_proj, EPILOGUE_ADD);
    }
    if (!batch->n_rows)
        return true;
    /* The head has so many threadgroups that each norming the row for itself would cost more. */
    bml_metal_layernorm(queue, &a->normed, &a->x, &weights->ln_f.weight.buffer,
                        &weights->ln_f.bias.buffer, batch->n_rows, c->n_embd, c->layer_norm_epsilon,
                        true);
    bml_metal_linear(queue, &a->logits, &a->normed, &weights->lm_head.w,
                     &weights->lm_head.bias.buffer, batch->n_rows);
    if (n_valid)
        bml_metal_argmax(queue, &a->ids, &a->logits, batch->n_rows, c->vocab_size, n_valid);
    return true;
}
