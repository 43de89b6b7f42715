/*
 * Steps without gaps. Who has gone on with the ids that a step chose, or drew, will go on with
 * those of the next, and draw them with the same settings: that step is enqueued ahead, with its
 * tokens read from where the device left them, and runs while the host learns of the ids before,
 * asks for it, and enqueues the one after.
 *
 * A step that nobody asks for does no harm. It writes keys and values at the position behind each
 * of its slots' last, and every pass writes these before it reads them; ids and activations, which
 * every pass writes anew; and the batch's arrays on the device, which the next pass copies again.
 * What comes after it on the queue's stream waits for it. What it draws with may by then be another
 * batch's, as the host writes that where it is read.
 *
 * Greedy steps may be of any size; those that draw go on this way only as one launch (decode.h).
 */
#ifndef BML_BACKEND_CUDA_CHAIN_H
#define BML_BACKEND_CUDA_CHAIN_H

#include "backend/cuda/choice.h"

#include "backend/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What a queue knows of this pass and the one after. */
typedef struct bml_cuda_chain {
    bml_batch next; /* what may follow; without tokens, which are IDS once these are there */
    int32_t *ids, *position, *slot; /* [rows]; the last two are NEXT's */
    bml_draw *draw;                 /* [rows]: NEXT's, if it draws */
    int n_valid;
    bool followed;  /* all rows of this pass choose a token, and a step can take these */
    bool goes_on;   /* this pass takes the tokens that the last one chose */
    bool under_way; /* the step after the last pass has been enqueued ahead */
    bool ahead;     /* and so has the one after this */
    int lasted;     /* how many steps in a row went on */
    int patience;   /* how many must before one is enqueued ahead */
} bml_cuda_chain;

/* The word of the host's memory where the id of row R of the pass goes; see choice.h. */
int32_t *bml_cuda_chain_word(const bml_queue *queue, int r);

/* The half, 0 or 1, in which a step has what it shares with no neighbour: its rows' words, and
 * draws, are told apart by their positions. */
int bml_cuda_chain_half(const bml_batch *step, int r);

/* Puts the draws of a batch, or of a step to be enqueued ahead, where kernels read them. */
void bml_cuda_chain_draws(bml_queue *queue, const bml_batch *batch, bool ahead);

/* Called by begin(). */
void bml_cuda_chain_begin(bml_queue *queue, const bml_batch *batch);

/* Whether the pass with N_VALID ids has been enqueued ahead; if not the caller enqueues it now. */
bool bml_cuda_chain_has(bml_queue *queue, int n_valid);

/* The step to enqueue ahead behind the pass, in caches of N_CTX positions; NULL for none. The
 * queue's batch arrays on the device are its own by the time it runs. */
const bml_batch *bml_cuda_chain_next(bml_queue *queue, int n_ctx);

/* Called by end(): waits for this pass alone, and keeps the ids that it chose. */
void bml_cuda_chain_end(bml_queue *queue);

#ifdef __cplusplus
}
#endif

#endif
