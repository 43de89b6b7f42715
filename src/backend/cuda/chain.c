/* The host's side of going ahead; see chain.h. */
#include "backend/cuda/cuda.h"

#include "base/philox.h"

#include <string.h>

enum {
    WAITING = -2,    /* in the place of an id that is not there yet */
    WORTH = 32,      /* steps that save what one in vain costs, or more */
    PATIENCE = 63,   /* at most */
    LOOKS = 1 << 14, /* at an id, some 20 us, before the stream is asked whether it has failed */
};

int bml_cuda_chain_half(const bml_batch *step, int r)
{
    return step->position[r] & 1;
}

/* Where the id of row R of a step goes. */
static int32_t *word_of(const bml_queue *queue, const bml_batch *step, int r)
{
    return queue->ids_host + (size_t)bml_cuda_chain_half(step, r) * queue->batch_capacity + r;
}

void bml_cuda_chain_draws(bml_queue *queue, const bml_batch *batch, bool ahead)
{
    for (int r = 0; r < batch->n_rows; r++) {
        const bml_draw *d = &batch->draw[r];
        bml_cuda_draw draw = {bml_philox_uniform(d->seed, d->step), d->temperature, d->top_p,
                              d->min_p, d->top_k};
        for (int half = 0; half < 2; half++)
            if (!ahead || half == bml_cuda_chain_half(batch, r))
                queue->draws[(size_t)half * queue->batch_capacity + r] = draw;
    }
}

int32_t *bml_cuda_chain_word(const bml_queue *queue, int r)
{
    return queue->chain.followed ? word_of(queue, queue->batch, r) : queue->ids_host + r;
}

static bool same_draws(const bml_draw *a, const bml_draw *b, size_t n)
{
    return a && b ? !memcmp(a, b, n * sizeof *a) : !a && !b;
}

/* Whether BATCH takes the tokens that the last pass chose, and chooses as that did. */
static bool goes_on(const bml_cuda_chain *c, const bml_batch *batch)
{
    size_t bytes = (size_t)batch->n_tokens * sizeof(int32_t);
    return c->followed && batch->n_tokens == c->next.n_tokens && batch->n_rows == c->next.n_rows &&
           same_draws(batch->draw, c->next.draw, (size_t)batch->n_rows) &&
           !memcmp(batch->token, c->ids, bytes) && !memcmp(batch->position, c->position, bytes) &&
           !memcmp(batch->slot, c->slot, bytes);
}

void bml_cuda_chain_begin(bml_queue *queue, const bml_batch *batch)
{
    bml_cuda_chain *c = &queue->chain;
    c->goes_on = goes_on(c, batch);
    c->under_way = c->ahead;
    c->followed = c->ahead = false;
}

/* Marks the ids of STEP, which goes on, as not there yet. Nothing on the stream can still write
 * them: of the two passes before, one has ended and the other has the other half. */
static void expect(const bml_queue *queue, const bml_batch *step)
{
    for (int r = 0; r < step->n_rows; r++)
        *word_of(queue, step, r) = WAITING;
}

bool bml_cuda_chain_has(bml_queue *queue, int n_valid)
{
    bml_cuda_chain *c = &queue->chain;
    c->goes_on = c->goes_on && n_valid == c->n_valid;
    c->n_valid = n_valid;
    if (c->goes_on) {
        c->lasted++;
        c->followed = c->under_way;
        if (!c->under_way)
            expect(queue, queue->batch);
        return c->under_way;
    }
    if (c->under_way) /* in vain: a caller whose batches often change is given less often */
        c->patience = c->lasted >= c->patience + WORTH ? 0
                      : c->patience < PATIENCE         ? 2 * c->patience + 1
                                                       : PATIENCE;
    c->lasted = 0;
    return false;
}

const bml_batch *bml_cuda_chain_next(bml_queue *queue, int n_ctx)
{
    bml_cuda_chain *c = &queue->chain;
    const bml_batch *batch = queue->batch;
    bool room = true;
    if (!c->followed)
        return NULL;
    c->next = *batch;
    c->next.token = NULL;
    c->next.position = c->position;
    c->next.slot = c->slot;
    c->next.draw = batch->draw ? c->draw : NULL;
    for (int t = 0; t < batch->n_tokens; t++) {
        c->position[t] = batch->position[t] + 1;
        room = room && c->position[t] < n_ctx;
    }
    for (int r = 0; r < batch->n_rows && batch->draw; r++) {
        c->draw[r] = batch->draw[r];
        c->draw[r].step++;
    }
    memcpy(c->slot, batch->slot, (size_t)batch->n_tokens * sizeof *c->slot);
    if (!room || !c->goes_on || c->lasted <= c->patience || queue->error)
        return NULL;
    expect(queue, &c->next);
    if (c->next.draw)
        bml_cuda_chain_draws(queue, &c->next, true);
    return &c->next;
}

/* Waits for the ids of this pass while the one ahead runs. */
static void await_ids(bml_queue *queue)
{
    for (int r = 0; r < queue->batch->n_rows; r++) {
        const volatile int32_t *word = bml_cuda_chain_word(queue, r);
        cudaError_t state = cudaErrorNotReady;
        for (unsigned looks = 1; *word == WAITING && state == cudaErrorNotReady; looks++)
            if (looks % LOOKS == 0)
                state = cudaStreamQuery(queue->stream);
        if (state && state != cudaErrorNotReady) {
            bml_cuda_note(queue, state);
            return;
        }
    }
}

void bml_cuda_chain_end(bml_queue *queue)
{
    bml_cuda_chain *c = &queue->chain;
    if (c->ahead)
        await_ids(queue);
    else
        bml_cuda_note(queue, cudaStreamSynchronize(queue->stream));
    if (queue->error)
        c->followed = false;
    for (int r = 0; r < queue->batch->n_rows && queue->ids && !queue->error; r++)
        c->ids[r] = *bml_cuda_chain_word(queue, r);
}
