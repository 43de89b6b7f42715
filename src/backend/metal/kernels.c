/* The kernels that have one form, as dispatches; arguments as in backend.h. */
#include "backend/metal/metal.h"

static bml_metal_binding batch_array(const bml_queue *queue, size_t offset)
{
    return (bml_metal_binding){&queue->batch.buffer, offset};
}

void bml_metal_embedding(bml_queue *queue, bml_buffer *out, const bml_weight *wte,
                         const bml_weight *wpe)
{
    embedding_args args = {.wte = bml_metal_layout(wte),
                           .wpe_format = bml_metal_layout(wpe).format,
                           .n_tokens = (uint32_t)queue->batch.n_tokens};
    size_t n = (size_t)queue->batch.n_tokens * (size_t)wte->n_in;
    bml_metal_dispatch(queue,
                       &(bml_metal_call){.kernel = BML_METAL_EMBEDDING,
                                         .buffers = {{out, 0},
                                                     {&wte->buffer, 0},
                                                     {&wpe->buffer, 0},
                                                     batch_array(queue, queue->batch.token),
                                                     batch_array(queue, queue->batch.position)},
                                         .n_buffers = 5,
                                         .args = &args,
                                         .args_bytes = sizeof args,
                                         .n_groups = bml_metal_groups_for(BML_METAL_EMBEDDING, n)});
}

void bml_metal_layernorm(bml_queue *queue, bml_buffer *out, const bml_buffer *x,
                         const bml_buffer *weight, const bml_buffer *bias, int n_rows, int n_embd,
                         float epsilon, bool rows_of_batch)
{
    norm_args args = {.n = (uint32_t)n_embd,
                      .has_bias = bias->data != NULL,
                      .of_batch = rows_of_batch,
                      .epsilon = epsilon};
    bml_metal_dispatch(queue, &(bml_metal_call){.kernel = BML_METAL_LAYERNORM,
                                                .buffers = {{out, 0},
                                                            {x, 0},
                                                            {weight, 0},
                                                            {bias, 0},
                                                            batch_array(queue, queue->batch.row)},
                                                .n_buffers = 5,
                                                .args = &args,
                                                .args_bytes = sizeof args,
                                                .memory = {SCRATCH_FLOATS},
                                                .n_groups = (size_t)n_rows});
}

void bml_metal_matmul(bml_queue *queue, bml_buffer *c, const bml_buffer *a, const bml_buffer *b,
                      int m, int n, int k)
{
    matmul_args args = {(uint32_t)m, (uint32_t)n, (uint32_t)k};
    bml_metal_dispatch(queue, &(bml_metal_call){.kernel = BML_METAL_MATMUL,
                                                .buffers = {{c, 0}, {a, 0}, {b, 0}},
                                                .n_buffers = 3,
                                                .args = &args,
                                                .args_bytes = sizeof args,
                                                .n_groups = bml_metal_groups_for(
                                                    BML_METAL_MATMUL, (size_t)m * (size_t)n)});
}

void bml_metal_qkv_split(bml_queue *queue, bml_buffer *q, bml_buffer *k, bml_buffer *v,
                         const bml_buffer *qkv, int n_tokens, int n_head, int head_dim)
{
    heads_args args = {(uint32_t)n_tokens, (uint32_t)n_head, (uint32_t)head_dim};
    size_t n = (size_t)n_tokens * (size_t)n_head * (size_t)head_dim;
    bml_metal_dispatch(queue,
                       &(bml_metal_call){.kernel = BML_METAL_QKV_SPLIT,
                                         .buffers = {{q, 0}, {k, 0}, {v, 0}, {qkv, 0}},
                                         .n_buffers = 4,
                                         .args = &args,
                                         .args_bytes = sizeof args,
                                         .n_groups = bml_metal_groups_for(BML_METAL_QKV_SPLIT, n)});
}

