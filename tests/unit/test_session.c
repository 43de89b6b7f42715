/* Sessions: slots, errors, the same bits for every batch, chunk and thread count, and bml_generate.
 */
#include "testing.h"

#include "backend/backend.h"
#include "gpt2/session.h"

#include <math.h>

/* The built-in model; by format of weights where a test is about all of them. */
static bml_model *model, *models[BML_WEIGHTS_Q4 + 1];
static bml_error err;

static void ok(bml_status status)
{
    if (status)
        fail_msg("%s", err.message);
}

static bml_session *session_with(bml_session_options options)
{
    bml_session *s;
    ok(bml_session_new(model, &options, &s, &err));
    return s;
}

static void random_ids(int32_t *ids, size_t n, uint64_t seed)
{
    for (size_t i = 0; i < n; i++)
        ids[i] = (int32_t)(test_random(&seed) % 8192);
}

/* Logits of every token, one sequence alone, in pieces of PIECE (0: all at once). */
static float *alone(bml_session_options options, const int32_t *ids, size_t n, size_t piece)
{
    bml_session *s = session_with(options);
    bml_batch_token *batch = calloc(n, sizeof *batch);
    float *logits = calloc(n * 8192, sizeof *logits);
    for (size_t i = 0; i < n; i++)
        batch[i] = (bml_batch_token){ids[i], 0, true};
    for (size_t at = 0; at < n;) {
        size_t now = piece && piece < n - at ? piece : n - at;
        ok(bml_session_eval(s, batch + at, now, logits + at * 8192, &err));
        at += now;
    }
    assert_int_equal(bml_session_length(s, 0), n);
    free(batch);
    bml_session_free(s);
    return logits;
}

static void test_same_bits(void **state)
{
    (void)state;
    enum { N = TEST_SANITIZED ? 70 : 150 };
    int32_t ids[N];
    random_ids(ids, N, 1);
    for (int format = 0; format <= BML_WEIGHTS_Q4; format++) {
        bml_session_options base = {.n_threads = 1, .kv_dtype = (bml_dtype)(format % 3)};
        model = models[format];
        float *wanted = alone(base, ids, N, 0);
        for (int threads = 1; threads <= 5; threads += TEST_SANITIZED ? 4 : 2)
            for (int chunk = 0; chunk < 4; chunk++) {
                static const int chunks[] = {0, 1, 7, 64};
                bml_session_options o = base;
                o.n_threads = threads;
                o.chunk = chunks[chunk];
                float *got = alone(o, ids, N, 0);
                assert_memory_equal(got, wanted, N * 8192 * sizeof *got);
                free(got);
            }
        for (size_t piece = 1; piece < 20; piece += TEST_SANITIZED ? 12 : 6) {
            float *got = alone(base, ids, N, piece);
            assert_memory_equal(got, wanted, N * 8192 * sizeof *got);
            free(got);
        }
        free(wanted);
    }
    model = models[0];
}

/* The backend's fused pass against the kernels one by one, for few and for many tokens. */
static void test_fused_equals_kernels(void **state)
{
    (void)state;
    enum { N = 40 };
    static float fused[N * 8192], plain[N * 8192];
    int32_t ids[N], best[2][N];
    random_ids(ids, N, 11);
    for (int format = 0; format <= BML_WEIGHTS_Q4; format++)
        for (int threads = 1; threads <= 4; threads += TEST_SANITIZED ? 3 : 1) {
            static const size_t pieces[] = {1, 2, 7, 8, 9, 13};
            model = models[format];
            bml_session_options o = {.n_threads = threads};
            bml_session *f = session_with(o), *p = session_with(o);
            p->kernel_by_kernel = true;
            for (size_t i = 0, at = 0; i < sizeof pieces / sizeof *pieces; at += pieces[i++]) {
                bml_batch_token batch[N];
                for (size_t t = 0; t < pieces[i]; t++)
                    batch[t] = (bml_batch_token){ids[at + t], 0, true};
                ok(bml_session_eval(f, batch, pieces[i], fused, &err));
                ok(bml_session_eval(p, batch, pieces[i], plain, &err));
                assert_memory_equal(fused, plain, pieces[i] * 8192 * sizeof(float));
                ok(bml_session_truncate(f, 0, (int)at, &err));
                ok(bml_session_truncate(p, 0, (int)at, &err));
                ok(bml_session_eval_argmax(f, batch, pieces[i], best[0], &err));
                ok(bml_session_eval_argmax(p, batch, pieces[i], best[1], &err));
                assert_memory_equal(best[0], best[1], pieces[i] * sizeof(int32_t));
            }
            bml_session_free(f);
            bml_session_free(p);
        }
    model = models[0];
}

