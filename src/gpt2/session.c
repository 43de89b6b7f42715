#include "gpt2/session.h"

#include "base/dtype.h"
#include "base/error.h"
#include "base/memory.h"
#include "gpt2/sampler.h"

#include <stdlib.h>
#include <string.h>

enum {
    DEFAULT_CHUNK = 1024, /* a prompt of GPT-2; half of it does not fill a large GPU */
    MAX_ROWS = 256,       /* bounds the logits: 51 MB for GPT-2's vocabulary */
    MAX_SLOTS = 1 << 20
};

static bml_status cache_new(bml_session *s, bml_error *err)
{
    bml_kv_cache *c = &s->cache;
    size_t bytes = bml_dtype_size(c->dtype);
    bool fits = bml_mul_size(bytes, (size_t)c->n_slots, &bytes) &&
                bml_mul_size(bytes, (size_t)c->n_ctx, &bytes) &&
                bml_mul_size(bytes, (size_t)c->n_head * (size_t)c->head_dim, &bytes);
    c->k = bml_calloc((size_t)c->n_layer, sizeof *c->k);
    c->v = bml_calloc((size_t)c->n_layer, sizeof *c->v);
    if (!c->k || !c->v || !fits)
        return bml_fail_memory(err, fits ? (size_t)c->n_layer * sizeof *c->k : SIZE_MAX,
                               "the key-value cache");
    bml_status status = BML_OK;
    for (int l = 0; l < c->n_layer && !status; l++) {
        status = s->model->backend->buffer_new(s->model->device, bytes, &c->k[l], err);
        if (!status)
            status = s->model->backend->buffer_new(s->model->device, bytes, &c->v[l], err);
    }
    return status;
}

static bml_status session_init(bml_session *s, int n_threads, bml_error *err)
{
    size_t n_slots = (size_t)s->cache.n_slots, chunk = (size_t)s->chunk;
    bml_status status = s->model->backend->queue_new(s->model->device, n_threads, &s->queue, err);
    if (!status)
        status = cache_new(s, err);
    if (!status)
        status = bml_activations_new(s->model, s->chunk, s->rows, &s->activations, err);
    if (status)
        return status;
    s->length = bml_calloc(n_slots, sizeof *s->length);
    s->planned = bml_calloc(n_slots, sizeof *s->planned);
    s->token = bml_calloc(chunk, sizeof *s->token);
    s->position = bml_calloc(chunk, sizeof *s->position);
    s->slot = bml_calloc(chunk, sizeof *s->slot);
    s->row = bml_calloc(chunk, sizeof *s->row);
    s->draw = bml_calloc((size_t)s->rows, sizeof *s->draw);
    if (!s->length || !s->planned || !s->token || !s->position || !s->slot || !s->row || !s->draw)
        return bml_fail_memory(err, (n_slots + 2 * chunk) * 2 * sizeof(int32_t), "a session");
    return BML_OK;
}

static bml_status check_options(const bml_model *model, const bml_session_options *o,
                                bml_error *err)
{
    int n_positions = model->weights.config.n_positions;
    if (o->n_slots < 0 || o->n_slots > MAX_SLOTS)
        return bml_fail(err, BML_ERR_ARGUMENT, "n_slots is %d; it must lie in 0..%d", o->n_slots,
                        MAX_SLOTS);
    if (o->n_ctx < 0)
        return bml_fail(err, BML_ERR_ARGUMENT, "n_ctx is %d; it must not be negative", o->n_ctx);
    if (o->n_ctx > n_positions)
        return bml_fail(err, BML_ERR_CONTEXT,
                        "a context of %d tokens is asked for; the model has %d positions", o->n_ctx,
                        n_positions);
    if (o->kv_dtype != BML_F32 && o->kv_dtype != BML_F16 && o->kv_dtype != BML_BF16)
        return bml_fail(err, BML_ERR_ARGUMENT, "a key-value cache holds f32, f16 or bf16");
    if (o->n_threads < 0)
        return bml_fail(err, BML_ERR_ARGUMENT, "n_threads is %d; it must not be negative",
                        o->n_threads);
    if (o->chunk < 0)
        return bml_fail(err, BML_ERR_ARGUMENT, "chunk is %d; it must not be negative", o->chunk);
    return BML_OK;
}

