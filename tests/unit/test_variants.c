/*
 * Every way a checkpoint may look, against transformers: each directory under data/variants holds
 * a tiny model, the logits of a prompt and a greedy continuation
 * (tools/reference/make_variants.py).
 */
#include "variants.h"

static void test_info(void **state)
{
    const variant *v = *state;
    loaded l = variant_load(v, BML_BACKEND_CPU);
    assert_int_equal(l.info->n_tokens, (int)golden_number(l.golden, "n_tokens"));
    assert_true(l.info->n_tokens <= l.info->vocab_size);
    assert_true(l.info->n_params > 0);
    assert_true(l.info->file_bytes > 0);
    assert_non_null(l.info->weight_format);

    const json_t *text = json_object_get(l.golden, "prompt_text");
    if (text) {
        bml_error err;
        const bml_tokenizer *tokenizer = bml_model_get_tokenizer(l.model);
        assert_non_null(tokenizer);
        int32_t *ids;
        size_t n;
        expect_ok(bml_tokenize(tokenizer, json_string_value(text), json_string_length(text), false,
                               &ids, &n, &err),
                  &err);
        expect_ids("prompt", ids, n, l.prompt, l.n_prompt);
        bml_free(ids);
    }
    variant_free(&l);
}

/* The whole prompt at once against transformers; then other cuts of it against the same bits. */
static void test_logits(void **state)
{
    const variant *v = *state;
    loaded l = variant_load(v, BML_BACKEND_CPU);
    bml_error err;
    size_t vocab = (size_t)l.info->vocab_size;
    float *whole = malloc(l.n_logits * sizeof *whole);
    float *other = malloc(l.n_logits * sizeof *other);
    assert_non_null(whole);
    assert_non_null(other);

    bml_session *session;
    expect_ok(bml_session_new(l.model, NULL, &session, &err), &err);
    eval_all(session, 0, l.prompt, l.n_prompt, whole);
    assert_int_equal(bml_session_length(session, 0), (int)l.n_prompt);
    bml_session_free(session);
    expect_logits("whole prompt", whole, l.logits, l.n_logits);

    static const size_t pieces[] = {1, 7, 10};
    for (size_t p = 0; p < sizeof pieces / sizeof *pieces; p++) {
        /* PIECE tokens a call, and chunks that do not divide it. */
        bml_session_options options = {.n_threads = (int)p + 1, .chunk = (int)(2 * p)};
        expect_ok(bml_session_new(l.model, &options, &session, &err), &err);
        memset(other, 0xff, l.n_logits * sizeof *other);
        for (size_t i = 0; i < l.n_prompt; i += pieces[p]) {
            size_t n = l.n_prompt - i < pieces[p] ? l.n_prompt - i : pieces[p];
            eval_all(session, 0, l.prompt + i, n, other + i * vocab);
        }
        bml_session_free(session);
        if (memcmp(whole, other, l.n_logits * sizeof *other) != 0)
            fail_msg("in pieces of %zu the logits have other bits", pieces[p]);
    }

    /* Of the whole prompt the last token's alone. */
    bml_batch_token *batch = calloc(l.n_prompt, sizeof *batch);
    assert_non_null(batch);
    for (size_t i = 0; i < l.n_prompt; i++)
        batch[i] = (bml_batch_token){l.prompt[i], 0, i + 1 == l.n_prompt};
    expect_ok(bml_session_new(l.model, NULL, &session, &err), &err);
    expect_ok(bml_session_eval(session, batch, l.n_prompt, other, &err), &err);
    assert_memory_equal(other, whole + (l.n_prompt - 1) * vocab, vocab * sizeof *other);
    bml_session_free(session);
    free(batch);
    free(whole);
    free(other);
    variant_free(&l);
}

/* The same continuation by bml_generate, and step by step with the device's argmax; also with more
 * threads than such a small model has work for. */