/* Few tokens of a pass want logits, or none, of several slots side by side: the last layer is done
 * for these alone, which must not show. */
static void test_same_bits_for_few_rows(void **state)
{
    (void)state;
    enum { SLOTS = 3, N = 90 };
    static const size_t pieces[] = {40, 2, 30, 1, 17};
    static float fused[N * 8192], plain[N * 8192];
    uint64_t random = 11;
    for (int format = 0; format <= BML_WEIGHTS_Q4; format++)
        for (int threads = 1; threads <= 3; threads++) {
            model = models[format];
            bml_session_options o = {.n_threads = threads, .n_slots = SLOTS};
            bml_session *f = session_with(o), *p = session_with(o);
            p->kernel_by_kernel = true;
            for (size_t i = 0; i < sizeof pieces / sizeof *pieces; i++) {
                bml_batch_token batch[N];
                size_t rows = 0;
                for (size_t t = 0; t < pieces[i]; t++) {
                    batch[t] = (bml_batch_token){(int32_t)(test_random(&random) % 8192),
                                                 (int32_t)(test_random(&random) % SLOTS),
                                                 i != 1 && test_random(&random) % 6 == 0};
                    rows += batch[t].want_logits;
                }
                ok(bml_session_eval(f, batch, pieces[i], fused, &err));
                ok(bml_session_eval(p, batch, pieces[i], plain, &err));
                assert_memory_equal(fused, plain, rows * 8192 * sizeof(float));
            }
            bml_session_free(f);
            bml_session_free(p);
        }
    model = models[0];
}

static void test_same_bits_beside_others(void **state)
{
    (void)state;
    enum { SLOTS = 8, N = 60 };
    int32_t ids[SLOTS][N];
    size_t lengths[SLOTS] = {60, 1, 17, 33, 2, 50, 8, 25}, done[SLOTS] = {0};
    float *wanted[SLOTS], *rows = calloc(SLOTS * N * 8192, sizeof *rows);
    for (size_t s = 0; s < SLOTS; s++) {
        random_ids(ids[s], N, s + 2);
        wanted[s] = alone((bml_session_options){.n_threads = 1}, ids[s], lengths[s], 0);
    }
    bml_session *session = session_with((bml_session_options){.n_slots = SLOTS, .n_ctx = N});
    /* Mixed batches: random runs of prompts and single steps, in random order of slots. */
    uint64_t seed = 3;
    for (size_t left = SLOTS; left;) {
        bml_batch_token batch[SLOTS * N];
        size_t n = 0, first[SLOTS], from[SLOTS];
        for (size_t s = 0; s < SLOTS; s++) {
            size_t slot = (s + test_random(&seed) % 3) % SLOTS, most = lengths[slot] - done[slot];
            bool repeated = false;
            for (size_t t = 0; t < n; t++)
                repeated |= batch[t].slot == (int32_t)slot;
            if (repeated || !most)
                continue;
            size_t run = 1 + test_random(&seed) % (test_random(&seed) % 2 ? most : 1);
            first[slot] = n;
            from[slot] = done[slot];
            for (size_t t = 0; t < run; t++)
                batch[n++] = (bml_batch_token){ids[slot][done[slot]++], (int32_t)slot, true};
            left -= done[slot] == lengths[slot];
        }
        ok(bml_session_eval(session, batch, n, rows, &err));
        for (size_t t = 0; t < n; t++) {
            size_t slot = (size_t)batch[t].slot, at = from[slot] + t - first[slot];
            assert_memory_equal(rows + t * 8192, wanted[slot] + at * 8192, 8192 * sizeof(float));
        }
    }
    for (size_t s = 0; s < SLOTS; s++) {
        assert_int_equal(bml_session_length(session, (int)s), lengths[s]);
        free(wanted[s]);
    }
    free(rows);
    bml_session_free(session);
}

