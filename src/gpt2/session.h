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
};

#endif
