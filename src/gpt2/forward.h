/* One pass of the whole model over a flat batch. */
#ifndef BML_GPT2_FORWARD_H
#define BML_GPT2_FORWARD_H

#include "gpt2/model.h"

/* Where a pass keeps its intermediate results; made once a session for the largest batch. */
typedef struct bml_activations {
    bml_buffer x;       /* [T, C], the residual stream */
    bml_buffer normed;  /* [T, C] */
    bml_buffer qkv;     /* [T, 3C] */
    bml_buffer q, k, v; /* [H, T, D] */
    bml_buffer heads;   /* [H, T, D], what attention gives */
    bml_buffer merged;  /* [T, C] */
    bml_buffer branch;  /* [T, C], what is added to the residual stream */
    bml_buffer hidden;  /* [T, n_inner] */
    bml_buffer logits;  /* [R, vocab_size] */
    bml_buffer ids;     /* [R] int32 */
} bml_activations;

/* For at most N_TOKENS tokens and N_ROWS rows of logits in a pass. */
bml_status bml_activations_new(const bml_model *model, int n_tokens, int n_rows,
                               bml_activations *activations, bml_error *err);
void bml_activations_free(const bml_model *model, bml_activations *activations);

/* Enqueues the pass for the batch that begin() was given: the batch's keys and values go into
 * CACHE, the logits of its rows into activations->logits. */
void bml_forward(const bml_model *model, bml_queue *queue, const bml_batch *batch,
                 bml_activations *activations, bml_kv_cache *cache);

#endif
