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

/* What scoring works in: a pass of tokens, and for each of its rows its target and what is found.
 */
typedef struct scorer {
    bml_session *session;
    bml_batch_token *batch; /* [chunk] */
    int32_t *target;        /* [rows] */
    bml_row_score *rows;    /* [rows] */
    float *logits;          /* [rows, vocab_size]; NULL where the backend scores rows itself */
} scorer;

/* What a backend's score() does, the plain way. */
static bml_row_score score_row(const float *logits, size_t n, int32_t target)
{
    bml_row_score score = {.max = logits[0], .target = logits[target], .rank = 1};
    float check = 0;
    double sum = 0, weighted = 0;
    for (size_t i = 0; i < n; i++) {
        check += logits[i] - logits[i]; /* stays 0 only if all are finite */
        score.max = logits[i] > score.max ? logits[i] : score.max;
        score.rank +=
            logits[i] > score.target || (logits[i] == score.target && (int32_t)i < target);
    }
    if (check != 0)
        score.max = NAN;
    for (size_t i = 0; i < n && check == 0; i++) {
        double d = (double)logits[i] - (double)score.max;
        sum += exp(d);
        weighted += d * exp(d);
    }
    score.sum = (float)sum;
    score.weighted = (float)weighted;
    return score;
}

static bml_status score_pass(scorer *w, size_t n_tokens, size_t n_rows, bml_error *err)
{
    bml_session *s = w->session;
    size_t vocab_size = (size_t)s->model->weights.config.vocab_size;
    if (!w->logits)
        return bml_session_eval_scores(s, w->batch, n_tokens, w->target, w->rows, err);
    bml_status status = bml_session_eval(s, w->batch, n_tokens, w->logits, err);
    for (size_t r = 0; r < n_rows && !status; r++)
        w->rows[r] = score_row(w->logits + r * vocab_size, vocab_size, w->target[r]);
    return status;
}

/* Scores ids[first..end) in the window ids[begin..end), piece by piece; first > begin. The
 * window's last token is scored and not fed. */
static bml_status score_window(scorer *w, const int32_t *ids, size_t begin, size_t end,
                               size_t first, bml_token_score *scores, bml_error *err)
{
    bml_session *s = w->session;
    bml_status status = bml_session_truncate(s, 0, 0, err);
    for (size_t at = begin; at + 1 < end && !status;) {
        /* Up to a full pass of tokens, or up to a buffer of rows. */
        size_t n = 0, rows = 0, to = at + 1 < first ? first : at + 1;
        for (; at + n + 1 < end && n < (size_t)s->chunk; n++) {
            bool wanted = at + n + 1 >= first;
            if (wanted && rows == (size_t)s->rows)
                break;
            if (wanted)
                w->target[rows++] = ids[at + n + 1];
            w->batch[n] = (bml_batch_token){ids[at + n], 0, wanted};
        }
        status = score_pass(w, n, rows, err);
        for (size_t r = 0; r < rows && !status; r++) {
            const bml_row_score *row = &w->rows[r];
            double sum = row->sum;
            if (!isfinite(row->max))
                return bml_fail(err, BML_ERR_NUMERIC,
                                "the logits that predict token %zu are not finite", to + r);
            scores[to + r] = (bml_token_score){
                .logprob = (double)row->target - (double)row->max - log(sum),
                .entropy = log(sum) - (double)row->weighted / sum,
                .rank = row->rank,
                .scored = true,
            };
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
    size_t capacity = (size_t)s->cache.n_ctx, rows = (size_t)s->rows,
           vocab_size = (size_t)s->model->weights.config.vocab_size;
    bml_status status = check(s, ids, n_ids, stride, err);
    if (status)
        return status;
    size_t step = stride ? (size_t)stride : capacity;
    bool plain = !s->model->backend->score;
    scorer w = {
        .session = s,
        .batch = bml_calloc((size_t)s->chunk, sizeof *w.batch),
        .target = bml_calloc(rows, sizeof *w.target),
        .rows = bml_calloc(rows, sizeof *w.rows),
        .logits = plain ? bml_calloc(rows * vocab_size, sizeof *w.logits) : NULL,
    };
    if (!w.batch || !w.target || !w.rows || (plain && !w.logits))
        status = bml_fail_memory(err, rows * vocab_size * sizeof *w.logits, "scoring");
    size_t scored = 0;
    for (size_t begin = 0; scored < n_ids && !status; begin += step) {
        size_t end = n_ids - begin < capacity ? n_ids : begin + capacity;
        if (scored == begin)
            scores[scored++] = (bml_token_score){0};
        status = score_window(&w, ids, begin, end, scored, scores, err);
        scored = end;
        if (!status && progress && !progress(context, scored, n_ids))
            status = bml_fail(err, BML_ERR_STOPPED, "stopped by the caller");
    }
    free(w.batch);
    free(w.target);
    free(w.rows);
    free(w.logits);
    return status;
}