static void greedy_with(const loaded *l, int n_threads)
{
    bml_error err;
    bml_session *session;
    bml_session_options options = {.n_threads = n_threads};
    expect_ok(bml_session_new(l->model, &options, &session, &err), &err);
    expect_greedy("bml_generate", session, l->prompt, l->n_prompt, l->greedy, l->n_greedy);

    expect_ok(bml_session_truncate(session, 0, 0, &err), &err);
    bml_batch_token *batch = calloc(l->n_prompt, sizeof *batch);
    assert_non_null(batch);
    for (size_t i = 0; i < l->n_prompt; i++)
        batch[i].token = l->prompt[i];
    batch[l->n_prompt - 1].want_logits = true;
    size_t n = l->n_prompt;
    for (size_t i = 0; i < l->n_greedy; i++) {
        int32_t next = -1;
        expect_ok(bml_session_eval_argmax(session, batch, n, &next, &err), &err);
        expect_ids("bml_session_eval_argmax", &next, 1, &l->greedy[i], 1);
        batch[0] = (bml_batch_token){.token = next, .want_logits = true};
        n = 1;
    }
    free(batch);
    bml_session_free(session);
}

static void test_greedy(void **state)
{
    static const int n_threads[] = {0, 3, 7, 16};
    loaded l = variant_load(*state, BML_BACKEND_CPU);
    for (size_t i = 0; i < sizeof n_threads / sizeof *n_threads; i++)
        greedy_with(&l, n_threads[i]);
    variant_free(&l);
}

/* Where the continuation holds the end-of-text token, generation ends before it. */
static void test_stops(void **state)
{
    const variant *v = *state;
    loaded l = variant_load(v, BML_BACKEND_CPU);
    bml_error err;
    if (!json_object_get(l.golden, "stops_at")) {
        variant_free(&l);
        return;
    }
    size_t stops_at = (size_t)golden_number(l.golden, "stops_at");
    assert_true(stops_at < l.n_greedy);
    assert_int_equal(l.info->eos_token_id, l.greedy[stops_at]);

    bml_session *session;
    expect_ok(bml_session_new(l.model, NULL, &session, &err), &err);
    bml_generate_options options = {.sampling = bml_sampling_default()};
    options.sampling.temperature = 0;
    options.max_tokens = (int)l.n_greedy;
    bml_generation out;
    expect_ok(bml_generate(session, 0, l.prompt, l.n_prompt, &options, &out, &err), &err);
    expect_ids("until the end of text", out.ids, out.n_ids, l.greedy, stops_at);
    assert_int_equal(out.finish_reason, BML_FINISH_STOP);
    bml_generation_clear(&out);
    bml_session_free(session);
    variant_free(&l);
}

int main(void)
{
    static const struct {
        const char *name;
        CMUnitTestFunction function;
    } kinds[] = {{"info", test_info},
                 {"logits", test_logits},
                 {"greedy", test_greedy},
                 {"stops", test_stops}};
    enum { KINDS = sizeof kinds / sizeof *kinds };
    static variant variants[MAX_VARIANTS];
    static struct CMUnitTest tests[MAX_VARIANTS * KINDS];
    static char names[MAX_VARIANTS * KINDS][80];

    size_t n = find_variants(variants);
    if (n < MIN_VARIANTS) {
        fprintf(stderr, "%zu variants in %s, there should be %d or more\n", n,
                TEST_DATA "/variants", MIN_VARIANTS);
        return 1;
    }
    for (size_t i = 0; i < n * KINDS; i++) {
        snprintf(names[i], sizeof names[i], "%s: %s", variants[i / KINDS].name,
                 kinds[i % KINDS].name);
        tests[i] = (struct CMUnitTest){.name = names[i],
                                       .test_func = kinds[i % KINDS].function,
                                       .initial_state = &variants[i / KINDS]};
    }
    return _cmocka_run_group_tests("variants", tests, n * KINDS, NULL, NULL);
}
