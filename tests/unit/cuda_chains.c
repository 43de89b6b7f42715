/* Steps that are enqueued ahead (chain.h), greedy ones and such that draw, against single ones. */
#include "cuda_tests.h"

#include <limits.h>
#include <pthread.h>

/* Sequences that go on in two sessions: one enqueues steps ahead, the other never does. */
typedef struct chain {
    bml_session *ahead, *single;
    bml_batch_token batch[300]; /* the next step */
    size_t n;
    bool draws; /* or else it is greedy */
    bml_sampling sampling[300];
    uint64_t step;
} chain;

/* What S chooses as the next tokens. */
static bml_status choose(chain *c, bml_session *s, int32_t *ids)
{
    uint64_t step[300];
    if (!c->draws)
        return bml_session_eval_argmax(s, c->batch, c->n, ids, &failure);
    for (size_t i = 0; i < c->n; i++)
        step[i] = c->step + 3 * i;
    return bml_session_eval_sample(s, c->batch, c->n, c->sampling, step, ids, &failure);
}

static void chain_start(chain *c, const bml_model *model, bml_session_options options, int n,
                        bool draws)
{
    *c = (chain){.draws = draws};
    for (int i = 0; i < 300; i++) {
        c->sampling[i] = bml_sampling_default();
        c->sampling[i].seed = (uint64_t)i;
        c->sampling[i].top_k = i % 3 ? 40 : 0;
        c->sampling[i].top_p = i % 2 ? 0.9f : 1;
    }
    c->ahead = session_on(model, options);
    c->single = session_on(model, options);
    c->single->queue->chain.patience = INT_MAX;
    c->n = (size_t)n;
    for (int i = 0; i < n; i++) {
        bml_batch_token prompt[7];
        for (int t = 0; t < 7; t++)
            prompt[t] = (bml_batch_token){(31 * i + 7 * t) % VOCAB, i, false};
        ok(bml_session_eval(c->ahead, prompt, 1 + (size_t)i % 7, NULL, &failure));
        ok(bml_session_eval(c->single, prompt, 1 + (size_t)i % 7, NULL, &failure));
        c->batch[i] = (bml_batch_token){i, i, true};
    }
}

static void chain_steps(chain *c, int n_steps)
{
    int32_t got[300], wanted[300];
    for (int step = 0; step < n_steps; step++) {
        ok(choose(c, c->ahead, got));
        ok(choose(c, c->single, wanted));
        c->step++;
        assert_memory_equal(got, wanted, c->n * sizeof *got);
        assert_false(c->single->queue->chain.ahead);
        for (size_t i = 0; i < c->n; i++)
            c->batch[i].token = got[i];
    }
}

/* The same step with its logits, to the bit: what a slot holds, every key and value decides. */
static void chain_logits(chain *c)
{
    static float got[300 * VOCAB], wanted[300 * VOCAB];
    ok(bml_session_eval(c->ahead, c->batch, c->n, got, &failure));
    ok(bml_session_eval(c->single, c->batch, c->n, wanted, &failure));
    assert_memory_equal(got, wanted, c->n * VOCAB * sizeof *got);
}

static void chain_truncate(chain *c, int slot, int by)
{
    int length = bml_session_length(c->ahead, slot);
    length = length > by ? length - by : 0;
    ok(bml_session_truncate(c->ahead, slot, length, &failure));
    ok(bml_session_truncate(c->single, slot, length, &failure));
}

static void chain_end(chain *c)
{
    chain_logits(c);
    bml_session_free(c->ahead);
    bml_session_free(c->single);
}

/* What can come between two steps. */
typedef enum interruption {
    NOTHING,
    CUT_BACK,
    OTHER_TOKEN,
    OTHER_ORDER,
    OTHER_SLOTS,
    FEWER,
    MORE,
    LOGITS,
    OTHER_VOCABULARY,
    OTHER_STEP,
    OTHER_SETTINGS,
    OTHER_KIND,
    SINGLE_KERNELS,
    LONG_PROMPT,
    NOT_FINITE,
    N_INTERRUPTIONS
} interruption;

