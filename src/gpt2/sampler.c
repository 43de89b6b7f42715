/*
 * From logits to a token, as transformers' processors do it and in their order: repetition
 * penalty, temperature, top-k, top-p, min-p, then a draw.
 */
#include "gpt2/sampler.h"

#include "base/error.h"
#include "base/memory.h"
#include "gpt2/philox.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct candidate {
    double p; /* unnormalised: exp((logit - largest) / temperature) */
    int32_t id;
} candidate;

bml_sampling bml_sampling_default(void)
{
    return (bml_sampling){.temperature = 1, .top_p = 1, .repetition_penalty = 1};
}

bml_status bml_sampling_check(const bml_sampling *s, bml_error *err)
{
    if (!(s->temperature >= 0) || isinf(s->temperature))
        return bml_fail(err, BML_ERR_ARGUMENT, "temperature is %g; it must be 0 or more",
                        (double)s->temperature);
    if (!(s->top_p >= 0 && s->top_p <= 1))
        return bml_fail(err, BML_ERR_ARGUMENT, "top_p is %g; it must lie in 0..1",
                        (double)s->top_p);
    if (!(s->min_p >= 0 && s->min_p <= 1))
        return bml_fail(err, BML_ERR_ARGUMENT, "min_p is %g; it must lie in 0..1",
                        (double)s->min_p);
    if (!(s->repetition_penalty > 0) || isinf(s->repetition_penalty))
        return bml_fail(err, BML_ERR_ARGUMENT, "repetition_penalty is %g; it must be above 0",
                        (double)s->repetition_penalty);
    return BML_OK;
}

/* Divides positive and multiplies negative logits of each distinct token of the history. */
static void penalize(float *logits, int n_tokens, const int32_t *history, size_t n_history,
                     float penalty, uint8_t *seen)
{
    for (size_t i = 0; i < n_history; i++) {
        int32_t id = history[i];
        if (id < 0 || id >= n_tokens || seen[id])
            continue;
        seen[id] = 1;
        logits[id] = logits[id] > 0 ? logits[id] / penalty : logits[id] * penalty;
    }
}

static int32_t argmax(const float *logits, int n_tokens)
{
    int32_t best = 0;
    for (int32_t i = 1; i < n_tokens; i++)
        if (logits[i] > logits[best])
            best = i;
    return best;
}

/* More probable first; equals in id order, so that every choice below is determined. */
static bool goes_before(candidate a, candidate b)
{
    return a.p > b.p || (a.p == b.p && a.id < b.id);
}

static void sift_down(candidate *heap, size_t n, size_t at)
{
    candidate moved = heap[at];
    for (size_t child; (child = 2 * at + 1) < n; at = child) {
        if (child + 1 < n && goes_before(heap[child + 1], heap[child]))
            child++;
        if (!goes_before(heap[child], moved))
            break;
        heap[at] = heap[child];
    }
    heap[at] = moved;
}

/* Moves the most probable candidate of a heap of n to its end, which leaves a heap of n - 1. */
static candidate pop(candidate *heap, size_t n)
{
    candidate top = heap[0];
    heap[0] = heap[n - 1];
    heap[n - 1] = top;
    sift_down(heap, n - 1, 0);
    return top;
}

/*
 * Keeps what top-k, top-p and min-p allow. Returns the number kept; they lie at the end of C, and
 * *total is the sum of their probabilities. Only as much is sorted as is kept.
 */
static size_t keep(const bml_sampling *s, candidate *c, size_t n, double *total)
{
    size_t k = s->top_k > 0 && (size_t)s->top_k < n ? (size_t)s->top_k : n;
    double all = 0, kept = 0, kth = 0;
    bool heaped = k < n || s->top_p < 1;
    if (heaped)
        for (size_t i = n / 2; i-- > 0;)
            sift_down(c, n, i);
    if (k < n) { /* transformers keeps everything that equals the k-th */
        size_t popped = 0;
        for (; popped < n && (popped < k || c[0].p == kth); popped++) {
            kth = pop(c, n - popped).p;
            all += kth;
        }
        k = popped;
    } else {
        for (size_t i = 0; i < n; i++)
            all += c[i].p;
    }

    double threshold = s->min_p; /* of the best one's p, which is 1 */
    if (s->top_p >= 1) {
        candidate *from = c + (n - k);
        size_t kept_n = 0;
        /* Compacted towards the end, in the order they lie in. */
        for (size_t i = k; i-- > 0;)
            if (from[i].p >= threshold) {
                kept += from[i].p;
                from[k - ++kept_n] = from[i];
            }
        *total = kept;
        return kept_n;
    }
    /* top-p: a token stays while those before it have not reached p of the mass. */
    size_t kept_n = 0;
    for (; kept_n < k; kept_n++) {
        candidate next = k < n ? c[n - 1 - kept_n] : c[0];
        if (kept_n && (kept >= s->top_p * all || next.p < threshold))
            break;
        if (k == n)
            pop(c, n - kept_n);
        kept += next.p;
    }
    *total = kept;
    return kept_n;
}

static int32_t draw(const candidate *c, size_t n, double total, double uniform)
{
    double target = uniform * total, sum = 0;
    size_t i = n;
    do /* from the most probable one down: from the end */
        sum += c[--i].p;
    while (i > 0 && sum <= target);
    return c[i].id;
}

static bml_status check_finite(const float *logits, int n_tokens, uint64_t step, bml_error *err)
{
    for (int i = 0; i < n_tokens; i++)
        if (!isfinite(logits[i]))
            return bml_fail(err, BML_ERR_NUMERIC,
                            "step %llu: the logit of token %d is %g; it must be finite",
                            (unsigned long long)step, i, (double)logits[i]);
    return BML_OK;
}

bml_status bml_sample(const bml_sampling *s, const float *logits, int n_tokens,
                      const int32_t *history, size_t n_history, uint64_t step, int32_t *token,
                      bml_error *err)
{
    bml_status status = bml_sampling_check(s, err);
    if (!status && n_tokens < 1)
        status = bml_fail(err, BML_ERR_ARGUMENT, "there are no tokens to choose from");
    if (!status)
        status = check_finite(logits, n_tokens, step, err);
    if (status)
        return status;

    size_t n = (size_t)n_tokens;
    /* One allocation: the candidates, the logits with the penalty, and who has been seen. */
    candidate *c = bml_calloc(n, sizeof *c + sizeof(float) + 1);
    if (!c)
        return bml_fail_memory(err, n * (sizeof *c + sizeof(float) + 1), "sampling");
    float *adjusted = (float *)(c + n);
    uint8_t *seen = (uint8_t *)(adjusted + n);
    memcpy(adjusted, logits, n * sizeof *adjusted);
    if (s->repetition_penalty != 1)
        penalize(adjusted, n_tokens, history, n_history, s->repetition_penalty, seen);

    int32_t best = argmax(adjusted, n_tokens);
    if (s->temperature == 0) {
        *token = best;
    } else {
        for (int32_t i = 0; i < n_tokens; i++) {
            double distance = (double)adjusted[i] - (double)adjusted[best];
            c[i] = (candidate){exp(distance / (double)s->temperature), i};
        }
        double total;
        size_t kept = keep(s, c, n, &total);
        *token = draw(c + n - kept, kept, total, bml_philox_uniform(s->seed, step));
    }
    free(c);
    return BML_OK;
}
