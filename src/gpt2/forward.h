/* One pass of the whole model over a flat batch. */
#ifndef BML_GPT2_FORWARD_H
#define BML_GPT2_FORWARD_H

#include "gpt2/model.h"

/* Who is told about every kernel of a pass. */
typedef struct bml_trace {
    bml_trace_fn *on_kernel;
    void *context;
} bml_trace;

/* For at most N_TOKENS tokens and N_ROWS rows of logits in a pass. */
bml_status bml_activations_new(const bml_model *model, int n_tokens, int n_rows,
                               bml_activations *activations, bml_error *err);
void bml_activations_free(const bml_model *model, bml_activations *activations);

/* Enqueues the pass, kernel by kernel, for the batch that begin() was given: the batch's keys and
 * values go into CACHE, the logits of its rows into activations->logits and, with N_VALID > 0,
 * their argmax over the first N_VALID ids, or what the batch's draws take of these, into
 * activations->ids. TRACE may be NULL. */
void bml_forward(const bml_model *model, bml_queue *queue, const bml_batch *batch,
                 bml_activations *activations, bml_kv_cache *cache, int n_valid,
                 const bml_trace *trace);

#endif