static void interrupt(chain *c, interruption what)
{
    bml_model *model = (bml_model *)c->ahead->model;
    int n_tokens = model->info.n_tokens;
    size_t n = c->n;
    switch (what) {
    case CUT_BACK:
        chain_truncate(c, 0, 3);
        break;
    case OTHER_TOKEN:
        c->batch[n - 1].token = (c->batch[n - 1].token + 1) % VOCAB;
        break;
    case OTHER_ORDER:
        for (size_t i = 0; i < n / 2; i++) {
            bml_batch_token first = c->batch[i];
            c->batch[i] = c->batch[n - 1 - i];
            c->batch[n - 1 - i] = first;
        }
        break;
    case OTHER_SLOTS: /* of the same lengths */
        if (n > 7) {
            c->batch[0].slot = 7;
            c->batch[7].slot = 0;
        }
        break;
    case FEWER:
        c->n = (n + 1) / 2;
        chain_steps(c, 3);
        c->n = n;
        break;
    case MORE:
        c->batch[n] = c->batch[0];
        c->batch[n].slot = (int32_t)n;
        c->n = n + 1;
        chain_steps(c, 3);
        c->n = n;
        break;
    case LOGITS:
        chain_logits(c);
        break;
    case OTHER_VOCABULARY:
        model->info.n_tokens = 1000;
        chain_steps(c, 4);
        model->info.n_tokens = n_tokens;
        break;
    case OTHER_STEP:
        c->step += 5;
        break;
    case OTHER_SETTINGS:
        c->sampling[n - 1].temperature = 0.5f;
        break;
    case OTHER_KIND:
        c->draws = !c->draws;
        chain_steps(c, 4);
        c->draws = !c->draws;
        break;
    case SINGLE_KERNELS:
        c->ahead->kernel_by_kernel = c->single->kernel_by_kernel = true;
        chain_steps(c, 2);
        c->ahead->kernel_by_kernel = c->single->kernel_by_kernel = false;
        break;
    case LONG_PROMPT: { /* the batch's arrays and the scratch memory grow */
        bml_batch_token prompt[400] = {{0}};
        for (int i = 0; i < 400; i++)
            prompt[i] = (bml_batch_token){i, (int32_t)n, i == 399};
        int32_t got, wanted;
        ok(bml_session_eval_argmax(c->ahead, prompt, 400, &got, &failure));
        ok(bml_session_eval_argmax(c->single, prompt, 400, &wanted, &failure));
        assert_int_equal(got, wanted);
        break;
    }
    case NOT_FINITE: { /* in the first value of slot 0; the step on its way may not see it */
        const unsigned char nan[] = {0xff, 0xff, 0xff, 0xff};
        bml_session *s = c->ahead;
        int32_t next[300];
        ok(s->model->backend->upload(s->queue, &s->cache.v[0], nan, sizeof nan, &failure));
        bml_status status = BML_OK;
        for (int step = 0; step < 3 && !status; step++) {
            status = choose(c, s, next);
            for (size_t i = 0; i < n && !status; i++)
                c->batch[i].token = next[i];
        }
        assert_int_equal(status, BML_ERR_NUMERIC);
        for (size_t i = 0; i < n; i++) {
            chain_truncate(c, (int)i, INT_MAX);
            c->batch[i].token = (int32_t)i;
        }
        break;
    }
    default:
        break;
    }
}

/* Steps enqueued ahead against single ones, to the bit, whatever comes between. */
void test_chains(void **state)
{
    (void)state;
    if (few_tests) /* the same kernels in another order, as in the next ones */
        skip();
    static const struct {
        bml_weight_format format;
        bml_dtype kv;
        int n;
        bool draws;
    } cases[] = {{BML_WEIGHTS_BF16, BML_BF16, 1, false}, {BML_WEIGHTS_BF16, BML_BF16, 9, false},
                 {BML_WEIGHTS_F32, BML_F32, 1, false},   {BML_WEIGHTS_Q4, BML_F16, 1, false},
                 {BML_WEIGHTS_F16, BML_F16, 2, false},   {BML_WEIGHTS_BF16, BML_BF16, 64, false},
                 {BML_WEIGHTS_F16, BML_F16, 256, false}, {BML_WEIGHTS_BF16, BML_BF16, 8, false},
                 {BML_WEIGHTS_Q8, BML_BF16, 3, false},   {BML_WEIGHTS_BF16, BML_BF16, 1, true},
                 {BML_WEIGHTS_F16, BML_F16, 7, true},    {BML_WEIGHTS_Q8, BML_F16, 1, true},
                 {BML_WEIGHTS_BF16, BML_BF16, 40, true}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int what = 0; what < N_INTERRUPTIONS; what++) {
            chain c;
            chain_start(&c, cuda(cases[i].format),
                        (bml_session_options){.n_slots = cases[i].n + 1, .kv_dtype = cases[i].kv},
                        cases[i].n, cases[i].draws);
            bool goes_ahead = !cases[i].draws || cases[i].n <= 8;
            chain_steps(&c, 6);
            assert_int_equal(c.ahead->queue->chain.ahead, goes_ahead);
            interrupt(&c, (interruption)what);
            chain_steps(&c, 6);
            assert_int_equal(c.ahead->queue->chain.ahead, goes_ahead);
            chain_end(&c);
        }
}

