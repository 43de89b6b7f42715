/* Sequence slots over one KV cache. */
#ifndef BML_GPT2_SESSION_H
#define BML_GPT2_SESSION_H

#include "gpt2/forward.h"

struct bml_session {
    const bml_model *model;
    bml_queue *queue;
    bml_kv_cache cache;
    bml_activations activations;
    bool kernel_by_kernel; /* do without the backend's fused pass: for tests */
    bml_trace trace;       /* on_kernel NULL: nobody is watching */
    int chunk;             /* most tokens in a pass */
    int rows;              /* most rows of logits in a pass */
    int *length;           /* [n_slots]: tokens in each slot */
    int *planned;          /* [n_slots]: their lengths while a batch is checked and run */
    int32_t *token, *position, *slot, *row; /* [chunk]: the arrays of a pass */
    bml_draw *draw;                         /* [rows] */
};

/* As bml_session_eval, but instead of the rows of logits gives what score() of the backend, which
 * must have it, says of each and its TARGET; both arrays have an element for each row. */
bml_status bml_session_eval_scores(bml_session *session, const bml_batch_token *batch, size_t n,
                                   const int32_t *target, bml_row_score *scores, bml_error *err);

#endif