/* The whole model without a cache, from the stateless kernels: the oracle for the cached path. */
static float *stateless(const int32_t *ids, int n)
{
    const bml_backend *b = model->backend;
    const bml_hf_config *c = &model->weights.config;
    int head_dim = c->n_embd / c->n_head;
    size_t x_bytes = (size_t)n * (size_t)c->n_embd * 4;
    int32_t position[64], zeros[64] = {0};
    for (int t = 0; t < n; t++)
        position[t] = t;
    bml_batch batch = {.n_tokens = n, .token = ids, .position = position, .slot = zeros};
    bml_queue *queue;
    ok(b->queue_new(model->device, 2, &queue, &err));
    bml_buffer x, y, z, qkv, q, k, v, hidden, logits;
    struct {
        bml_buffer *buffer;
        size_t bytes;
    } all[] = {{&x, x_bytes},
               {&y, x_bytes},
               {&z, x_bytes},
               {&qkv, 3 * x_bytes},
               {&q, x_bytes},
               {&k, x_bytes},
               {&v, x_bytes},
               {&hidden, 4 * x_bytes},
               {&logits, (size_t)n * (size_t)c->vocab_size * 4}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        ok(b->buffer_new(model->device, all[i].bytes, all[i].buffer, &err));
    ok(b->begin(queue, &batch, &err));
    b->embedding(queue, &x, &model->weights.wte, &model->weights.wpe);
    for (int l = 0; l < c->n_layer; l++) {
        bml_layer_weights *w = &model->weights.layers[l];
        b->layernorm(queue, &y, &x, &w->ln_1.weight.buffer, &w->ln_1.bias.buffer, n, c->n_embd,
                     c->layer_norm_epsilon, false);
        b->linear(queue, &qkv, &y, &w->c_attn.w, &w->c_attn.bias.buffer, n);
        b->qkv_split(queue, &q, &k, &v, &qkv, n, c->n_head, head_dim);
        b->attention(queue, &y, &q, &k, &v, n, c->n_head, head_dim, 1 / sqrtf((float)head_dim));
        b->heads_merge(queue, &z, &y, n, c->n_head, head_dim);
        b->linear(queue, &y, &z, &w->c_proj.w, &w->c_proj.bias.buffer, n);
        b->residual_add(queue, &x, &y, x_bytes / 4);
        b->layernorm(queue, &y, &x, &w->ln_2.weight.buffer, &w->ln_2.bias.buffer, n, c->n_embd,
                     c->layer_norm_epsilon, false);
        b->linear(queue, &hidden, &y, &w->c_fc.w, &w->c_fc.bias.buffer, n);
        b->gelu(queue, &hidden, x_bytes, c->activation);
        b->linear(queue, &y, &hidden, &w->mlp_c_proj.w, &w->mlp_c_proj.bias.buffer, n);
        b->residual_add(queue, &x, &y, x_bytes / 4);
    }
    b->layernorm(queue, &y, &x, &model->weights.ln_f.weight.buffer,
                 &model->weights.ln_f.bias.buffer, n, c->n_embd, c->layer_norm_epsilon, false);
    b->linear_transposed(queue, &logits, &y, &model->weights.lm_head.w,
                         &model->weights.lm_head.bias.buffer, n);
    ok(b->end(queue, &err));
    float *out = malloc(logits.bytes);
    ok(b->download(queue, out, &logits, logits.bytes, &err));
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        b->buffer_free(model->device, all[i].buffer);
    b->queue_free(queue);
    return out;
}

static void test_cache_equals_stateless(void **state)
{
    (void)state;
    enum { N = 40 };
    int32_t ids[N];
    random_ids(ids, N, 9);
    float *wanted = stateless(ids, N), *got = alone((bml_session_options){0}, ids, N, 7);
    for (size_t i = 0; i < N * 8192; i++)
        assert_true(fabsf(got[i] - wanted[i]) < 1e-4f);
    free(wanted);
    free(got);
}

static void test_truncate_goes_back(void **state)
{
    (void)state;
    int32_t ids[30];
    random_ids(ids, 30, 4);
    bml_session *s = session_with((bml_session_options){.n_slots = 2});
    float first[8192], again[8192];
    bml_batch_token batch[30];
    for (int i = 0; i < 30; i++)
        batch[i] = (bml_batch_token){ids[i], 1, i == 29};
    ok(bml_session_eval(s, batch, 30, first, &err));
    ok(bml_session_truncate(s, 1, 12, &err));
    assert_int_equal(bml_session_length(s, 1), 12);
    ok(bml_session_eval(s, batch + 12, 18, again, &err));
    assert_memory_equal(first, again, sizeof first);
    assert_int_equal(bml_session_truncate(s, 1, 31, &err), BML_ERR_ARGUMENT);
    assert_int_equal(bml_session_truncate(s, 2, 0, &err), BML_ERR_ARGUMENT);
    assert_int_equal(bml_session_truncate(s, 0, -1, &err), BML_ERR_ARGUMENT);
    bml_session_free(s);
}

static void test_argmax_equals_logits(void **state)
{
    (void)state;
    int32_t ids[20], next[20];
    random_ids(ids, 20, 5);
    float *logits = alone((bml_session_options){0}, ids, 20, 0);
    bml_session *s = session_with((bml_session_options){0});
    bml_batch_token batch[20];
    for (int i = 0; i < 20; i++)
        batch[i] = (bml_batch_token){ids[i], 0, true};
    ok(bml_session_eval_argmax(s, batch, 20, next, &err));
    for (size_t i = 0; i < 20; i++)
        for (size_t j = 0; j < 8192; j++)
            assert_true(logits[i * 8192 + j] <= logits[i * 8192 + (size_t)next[i]]);
    free(logits);
    bml_session_free(s);
}

/* Drawn in the session as bml_sample draws from its logits, each row with settings of its own. */
static void test_eval_sample(void **state)
{
    (void)state;
    enum { SLOTS = 5, STEPS = TEST_SANITIZED ? 3 : 12 };
    static float logits[SLOTS * 8192];
    bml_session *a = session_with((bml_session_options){.n_slots = SLOTS});
    bml_session *l = session_with((bml_session_options){.n_slots = SLOTS});
    bml_sampling sampling[SLOTS];
    bml_batch_token batch[SLOTS];
    for (int i = 0; i < SLOTS; i++) {
        sampling[i] = bml_sampling_default();
        sampling[i].seed = (uint64_t)i;
        sampling[i].temperature = 0.5f * (float)i; /* the first is greedy */
        sampling[i].top_k = i % 2 ? 40 : 0;
        sampling[i].top_p = i == 4 ? 0.9f : 1;
        batch[i] = (bml_batch_token){100 * i, i, i != 2};
    }
    for (uint64_t n = 0; n < STEPS; n++) {
        uint64_t step[SLOTS] = {n, n + 7, 3 * n, n, n};
        int32_t next[SLOTS], wanted;
        ok(bml_session_eval(l, batch, SLOTS, logits, &err));
        ok(bml_session_eval_sample(a, batch, SLOTS, sampling, step, next, &err));
        for (int i = 0, r = 0; i < SLOTS; i++) {
            if (!batch[i].want_logits)
                continue;
            ok(bml_sample(&sampling[r], logits + r * 8192, 8192, NULL, 0, step[r], &wanted, &err));
            assert_int_equal(next[r], wanted);
            batch[i].token = next[r++];
        }
        batch[2].want_logits = n % 2; /* settings are of rows, not of tokens */
    }
    uint64_t step[SLOTS] = {0};
    int32_t next[SLOTS];
    int length = bml_session_length(a, 0);
    sampling[1].repetition_penalty = 1.1f;
    assert_int_equal(bml_session_eval_sample(a, batch, SLOTS, sampling, step, next, &err),
                     BML_ERR_ARGUMENT);
    assert_non_null(strstr(err.message, "repetition_penalty"));
    sampling[1].repetition_penalty = 1;
    sampling[1].top_p = 2;
    assert_int_equal(bml_session_eval_sample(a, batch, SLOTS, sampling, step, next, &err),
                     BML_ERR_ARGUMENT);
    assert_int_equal(bml_session_eval_sample(a, batch, SLOTS, NULL, step, next, &err),
                     BML_ERR_ARGUMENT);
    sampling[1].top_p = 1;
    assert_int_equal(bml_session_eval_sample(a, batch, SLOTS, sampling, step, NULL, &err),
                     BML_ERR_ARGUMENT);
    assert_int_equal(bml_session_length(a, 0), length);
    bml_session_free(a);
    bml_session_free(l);
}

static void test_errors(void **state)
{
    (void)state;
    bml_session *s;
    static const struct {
        bml_session_options options;
        bml_status status;
        const char *named;
    } bad[] = {
        {{.n_ctx = 1025}, BML_ERR_CONTEXT, "1025"},
        {{.n_ctx = -1}, BML_ERR_ARGUMENT, "n_ctx"},
        {{.n_slots = -1}, BML_ERR_ARGUMENT, "n_slots"},
        {{.chunk = -1}, BML_ERR_ARGUMENT, "chunk"},
        {{.n_threads = -2}, BML_ERR_ARGUMENT, "threads"},
        {{.kv_dtype = BML_F64}, BML_ERR_ARGUMENT, "f32"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_int_equal(bml_session_new(model, &bad[i].options, &s, &err), bad[i].status);
        assert_non_null(strstr(err.message, bad[i].named));
    }
    s = session_with((bml_session_options){.n_ctx = 10});
    float logits[8192];
    bml_batch_token batch[11] = {{0, 0, true}};
    batch[3].token = 8192;
    assert_int_equal(bml_session_eval(s, batch, 4, logits, &err), BML_ERR_ARGUMENT);
    assert_non_null(strstr(err.message, "8192"));
    batch[3].token = -1;
    assert_int_equal(bml_session_eval(s, batch, 4, logits, &err), BML_ERR_ARGUMENT);
    batch[3] = (bml_batch_token){0, 1, false};
    assert_int_equal(bml_session_eval(s, batch, 4, logits, &err), BML_ERR_ARGUMENT);
    batch[3].slot = 0;
    assert_int_equal(bml_session_eval(s, batch, 4, NULL, &err), BML_ERR_ARGUMENT);
    assert_int_equal(bml_session_eval_argmax(s, batch, 4, NULL, &err), BML_ERR_ARGUMENT);
    assert_int_equal(bml_session_eval(s, batch, 11, logits, &err), BML_ERR_CONTEXT);
    assert_non_null(strstr(err.message, "11"));
    assert_non_null(strstr(err.message, "10"));
    assert_int_equal(bml_session_length(s, 0), 0);
    ok(bml_session_eval(s, batch, 0, NULL, &err));
    ok(bml_session_eval(s, batch, 10, logits, &err));
    assert_int_equal(bml_session_length(s, 0), 10);
    bml_session_free(s);
    bml_session_free(NULL);
    bml_model_free(NULL);
}

/* ---- generating -------------------------------------------------------------------------------*/

typedef struct collected {
    char text[20000];
    size_t length;
    int calls, most_calls;
} collected;

static bool collect(void *context, const char *text, size_t length)
{
    collected *c = context;
    assert_true(length > 0 && c->length + length < sizeof c->text);
    memcpy(c->text + c->length, text, length);
    c->length += length;
    c->text[c->length] = 0;
    return ++c->calls != c->most_calls;
}

static bml_generate_options greedy(int n, collected *c)
{
    bml_generate_options o = {.sampling = bml_sampling_default(),
                              .max_tokens = n,
                              .on_text = collect,
                              .context = c,
                              .ignore_eos = true};
    o.sampling.temperature = 0;
    *c = (collected){0};
    return o;
}

static const int32_t once[] = {2962, 651, 258, 545}; /* "Once upon a time" */

static void test_stop_strings(void **state)
{
    (void)state;
    bml_session *s = session_with((bml_session_options){0});
    bml_generation whole, cut;
    collected c;
    bml_generate_options o = greedy(60, &c);
    ok(bml_generate(s, 0, once, 4, &o, &whole, &err));
    assert_int_equal(whole.n_ids, 60);
    assert_string_equal(c.text, whole.text);
    assert_int_equal(whole.finish_reason, BML_FINISH_LENGTH);

    /* Every substring of 9 bytes straddles tokens somewhere: the text ends right before its first
     * occurrence, and nothing of it was streamed. */
    for (size_t at = 0; at + 9 <= whole.text_length; at += TEST_SANITIZED ? 40 : 5) {
        char stop[10] = {0};
        memcpy(stop, whole.text + at, 9);
        const char *stops[] = {"never in there", stop};
        o = greedy(60, &c);
        o.stop = stops;
        o.n_stop = 2;
        ok(bml_generate(s, 0, once, 4, &o, &cut, &err));
        assert_int_equal(cut.text_length, strstr(whole.text, stop) - whole.text);
        assert_memory_equal(cut.text, whole.text, cut.text_length);
        assert_string_equal(c.text, cut.text);
        assert_int_equal(cut.finish_reason, BML_FINISH_STOP);
        bml_generation_clear(&cut);
    }

    /* What only looked like the beginning of a stop string is flushed at the end. */
    char partial[40];
    snprintf(partial, sizeof partial, "%s!!!", whole.text + whole.text_length - 20);
    const char *stops[] = {partial};
    o = greedy(60, &c);
    o.stop = stops;
    o.n_stop = 1;
    ok(bml_generate(s, 0, once, 4, &o, &cut, &err));
    assert_string_equal(cut.text, whole.text);
    assert_string_equal(c.text, whole.text);
    assert_int_equal(cut.finish_reason, BML_FINISH_LENGTH);
    bml_generation_clear(&cut);
    bml_generation_clear(&whole);

    const char *empty[] = {""};
    o.stop = empty;
    assert_int_equal(bml_generate(s, 0, once, 4, &o, &cut, &err), BML_ERR_ARGUMENT);
    bml_session_free(s);
}

static void test_caller_stops(void **state)
{
    (void)state;
    bml_session *s = session_with((bml_session_options){0});
    bml_generation g;
    collected c;
    bml_generate_options o = greedy(60, &c);
    c.most_calls = 5;
    assert_int_equal(bml_generate(s, 0, once, 4, &o, &g, &err), BML_ERR_STOPPED);
    assert_int_equal(c.calls, 5);
    assert_true(g.n_ids >= 5 && g.n_ids < 60);
    assert_string_equal(g.text, c.text);
    bml_generation_clear(&g);
    bml_session_free(s);
}

static void test_context_end(void **state)
{
    (void)state;
    int32_t ids[1025];
    random_ids(ids, 1025, 8);
    bml_session *s = session_with((bml_session_options){0});
    bml_generation g;
    collected c;
    bml_generate_options o = greedy(50, &c);
    ok(bml_generate(s, 0, ids, 1024, &o, &g, &err));
    assert_int_equal(g.n_ids, 1);
    assert_int_equal(g.finish_reason, BML_FINISH_LENGTH);
    bml_generation_clear(&g);
    assert_int_equal(bml_generate(s, 0, ids, 1025, &o, &g, &err), BML_ERR_CONTEXT);
    assert_non_null(strstr(err.message, "1025"));
    assert_non_null(strstr(err.message, "1024"));
    o = greedy(-1, &c);
    ok(bml_generate(s, 0, ids, 1000, &o, &g, &err));
    assert_int_equal(g.n_ids, 25);
    bml_generation_clear(&g);
    o = greedy(0, &c);
    ok(bml_generate(s, 0, once, 4, &o, &g, &err));
    assert_int_equal(g.n_ids, 0);
    assert_string_equal(g.text, "");
    bml_generation_clear(&g);
    assert_int_equal(bml_generate(s, 0, once, 0, &o, &g, &err), BML_ERR_ARGUMENT);
    assert_int_equal(bml_generate(s, 1, once, 4, &o, &g, &err), BML_ERR_ARGUMENT);
    bml_session_free(s);
}

static void test_seeds(void **state)
{
    (void)state;
    bml_session *s = session_with((bml_session_options){.n_slots = 3});
    bml_generation first, again, other;
    bml_generate_options o = {.sampling = bml_sampling_default(), .max_tokens = 40};
    o.sampling.seed = 7;
    o.sampling.top_k = 40;
    ok(bml_generate(s, 0, once, 4, &o, &first, &err));
    ok(bml_generate(s, 2, once, 4, &o, &again, &err));
    assert_string_equal(first.text, again.text);
    o.sampling.seed = 8;
    ok(bml_generate(s, 0, once, 4, &o, &other, &err));
    assert_string_not_equal(first.text, other.text);
    bml_generation_clear(&first);
    bml_generation_clear(&again);
    bml_generation_clear(&other);
    o.sampling.top_p = 7;
    assert_int_equal(bml_generate(s, 0, once, 4, &o, &other, &err), BML_ERR_ARGUMENT);
    bml_session_free(s);
}

static void test_score_errors(void **state)
{
    (void)state;
    int32_t ids[] = {1, 2, 8192};
    bml_token_score scores[3];
    bml_session *s = session_with((bml_session_options){.n_ctx = 16});
    assert_int_equal(bml_score(s, ids, 3, 0, scores, NULL, NULL, &err), BML_ERR_ARGUMENT);
    assert_int_equal(bml_score(s, ids, 2, 17, scores, NULL, NULL, &err), BML_ERR_ARGUMENT);
    assert_int_equal(bml_score(s, ids, 2, -1, scores, NULL, NULL, &err), BML_ERR_ARGUMENT);
    ok(bml_score(s, ids, 0, 0, scores, NULL, NULL, &err));
    ok(bml_score(s, ids, 1, 0, scores, NULL, NULL, &err));
    assert_false(scores[0].scored);
    bml_session_free(s);
}

/* Windows of a small context: each token is scored from the right number of tokens before it. */
static void check_score_windows(void)
{
    enum { N = 50, CTX = 16 };
    int32_t ids[N];
    random_ids(ids, N, 10);
    for (int stride = 1; stride <= CTX; stride += 5) {
        bml_token_score scores[N];
        bml_session *s = session_with((bml_session_options){.n_ctx = CTX});
        ok(bml_score(s, ids, N, stride, scores, NULL, NULL, &err));
        bml_session_free(s);
        for (int i = 1; i < N; i++) {
            /* The first window whose end lies behind token i. */
            int window = 0;
            while (window + CTX <= i)
                window += stride;
            assert_int_equal(scores[i].scored, i > window);
            if (i == window)
                continue;
            float *logits = alone((bml_session_options){0}, ids + window, (size_t)(i - window), 0);
            const float *row = logits + (i - window - 1) * 8192;
            double sum = 0, entropy = 0;
            int rank = 1;
            for (int j = 0; j < 8192; j++)
                sum += exp(row[j]);
            for (int j = 0; j < 8192; j++) {
                entropy -= exp(row[j]) / sum * (row[j] - log(sum));
                rank += row[j] > row[ids[i]];
            }
            assert_true(fabs(scores[i].logprob - (row[ids[i]] - log(sum))) < 1e-5);
            assert_true(fabs(scores[i].entropy - entropy) < 1e-5);
            assert_int_equal(scores[i].rank, rank);
            free(logits);
        }
    }
}

static void test_score_windows(void **state)
{
    (void)state;
    const bml_backend *own = model->backend;
    check_score_windows();
    bml_backend plain = *own; /* one that leaves the scoring of rows to the engine */
    plain.score = NULL;
    model->backend = &plain;
    check_score_windows();
    model->backend = own;
}

static int load(void **state)
{
    (void)state;
    for (int format = 0; format <= BML_WEIGHTS_Q4; format++) {
        bml_model_options options = {BML_BACKEND_CPU, (bml_weight_format)format};
        if (bml_model_load(NULL, &options, &models[format], &err))
            return 1;
    }
    model = models[0];
    return 0;
}

static int unload(void **state)
{
    (void)state;
    for (int format = 0; format <= BML_WEIGHTS_Q4; format++)
        bml_model_free(models[format]);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_bits),
        cmocka_unit_test(test_fused_equals_kernels),
        cmocka_unit_test(test_same_bits_for_few_rows),
        cmocka_unit_test(test_same_bits_beside_others),
        cmocka_unit_test(test_cache_equals_stateless),
        cmocka_unit_test(test_truncate_goes_back),
        cmocka_unit_test(test_argmax_equals_logits),
        cmocka_unit_test(test_eval_sample),
        cmocka_unit_test(test_errors),
        cmocka_unit_test(test_stop_strings),
        cmocka_unit_test(test_caller_stops),
        cmocka_unit_test(test_context_end),
        cmocka_unit_test(test_seeds),
        cmocka_unit_test(test_score_errors),
        cmocka_unit_test(test_score_windows),
    };
    return cmocka_run_group_tests(tests, load, unload);
}