/* Chains up to the last position, of sessions in turn, and of one that is freed on its way. */
void test_chain_ends(void **state)
{
    (void)state;
    if (few_tests)
        skip();
    for (int n = 1; n <= 9; n += 8) {
        chain a, b;
        bml_session_options options = {.n_slots = n, .kv_dtype = BML_BF16, .n_ctx = 24};
        chain_start(&a, cuda(BML_WEIGHTS_BF16), options, n, false);
        chain_start(&b, cuda(BML_WEIGHTS_BF16), options, n, false);
        for (int step = 0; step < 8; step++) {
            chain_steps(&a, 1);
            chain_steps(&b, 1 + step % 2);
        }
        assert_true(a.ahead->queue->chain.ahead && b.ahead->queue->chain.ahead);
        bml_session_free(b.ahead);
        bml_session_free(b.single);
        int longest = 0;
        for (int slot = 0; slot < n; slot++) {
            int length = bml_session_length(a.ahead, slot);
            longest = length > longest ? length : longest;
        }
        chain_steps(&a, 24 - longest);
        assert_false(a.ahead->queue->chain.ahead); /* there is no room for another step */
        for (int slot = 0; slot < n; slot++)
            chain_truncate(&a, slot, 10);
        chain_steps(&a, 5);
        chain_end(&a);
    }
}

typedef struct greedy_thread {
    bml_session *session;
    int n, steps;
    bool
        prompts; /* now and then one, of lengths whose passes are made graphs, and soon forgotten */
    int32_t ids[9]; /* the last step's */
    bml_status status;
} greedy_thread;

/* A prompt in the slot behind those of the chain. */
static bml_status eval_prompt(greedy_thread *t, size_t n, bml_error *error)
{
    bml_batch_token prompt[30];
    for (size_t i = 0; i < n; i++)
        prompt[i] = (bml_batch_token){(int32_t)(7 * i), t->n, false};
    bml_status status = bml_session_truncate(t->session, t->n, 0, error);
    return status ? status : bml_session_eval(t->session, prompt, n, NULL, error);
}

static void *run_greedy(void *argument)
{
    greedy_thread *t = argument;
    bml_batch_token batch[9];
    bml_error error;
    for (int i = 0; i < t->n; i++)
        batch[i] = (bml_batch_token){100 + i, i, true};
    for (int step = 0; step < t->steps && !t->status; step++) {
        t->status = bml_session_eval_argmax(t->session, batch, (size_t)t->n, t->ids, &error);
        for (int i = 0; i < t->n; i++)
            batch[i].token = t->ids[i];
        if (t->prompts && step % 2 && !t->status)
            t->status = eval_prompt(t, 10 + (size_t)(step / 4 % 20), &error);
    }
    return NULL;
}

/* Chains of two sessions at the same time against each alone. */
static void expect_chains(int n_first, int n_second, bool prompts)
{
    greedy_thread all[4] = {{0}};
    pthread_t threads[2];
    for (int i = 0; i < 4; i++) {
        int n = i % 2 ? n_second : n_first;
        all[i] = (greedy_thread){.n = n, .steps = 300, .prompts = prompts && i % 2 == 0};
        all[i].session = session_on(cuda(BML_WEIGHTS_BF16),
                                    (bml_session_options){.n_slots = n + 1, .kv_dtype = BML_BF16});
    }
    for (int i = 0; i < 2; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, run_greedy, &all[i]), 0);
    for (int i = 0; i < 2; i++)
        pthread_join(threads[i], NULL);
    for (int i = 2; i < 4; i++)
        run_greedy(&all[i]);
    for (int i = 0; i < 4; i++) {
        assert_int_equal(all[i].status, BML_OK);
        assert_memory_equal(all[i].ids, all[i % 2].ids, sizeof all[i].ids);
        bml_session_free(all[i].session);
    }
}

void test_chains_in_threads(void **state)
{
    (void)state;
    if (few_tests)
        skip();
    expect_chains(1, 9, false);
    expect_chains(1, 1, false);
    expect_chains(8, 1, true);
}

/* Whoever changes the batch every other step soon has no step enqueued in vain. */
void test_patience(void **state)
{
    (void)state;
    if (few_tests)
        skip();
    chain c;
    int in_vain = 0;
    chain_start(&c, cuda(BML_WEIGHTS_BF16), (bml_session_options){0}, 1, false);
    for (int i = 0; i < 30; i++) {
        chain_steps(&c, 3);
        in_vain += c.ahead->queue->chain.ahead;
        interrupt(&c, OTHER_TOKEN);
    }
    assert_in_range(in_vain, 1, 2);
    chain_steps(&c, 100); /* and who goes on for long has one again */
    assert_true(c.ahead->queue->chain.ahead);
    interrupt(&c, OTHER_TOKEN);
    chain_steps(&c, 2);
    assert_true(c.ahead->queue->chain.ahead);
    chain_end(&c);
}
