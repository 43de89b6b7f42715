/* The loop from a prompt to text: sampling, stop strings, and text that streams as it is certain.
 */
#include "base/clock.h"
#include "base/error.h"
#include "base/memory.h"
#include "gpt2/sampler.h"
#include "gpt2/session.h"
#include "tokenizer/tokenizer.h"

#include <stdlib.h>
#include <string.h>

/* Text so far, and how much of it the caller has seen. */
typedef struct text_stream {
    const bml_generate_options *options;
    bml_bytes text;
    size_t sent;
    bool stopped; /* a stop string was found; text ends before it */
} text_stream;

static bml_status send_up_to(text_stream *s, size_t end, bml_error *err)
{
    size_t begin = s->sent;
    s->sent = end > begin ? end : begin;
    if (s->options->on_text && end > begin &&
        !s->options->on_text(s->options->context, s->text.data + begin, end - begin))
        return bml_fail(err, BML_ERR_STOPPED, "stopped by the caller");
    return BML_OK;
}

/* Cuts the text at the first stop string, if one is complete. ADDED bytes are new. */
static void find_stop(text_stream *s, size_t added)
{
    size_t first = s->text.length;
    for (size_t i = 0; i < s->options->n_stop; i++) {
        const char *stop = s->options->stop[i];
        size_t length = strlen(stop), old = s->text.length - added;
        size_t from = old + 1 > length ? old + 1 - length : 0;
        for (size_t at = from; at + length <= s->text.length && at < first; at++)
            if (memcmp(s->text.data + at, stop, length) == 0) {
                first = at;
                s->stopped = true;
            }
    }
    if (s->stopped) {
        s->text.length = first;
        s->text.data[first] = 0;
    }
}

/* How many bytes at the end might be the beginning of a stop string. */
static size_t withheld(const text_stream *s)
{
    size_t most = 0;
    for (size_t i = 0; i < s->options->n_stop; i++) {
        size_t length = strlen(s->options->stop[i]);
        size_t n = length - 1 < s->text.length ? length - 1 : s->text.length;
        for (; n > most; n--)
            if (memcmp(s->text.data + s->text.length - n, s->options->stop[i], n) == 0)
                most = n;
    }
    return most;
}

static bml_status add_token(text_stream *s, const bml_tokenizer *tokenizer, int32_t id,
                            bml_error *err)
{
    size_t length = 0;
    const char *bytes = tokenizer ? bml_token_bytes(tokenizer, id, &length) : NULL;
    if (!bytes)
        return BML_OK;
    if (!bml_bytes_append(&s->text, bytes, length))
        return bml_fail_memory(err, s->text.length + length, "the text");
    find_stop(s, length);
    if (s->stopped)
        return send_up_to(s, s->text.length, err);
    size_t certain = s->text.length - withheld(s);
    return send_up_to(s, bml_utf8_complete(s->text.data, certain), err);
}

/* The choice is left to the device, but where it depends on the history: then the logits are needed
 * here. */
static bml_status next_token(bml_session *session, const bml_batch_token *batch, size_t n,
                             const bml_sampling *sampling, float *logits, const int32_t *history,
                             size_t n_history, uint64_t step, int32_t *token, bml_error *err)
{
    bml_status status;
    if (!logits && sampling->temperature != 0)
        return bml_session_eval_sample(session, batch, n, sampling, &step, token, err);
    if (!logits) {
        status = bml_session_eval_argmax(session, batch, n, token, err);
        if (status == BML_ERR_NUMERIC)
            bml_error_step(err, step);
        return status;
    }
    status = bml_session_eval(session, batch, n, logits, err);
    if (status)
        return status;
    return bml_sample(sampling, logits, session->model->info.n_tokens, history, n_history, step,
                      token, err);
}

/* What a generation works with, so that one place frees it. */
typedef struct generator {
    bml_session *session;
    const bml_generate_options *options;
    bml_generation *out;
    text_stream stream;
    int32_t *history; /* prompt, then what was generated */
    size_t n_history;
    float *logits; /* [vocab_size]; NULL where the history does not count */
    bml_batch_token *batch;
} generator;

