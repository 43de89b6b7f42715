/*
 * From logits to a token, as transformers' processors do it and in their order: repetition
 * penalty, temperature, top-k, top-p, min-p, then a draw.
 */
#include "gpt2/sampler.h"

#include "base/error.h"
#include "base/memory.h"
#include "base/philox.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    BLOCK = 64, /* logits that are looked at together, */
    LANES = 16, /* and such that the compiler makes a vector of */
};

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

/* The lowest index of the largest. */
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

static int n_blocks(int n_tokens)
{
    return (n_tokens + BLOCK - 1) / BLOCK;
}

/* To MAXIMA the largest of every BLOCK logits. */
static void find_maxima(const float *logits, int n, float *maxima)
{
    for (int first = 0; first < n; first += BLOCK) {
        int left = n - first < BLOCK ? n - first : BLOCK, i = 0;
        float max[LANES];
        for (int l = 0; l < LANES; l++)
            max[l] = -INFINITY;
        for (; i + LANES <= left; i += LANES)
            for (int l = 0; l < LANES; l++)
                max[l] = logits[first + i + l] > max[l] ? logits[first + i + l] : max[l];
        for (; i < left; i++)
            max[0] = logits[first + i] > max[0] ? logits[first + i] : max[0];
        for (int l = 1; l < LANES; l++)
            max[0] = max[l] > max[0] ? max[l] : max[0];
        *maxima++ = max[0];
    }
}

/* The Kth largest of N logits, 0 < K < N. HEAP [K] holds the largest so far with the smallest of
 * these at the root, so by -logit; most logits are below all of these, whole blocks at a time. */
static float kth_largest(const float *logits, int n, const float *maxima, int k, candidate *heap)
{
    float least = -INFINITY;
    for (int i = 0; i < k; i++)
        heap[i] = (candidate){INFINITY, 0};
    for (int first = 0; first < n; first += BLOCK) {
        int end = n - first < BLOCK ? n : first + BLOCK;
        for (int i = first; maxima[first / BLOCK] > least && i < end; i++)
            if (logits[i] > least) {
                heap[0].p = -(double)logits[i];
                sift_down(heap, (size_t)k, 0);
                least = (float)-heap[0].p;
            }
    }
    return least;
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

static int by_probability(const void *a, const void *b)
{
    const candidate *x = a, *y = b;
    return x->id == y->id ? 0 : goes_before(*x, *y) ? 1 : -1;
}

/* The candidates that top-k leaves, everything that equals the Kth included, as transformers has
 * it, and then sorted, the most probable one last. C [n_tokens]; MAXIMA is scratch. Returns how
 * many. */
static size_t choose(const bml_sampling *s, const float *logits, int n_tokens, float *maxima,
                     candidate *c, bool *sorted)
{
    float largest = -INFINITY, least = -INFINITY;
    size_t n = 0;
    *sorted = s->top_k > 0 && s->top_k < n_tokens;
    find_maxima(logits, n_tokens, maxima);
    for (int i = 0; i < n_blocks(n_tokens); i++)
        largest = maxima[i] > largest ? maxima[i] : largest;
    if (*sorted)
        least = kth_largest(logits, n_tokens, maxima, s->top_k, c);
    for (int32_t first = 0; first < n_tokens; first += BLOCK) {
        int32_t end = n_tokens - first < BLOCK ? n_tokens : first + BLOCK;
        for (int32_t i = first; maxima[first / BLOCK] >= least && i < end; i++)
            if (logits[i] >= least) {
                double distance = (double)logits[i] - (double)largest;
                c[n++] = (candidate){exp(distance / (double)s->temperature), i};
            }
    }
    if (*sorted)
        qsort(c, n, sizeof *c, by_probability);
    return n;
}

/*
 * Keeps what top-p and min-p allow of the N candidates; SORTED: the most probable one is the last.
 * Returns the number kept; they lie at the end of C, and *total is the sum of their probabilities.
 * Only as much is sorted as is kept.
 */
static size_t keep(const bml_sampling *s, candidate *c, size_t n, bool sorted, double *total)
{
    double all = 0, kept = 0, threshold = s->min_p; /* of the best one's p, which is 1 */
    size_t n_kept = 0;
    if (s->top_p >= 1) {
        /* Compacted towards the end, in the order they lie in. */
        for (size_t i = n; i-- > 0;)
            if (c[i].p >= threshold) {
                kept += c[i].p;
                c[n - ++n_kept] = c[i];
            }
        *total = kept;
        return n_kept;
    }
    for (size_t i = n; i-- > 0;)
        all += c[i].p;
    if (!sorted) {
        /* All that are less probable than this are together less than what top-p leaves out. */
        double least = (1 - s->top_p) * all / (2 * (double)n);
        size_t left = 0;
        for (size_t i = n; i-- > 0;)
            if (c[i].p >= least)
                c[n - ++left] = c[i];
        c += n - left;
        n = left;
        for (size_t i = n / 2; i-- > 0;)
            sift_down(c, n, i);
    }
    /* top-p: a token stays while those before it have not reached p of the mass. */
    for (; n_kept < n; n_kept++) {
        candidate next = sorted ? c[n - 1 - n_kept] : c[0];
        if (n_kept && (kept >= s->top_p * all || next.p < threshold))
            break;
        if (!sorted)
            pop(c, n - n_kept);
        kept += next.p;
    }
    *total = kept;
    return n_kept;
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
    float zeros[LANES] = {0}; /* of all first, which is quick: what is not finite times 0 is NaN */
    int i = 0;
    for (; i + LANES <= n_tokens; i += LANES)
        for (int l = 0; l < LANES; l++)
            zeros[l] += logits[i + l] * 0;
    for (; i < n_tokens; i++)
        zeros[0] += logits[i] * 0;
    for (int l = 1; l < LANES; l++)
        zeros[0] += zeros[l];
    bool finite = zeros[0] == 0;
    for (i = 0; i < n_tokens && !finite; i++)
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

    bool penalty = s->repetition_penalty != 1, draws = s->temperature != 0;
    size_t n = (size_t)n_tokens;
    /* One allocation: the candidates, blocks' maxima, the logits with the penalty, and who has been
     * seen. */
    size_t maxima = draws ? (size_t)n_blocks(n_tokens) : 0;
    size_t bytes = (draws ? n * sizeof(candidate) : 0) + maxima * sizeof(float) +
                   (penalty ? n * (sizeof(float) + sizeof(uint8_t)) : 0);
    candidate *c = bytes ? bml_realloc(NULL, 1, bytes) : NULL; /* written before it is read */
    if (bytes && !c)
        return bml_fail_memory(err, bytes, "sampling");
    float *scratch = (float *)(c + (draws ? n : 0));
    if (penalty) {
        float *adjusted = scratch + maxima;
        uint8_t *seen = (uint8_t *)(adjusted + n);
        memcpy(adjusted, logits, n * sizeof *adjusted);
        memset(seen, 0, n);
        penalize(adjusted, n_tokens, history, n_history, s->repetition_penalty, seen);
        logits = adjusted;
    }

    if (!draws) {
        *token = argmax(logits, n_tokens);
    } else {
        bool sorted;
        double total;
        size_t left = choose(s, logits, n_tokens, scratch, c, &sorted);
        size_t kept = keep(s, c, left, sorted, &total);
        *token = draw(c + left - kept, kept, total, bml_philox_uniform(s->seed, step));
    }
    free(c);
    return BML_OK;
}