void bml_metal_softmax(bml_queue *queue, bml_buffer *x, int n_rows, int n_cols)
{
    softmax_args args = {(uint32_t)n_cols};
    bml_metal_dispatch(queue, &(bml_metal_call){.kernel = BML_METAL_SOFTMAX,
                                                .buffers = {{x, 0}},
                                                .n_buffers = 1,
                                                .args = &args,
                                                .args_bytes = sizeof args,
                                                .memory = {SCRATCH_FLOATS},
                                                .n_groups = (size_t)n_rows});
}

void bml_metal_heads_merge(bml_queue *queue, bml_buffer *out, const bml_buffer *heads, int n_tokens,
                           int n_head, int head_dim)
{
    heads_args args = {(uint32_t)n_tokens, (uint32_t)n_head, (uint32_t)head_dim};
    size_t n = (size_t)n_tokens * (size_t)n_head * (size_t)head_dim;
    bml_metal_dispatch(
        queue, &(bml_metal_call){.kernel = BML_METAL_HEADS_MERGE,
                                 .buffers = {{out, 0}, {heads, 0}},
                                 .n_buffers = 2,
                                 .args = &args,
                                 .args_bytes = sizeof args,
                                 .n_groups = bml_metal_groups_for(BML_METAL_HEADS_MERGE, n)});
}

void bml_metal_residual_add(bml_queue *queue, bml_buffer *x, const bml_buffer *y, size_t n)
{
    elements_args args = {.n = (uint32_t)n};
    bml_metal_dispatch(
        queue, &(bml_metal_call){.kernel = BML_METAL_RESIDUAL_ADD,
                                 .buffers = {{x, 0}, {y, 0}},
                                 .n_buffers = 2,
                                 .args = &args,
                                 .args_bytes = sizeof args,
                                 .n_groups = bml_metal_groups_for(BML_METAL_RESIDUAL_ADD, n)});
}

void bml_metal_gelu(bml_queue *queue, bml_buffer *x, size_t n, bml_activation activation)
{
    elements_args args = {.n = (uint32_t)n, .activation = (uint32_t)activation};
    bml_metal_dispatch(queue,
                       &(bml_metal_call){.kernel = BML_METAL_GELU,
                                         .buffers = {{x, 0}},
                                         .n_buffers = 1,
                                         .args = &args,
                                         .args_bytes = sizeof args,
                                         .n_groups = bml_metal_groups_for(BML_METAL_GELU, n)});
}

void bml_metal_argmax(bml_queue *queue, bml_buffer *ids, const bml_buffer *logits, int n_rows,
                      int n_cols, int n_valid)
{
    enum { SIMDGROUPS = ARGMAX_THREADS / SIMD_WIDTH };
    argmax_args args = {(uint32_t)n_cols, (uint32_t)n_valid};
    bml_metal_dispatch(queue, &(bml_metal_call){.kernel = BML_METAL_ARGMAX,
                                                .buffers = {{ids, 0}, {logits, 0}},
                                                .n_buffers = 2,
                                                .args = &args,
                                                .args_bytes = sizeof args,
                                                .memory = {SIMDGROUPS, 2 * SIMDGROUPS},
                                                .n_groups = (size_t)n_rows});
}

_Static_assert(sizeof(row_score) == sizeof(bml_row_score), "score.metal writes these");

void bml_metal_score(bml_queue *queue, bml_buffer *scores, const bml_buffer *logits, int n_rows,
                     int n_cols)
{
    score_args args = {(uint32_t)n_cols};
    bml_metal_dispatch(
        queue, &(bml_metal_call){
                   .kernel = BML_METAL_SCORE,
                   .buffers = {{scores, 0}, {logits, 0}, batch_array(queue, queue->batch.target)},
                   .n_buffers = 3,
                   .args = &args,
                   .args_bytes = sizeof args,
                   .memory = {SCRATCH_FLOATS},
                   .n_groups = (size_t)n_rows});
}