static bml_status generate(generator *g, int slot, size_t n_prompt, size_t most, bml_error *err)
{
    const bml_model *model = g->session->model;
    const bml_generate_options *o = g->options;
    bml_generation *out = g->out;
    size_t n_batch = n_prompt;
    for (size_t i = 0; i < n_prompt; i++)
        g->batch[i] = (bml_batch_token){g->history[i], slot, i + 1 == n_prompt};
    out->finish_reason = BML_FINISH_LENGTH;
    for (uint64_t step = 0; step < most; step++) {
        double start = bml_now();
        int32_t token;
        bml_status status = next_token(g->session, g->batch, n_batch, &o->sampling, g->logits,
                                       g->history, g->n_history, step, &token, err);
        if (status)
            return status;
        double ms = 1e3 * (bml_now() - start);
        if (step == 0) {
            out->prefill_ms = ms;
            out->prefill_tokens = n_prompt;
        } else {
            out->decode_ms += ms;
            out->decode_tokens++;
        }
        if (bml_is_eos(&model->weights.config, token) && !o->ignore_eos) {
            out->finish_reason = BML_FINISH_STOP;
            return BML_OK;
        }
        g->history[g->n_history++] = token;
        out->n_ids++;
        status = add_token(&g->stream, model->tokenizer, token, err);
        if (status)
            return status;
        if (g->stream.stopped) {
            out->finish_reason = BML_FINISH_STOP;
            return BML_OK;
        }
        g->batch[0] = (bml_batch_token){token, slot, true};
        n_batch = 1;
    }
    return BML_OK;
}

static bml_status check(const bml_session *session, size_t n_prompt, const bml_generate_options *o,
                        bml_error *err)
{
    int n_ctx = session->cache.n_ctx, n_positions = session->model->weights.config.n_positions;
    if (n_prompt == 0)
        return bml_fail(err, BML_ERR_ARGUMENT, "the prompt is empty; it needs at least one token");
    if (n_prompt > (size_t)n_ctx)
        return bml_fail(err, BML_ERR_CONTEXT,
                        "the prompt has %zu tokens; the context holds %d (the model has %d "
                        "positions)",
                        n_prompt, n_ctx, n_positions);
    for (size_t i = 0; i < o->n_stop; i++)
        if (!o->stop[i] || !*o->stop[i])
            return bml_fail(err, BML_ERR_ARGUMENT, "stop string %zu is empty", i + 1);
    if (o->n_stop && !session->model->tokenizer)
        return bml_fail(err, BML_ERR_ARGUMENT,
                        "stop strings need a tokenizer, and the model at %s has none",
                        session->model->path);
    return bml_sampling_check(&o->sampling, err);
}

bml_status bml_generate(bml_session *session, int slot, const int32_t *prompt, size_t n_prompt,
                        const bml_generate_options *options, bml_generation *out, bml_error *err)
{
    bml_generation result = {0};
    generator g = {session, options, &result, {.options = options}, NULL, 0, NULL, NULL};
    bml_status status = check(session, n_prompt, options, err);
    if (!status)
        status = bml_session_truncate(session, slot, 0, err);
    if (status)
        return status;

    /* The token that fills the context may still be followed by one, which is not fed back. */
    size_t most = (size_t)session->cache.n_ctx - n_prompt + 1;
    if (options->max_tokens >= 0 && (size_t)options->max_tokens < most)
        most = (size_t)options->max_tokens;
    bool penalty = options->sampling.repetition_penalty != 1;
    size_t vocab_size = (size_t)session->model->weights.config.vocab_size;
    g.history = bml_calloc(n_prompt + most, sizeof *g.history);
    g.batch = bml_calloc(n_prompt, sizeof *g.batch);
    g.logits = penalty ? bml_calloc(vocab_size, sizeof *g.logits) : NULL;
    if (!g.history || !g.batch || (!g.logits && penalty) ||
        !bml_bytes_append(&g.stream.text, "", 0))
        status = bml_fail_memory(err, (n_prompt + most + vocab_size) * sizeof(float), "generating");
    if (!status) {
        memcpy(g.history, prompt, n_prompt * sizeof *prompt);
        g.n_history = n_prompt;
        status = generate(&g, slot, n_prompt, most, err);
    }
    if (!status) /* what was withheld or is an unfinished character */
        status = send_up_to(&g.stream, g.stream.text.length, err);
    if (!status || status == BML_ERR_STOPPED) {
        memmove(g.history, g.history + n_prompt, result.n_ids * sizeof *g.history);
        result.ids = g.history;
        result.text = g.stream.text.data;
        result.text_length = g.stream.text.length;
        *out = result;
    } else {
        free(g.history);
        free(g.stream.text.data);
    }
    free(g.batch);
    free(g.logits);
    return status;
}

void bml_generation_clear(bml_generation *generation)
{
    free(generation->ids);
    free(generation->text);
    *generation = (bml_generation){0};
}