bml_status bml_session_new(const bml_model *model, const bml_session_options *options,
                           bml_session **out, bml_error *err)
{
    static const bml_session_options defaults = {0};
    if (!options)
        options = &defaults;
    bml_status status = check_options(model, options, err);
    if (status)
        return status;
    bml_session *s = bml_calloc(1, sizeof *s);
    if (!s)
        return bml_fail_memory(err, sizeof *s, "a session");
    s->model = model;
    s->cache = (bml_kv_cache){
        .dtype = options->kv_dtype,
        .n_layer = model->weights.config.n_layer,
        .n_slots = options->n_slots ? options->n_slots : 1,
        .n_ctx = options->n_ctx ? options->n_ctx : model->weights.config.n_positions,
        .n_head = model->weights.config.n_head,
        .head_dim = model->weights.config.n_embd / model->weights.config.n_head,
    };
    int64_t most = (int64_t)s->cache.n_slots * s->cache.n_ctx; /* a batch never has more tokens */
    s->chunk = options->chunk ? options->chunk : DEFAULT_CHUNK;
    s->chunk = s->chunk < most ? s->chunk : (int)most;
    s->rows = s->chunk < MAX_ROWS ? s->chunk : MAX_ROWS;
    status = session_init(s, options->n_threads, err);
    if (status) {
        bml_session_free(s);
        return status;
    }
    *out = s;
    return BML_OK;
}

void bml_session_free(bml_session *s)
{
    if (!s)
        return;
    const bml_backend *b = s->model->backend;
    b->queue_free(s->queue); /* first: it may still be at work in what is freed next */
    for (int l = 0; l < s->cache.n_layer; l++) {
        if (s->cache.k)
            b->buffer_free(s->model->device, &s->cache.k[l]);
        if (s->cache.v)
            b->buffer_free(s->model->device, &s->cache.v[l]);
    }
    bml_activations_free(s->model, &s->activations);
    free(s->cache.k);
    free(s->cache.v);
    free(s->length);
    free(s->planned);
    free(s->token);
    free(s->position);
    free(s->slot);
    free(s->row);
    free(s->draw);
    free(s);
}

int bml_session_threads(const bml_session *s)
{
    return s->model->backend->queue_threads(s->queue);
}

int bml_session_capacity(const bml_session *s)
{
    return s->cache.n_ctx;
}

static bool slot_exists(const bml_session *s, int slot)
{
    return slot >= 0 && slot < s->cache.n_slots;
}

int bml_session_length(const bml_session *s, int slot)
{
    return slot_exists(s, slot) ? s->length[slot] : 0;
}

bml_status bml_session_truncate(bml_session *s, int slot, int length, bml_error *err)
{
    if (!slot_exists(s, slot))
        return bml_fail(err, BML_ERR_ARGUMENT, "slot %d does not exist; the session has 0..%d",
                        slot, s->cache.n_slots - 1);
    if (length < 0 || length > s->length[slot])
        return bml_fail(err, BML_ERR_ARGUMENT, "slot %d cannot be cut to %d tokens: it holds %d",
                        slot, length, s->length[slot]);
    s->length[slot] = length;
    return BML_OK;
}

/* Ids, slots and room of a whole batch, before anything runs. Tokens of one slot mostly come
 * together, and are counted together. */
static bml_status check_batch(bml_session *s, const bml_batch_token *batch, size_t n,
                              bml_error *err)
{
    int vocab_size = s->model->weights.config.vocab_size;
    memcpy(s->planned, s->length, (size_t)s->cache.n_slots * sizeof *s->planned);
    for (size_t i = 0, first = 0; i < n; first = i) {
        int slot = (int)batch[i].slot;
        if (!slot_exists(s, slot))
            return bml_fail(err, BML_ERR_ARGUMENT,
                            "token %zu of the batch is for slot %d; the session has 0..%d", i, slot,
                            s->cache.n_slots - 1);
        for (; i < n && batch[i].slot == slot; i++)
            if (batch[i].token < 0 || batch[i].token >= vocab_size)
                return bml_fail(err, BML_ERR_ARGUMENT,
                                "token %zu of the batch has id %d; the model's ids are 0..%d", i,
                                (int)batch[i].token, vocab_size - 1);
        s->planned[slot] += (int)(i - first);
    }
    for (int slot = 0; slot < s->cache.n_slots; slot++)
        if (s->planned[slot] > s->cache.n_ctx)
            return bml_fail(err, BML_ERR_CONTEXT,
                            "slot %d would hold %d tokens; its context has room for %d", slot,
                            s->planned[slot], s->cache.n_ctx);
    return BML_OK;
}

