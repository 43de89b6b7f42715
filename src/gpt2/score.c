/*
 * Scoring text under sliding windows, as in Hugging Face's recipe for the perplexity of
 * fixed-length models: each window scores the tokens that no earlier one did, except its own first
 * token, which nothing in it predicts. With overlapping windows that is the very first token alone.
 */
#include "base/error.h"
#include "base/memory.h"
#include "gpt2/session.h"

#include <math.h>
#include <stdlib.h>

/* exp(x) for x <= 0, in arithmetic that the compiler can vectorise: Cephes' polynomial, relative
 * error below 3e-7; 0 below -87. */
static inline float exp_negative(float x)
{
    float clamped = x < -87.0f ? -87.0f : x;
    float n = (clamped * 1.44269504f + 12582912.0f) - 12582912.0f; /* rounds to an integer */
    float r = clamped - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    uint32_t bits = (uint32_t)((int32_t)n + 127) << 23;
    float scale;
    __builtin_memcpy(&scale, &bits, sizeof scale);
    return x < -87.0f ? 0 : p * scale;
}

/* Log-probability, rank and entropy of TARGET under a row of logits. */
static bml_status score_row(const float *logits, size_t n, int32_t target, size_t index,
                            bml_token_score *score, bml_error *err)
{
    enum { LANES = 16 };
    float max = logits[0], check = 0;
    int32_t rank = 1;
    for (size_t i = 0; i < n; i++) {
        check += logits[i] - logits[i]; /* stays 0 only if all are finite */
        max = logits[i] > max ? logits[i] : max;
        rank += logits[i] > logits[target] || (logits[i] == logits[target] && (int32_t)i < target);
    }
    if (check != 0)
        return bml_fail(err, BML_ERR_NUMERIC, "the logits that predict token %zu are not finite",
                        index);
    /* Partial sums of at most 1024 terms in float32, summed up in float64. */
    double sum = 0, weighted = 0; /* of e^d and d e^d with d = logit - max */
    for (size_t block = 0; block < n; block += LANES * 1024) {
        float s[LANES] = {0}, w[LANES] = {0};
        size_t end = n - block < LANES * 1024 ? n : block + LANES * 1024, i = block;
        for (; i + LANES <= end; i += LANES)
            for (size_t l = 0; l < LANES; l++) {
                float d = logits[i + l] - max, e = exp_negative(d);
                s[l] += e;
                w[l] += d * e;
            }
        for (; i < end; i++) {
            float d = logits[i] - max, e = exp_negative(d);
            s[0] += e;
            w[0] += d * e;
        }
        for (size_t l = 0; l < LANES; l++) {
            sum += (double)s[l];
            weighted += (double)w[l];
        }
    }
    *score = (bml_token_score){
        .logprob = (double)logits[target] - (double)max - log(sum),
        .entropy = log(sum) - weighted / sum,
        .rank = rank,
        .scored = true,
    };
    return BML_OK;
}

/* Scores ids[first..end) in the window ids[begin..end), piece by piece; first > begin. The
 * window's last token is scored and not fed. */
static bml_status score_window(bml_session *s, const int32_t *ids, size_t begin, size_t end,
                               size_t first, bml_token_score *scores, bml_batch_token *batch,
                               float *logits, bml_error *err)
{
    size_t vocab_size = (size_t)s->model->weights.config.vocab_size;
    bml_status status = bml_session_truncate(s, 0, 0, err);
    for (size_t at = begin; at + 1 < end && !status;) {
        /* Up to a full pass of tokens, or up to a buffer of rows. */
        size_t n = 0, rows = 0;
        for (; at + n + 1 < end && n < (size_t)s->chunk; n++) {
            bool wanted = at + n + 1 >= first;
            if (wanted && rows == (size_t)s->rows)
                break;
            rows += wanted;
            batch[n] = (bml_batch_token){ids[at + n], 0, wanted};
        }
        status = bml_session_eval(s, batch, n, logits, err);
        for (size_t i = 0, row = 0; i < n && !status; i++)
            if (batch[i].want_logits) {
                size_t target = at + i + 1;
                status = score_row(logits + row++ * vocab_size, vocab_size, ids[target], target,
                                   &scores[target], err);
            }
        at += n;
    }
    return status;
}

static bml_status check(const bml_session *s, const int32_t *ids, size_t n_ids, int stride,
                        bml_error *err)
{
    if (stride < 0 || stride > s->cache.n_ctx)
        return bml_fail(err, BML_ERR_ARGUMENT,
                        "the stride is %d; it must lie in 1..%d, the length of a window (0 means "
                        "that length)",
                        stride, s->cache.n_ctx);
    for (size_t i = 0; i < n_ids; i++) /* the last one is never fed to the model */
        if (ids[i] < 0 || ids[i] >= s->model->weights.config.vocab_size)
            return bml_fail(err, BML_ERR_ARGUMENT, "token %zu has id %d; the model's ids are 0..%d",
                            i, (int)ids[i], s->model->weights.config.vocab_size - 1);
    return BML_OK;
}

bml_status bml_score(bml_session *s, const int32_t *ids, size_t n_ids, int stride,
                     bml_token_score *scores,
                     bool (*progress)(void *context, size_t done, size_t total), void *context,
                     bml_error *err)
{
    size_t capacity = (size_t)s->cache.n_ctx,
           vocab_size = (size_t)s->model->weights.config.vocab_size;
    bml_status status = check(s, ids, n_ids, stride, err);
    if (status)
        return status;
    size_t step = stride ? (size_t)stride : capacity;
    bml_batch_token *batch = bml_calloc((size_t)s->chunk, sizeof *batch);
    float *logits = bml_calloc((size_t)s->rows * vocab_size, sizeof *logits);
    if (!batch || !logits)
        status = bml_fail_memory(err, (size_t)s->rows * vocab_size * sizeof *logits, "scoring");
    size_t scored = 0;
    for (size_t begin = 0; scored < n_ids && !status; begin += step) {
        size_t end = n_ids - begin < capacity ? n_ids : begin + capacity;
        if (scored == begin)
            scores[scored++] = (bml_token_score){0};
        status = score_window(s, ids, begin, end, scored, scores, batch, logits, err);
        scored = end;
        if (!status && progress && !progress(context, scored, n_ids))
            status = bml_fail(err, BML_ERR_STOPPED, "stopped by the caller");
    }
    free(batch);
    free(logits);
    return status;
}