static bool has_room(const bml_session *s, const bml_batch *pass, const bml_batch_token *next)
{
    return pass->n_tokens < s->chunk && (!next->want_logits || pass->n_rows < s->rows);
}

/* Takes tokens from the front of BATCH until a pass is full; s->planned counts positions. */
static bml_batch next_pass(bml_session *s, const bml_batch_token *batch, size_t n)
{
    bml_batch pass = {.token = s->token, .position = s->position, .slot = s->slot, .row = s->row};
    for (size_t i = 0; i < n && has_room(s, &pass, batch + i);) {
        int32_t slot = batch[i].slot, position = s->planned[slot];
        for (; i < n && batch[i].slot == slot && has_room(s, &pass, batch + i); i++) {
            if (batch[i].want_logits)
                s->row[pass.n_rows++] = pass.n_tokens;
            s->token[pass.n_tokens] = batch[i].token;
            s->slot[pass.n_tokens] = slot;
            s->position[pass.n_tokens++] = position++;
        }
        s->planned[slot] = position;
    }
    return pass;
}

/* What is wanted of the rows of a batch: one of the three. */
typedef struct wanted {
    float *logits;
    int32_t *next; /* their argmax, or, with SAMPLING and STEP, what these draw */
    const bml_sampling *sampling;
    const uint64_t *step;
    const int32_t *target;
    bml_row_score *scores; /* against TARGET */
} wanted;

/* What the backend is to draw for the rows of PASS, of which DONE came before. */
static const bml_draw *draws_of(bml_session *s, const bml_batch *pass, const wanted *w, size_t done)
{
    if (!w->sampling || !s->model->backend->sample)
        return NULL;
    for (int r = 0; r < pass->n_rows; r++) {
        const bml_sampling *o = &w->sampling[done + (size_t)r];
        s->draw[r] = (bml_draw){.seed = o->seed,
                                .step = w->step[done + (size_t)r],
                                .temperature = o->temperature,
                                .top_p = o->top_p,
                                .min_p = o->min_p,
                                .top_k = o->top_k};
    }
    return s->draw;
}

/* Draws where the logits are in host memory. */
static bml_status sample_rows(bml_session *s, const bml_batch *pass, const wanted *w, size_t done,
                              bml_error *err)
{
    const float *logits = s->activations.logits.data;
    size_t width = (size_t)s->model->weights.config.vocab_size;
    bml_status status = BML_OK;
    for (size_t r = 0; !status && r < (size_t)pass->n_rows; r++)
        status = bml_sample(&w->sampling[done + r], logits + r * width, s->model->info.n_tokens,
                            NULL, 0, w->step[done + r], &w->next[done + r], err);
    return status;
}

/* Brings the rows of a pass, of which DONE came before, to where they are wanted. */
static bml_status fetch_rows(bml_session *s, const bml_batch *pass, const wanted *w, size_t done,
                             bml_error *err)
{
    const bml_backend *b = s->model->backend;
    const bml_activations *a = &s->activations;
    size_t n = (size_t)pass->n_rows, width = (size_t)s->model->weights.config.vocab_size;
    if (n == 0)
        return BML_OK;
    if (w->scores)
        return b->download(s->queue, w->scores + done, &a->scores, n * sizeof *w->scores, err);
    if (w->sampling && !pass->draw)
        return sample_rows(s, pass, w, done, err);
    if (!w->next)
        return b->download(s->queue, w->logits + done * width, &a->logits,
                           n * width * sizeof *w->logits, err);
    bml_status status = b->download(s->queue, w->next + done, &a->ids, n * sizeof *w->next, err);
    for (size_t r = 0; !status && r < n; r++)
        if (w->next[done + r] < 0) {
            status = bml_fail(err, BML_ERR_NUMERIC,
                              "the logits at position %d of slot %d are not finite",
                              (int)s->position[s->row[r]], (int)s->slot[s->row[r]]);
            if (w->step)
                bml_error_step(err, w->step[done + r]);
        }
    return status;
}

static bml_status run_pass(bml_session *s, const bml_batch *pass, const wanted *w, bml_error *err)
{
    const bml_backend *b = s->model->backend;
    bml_activations *a = &s->activations;
    bool chooses = w->next && (!w->sampling || pass->draw);
    int n_valid = chooses ? s->model->info.n_tokens : 0;
    const bml_trace *trace = s->trace.on_kernel ? &s->trace : NULL;
    bml_status status = b->begin(s->queue, pass, err);
    if (status)
        return status;
    bool fused = b->forward && !s->kernel_by_kernel && !trace;
    if (!fused || !b->forward(s->queue, &s->model->weights, pass, a, &s->cache, n_valid))
        bml_forward(s->model, s->queue, pass, a, &s->cache, n_valid, trace);
    if (w->scores && pass->n_rows)
        b->score(s->queue, &a->scores, &a->logits, pass->n_rows,
                 s->model->weights.config.vocab_size);
    return b->end(s->queue, err);
}

/* Runs a batch pass by pass. */
static bml_status run(bml_session *s, const bml_batch_token *batch, size_t n, const wanted *w,
                      bml_error *err)
{
    bml_status status = check_batch(s, batch, n, err);
    if (status)
        return status;
    memcpy(s->planned, s->length, (size_t)s->cache.n_slots * sizeof *s->planned);
    for (size_t done = 0, rows = 0; done < n;) {
        bml_batch pass = next_pass(s, batch + done, n - done);
        pass.target = w->target ? w->target + rows : NULL;
        pass.draw = draws_of(s, &pass, w, rows);
        status = run_pass(s, &pass, w, err);
        if (!status)
            status = fetch_rows(s, &pass, w, rows, err);
        if (status)
            return status;
        done += (size_t)pass.n_tokens;
        rows += (size_t)pass.n_rows;
    }
    memcpy(s->length, s->planned, (size_t)s->cache.n_slots * sizeof *s->length);
    return BML_OK;
}

static bml_status eval(bml_session *s, const bml_batch_token *batch, size_t n, wanted w,
                       bml_error *err)
{
    for (size_t i = 0; i < n && !w.logits && !w.next && !w.scores; i++)
        if (batch[i].want_logits)
            return bml_fail(err, BML_ERR_ARGUMENT,
                            "token %zu of the batch wants logits and there is no room for them", i);
    return run(s, batch, n, &w, err);
}

bml_status bml_session_eval(bml_session *s, const bml_batch_token *batch, size_t n, float *logits,
                            bml_error *err)
{
    return eval(s, batch, n, (wanted){.logits = logits}, err);
}

bml_status bml_session_eval_argmax(bml_session *s, const bml_batch_token *batch, size_t n,
                                   int32_t *next, bml_error *err)
{
    return eval(s, batch, n, (wanted){.next = next}, err);
}

bml_status bml_session_eval_sample(bml_session *s, const bml_batch_token *batch, size_t n,
                                   const bml_sampling *sampling, const uint64_t *step,
                                   int32_t *next, bml_error *err)
{
    for (size_t i = 0, r = 0; i < n; i++) {
        if (!batch[i].want_logits)
            continue;
        if (!sampling || !step)
            return bml_fail(err, BML_ERR_ARGUMENT,
                            "token %zu of the batch wants a draw and has no sampling or no step",
                            i);
        bml_status status = bml_sampling_check(&sampling[r], err);
        if (!status && sampling[r].repetition_penalty != 1)
            status = bml_fail(err, BML_ERR_ARGUMENT,
                              "row %zu has a repetition_penalty of %g, which needs its logits and "
                              "bml_sample; here it must be 1",
                              r, (double)sampling[r].repetition_penalty);
        if (status)
            return status;
        r++;
    }
    return eval(s, batch, n, (wanted){.next = next, .sampling = sampling, .step = step}, err);
}

bml_status bml_session_eval_scores(bml_session *s, const bml_batch_token *batch, size_t n,
                                   const int32_t *target, bml_row_score *scores, bml_error *err)
{
    return eval(s, batch, n, (wanted){.target = target, .scores = scores}, err);
}

void bml_session_trace(bml_session *s, bml_trace_fn *on_kernel, void *context)
{
    s->trace = (bml_trace){on_kernel, context};
}

bml_status bml_measure_limits(bml_session *s, bml_limits *limits, bml_error *err)
{
    return s->model->backend->measure(s->queue, limits, err);
}

double bml_session_device_seconds(const bml_session *s)
{
    const bml_backend *b = s->model->backend;
    return b->device_seconds ? b->device_seconds(s->queue) : 0;
}
