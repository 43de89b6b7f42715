/*
 * The built-in model against transformers: models/storyteller/reference.json, and the perplexity of
 * the held-out text (tools/reference/make_perplexity.py).
 */
#include "golden.h"

#define MODEL PROJECT_SOURCE "/models/storyteller"
#define VALID SHARED_DIR "/corpus/valid.txt.xz"

static bml_model *model;
static json_t *cases;

static int setup(void **state)
{
    (void)state;
    bml_error err;
    if (bml_model_load(MODEL, &on_cpu, &model, &err) != BML_OK) {
        fprintf(stderr, "%s\n", err.message);
        return -1;
    }
    json_t *reference = json_load_file(MODEL "/reference.json", 0, NULL);
    cases = json_incref(json_object_get(reference, "cases"));
    json_decref(reference);
    return json_array_size(cases) == 4 ? 0 : -1;
}

static int teardown(void **state)
{
    (void)state;
    json_decref(cases);
    bml_model_free(model);
    return 0;
}

static bml_session *session_new(void)
{
    bml_error err;
    bml_session *session;
    expect_ok(bml_session_new(model, NULL, &session, &err), &err);
    return session;
}

static void test_built_in(void **state)
{
    (void)state;
    const bml_model_info *info = bml_model_get_info(model);
    assert_int_equal(info->n_layer, 8);
    assert_int_equal(info->n_head, 6);
    assert_int_equal(info->n_embd, 384);
    assert_int_equal(info->n_inner, 1536);
    assert_int_equal(info->n_positions, 1024);
    assert_int_equal(info->vocab_size, 8192);
    assert_int_equal(info->n_tokens, 8192);
    assert_int_equal(info->eos_token_id, 8191);
    assert_string_equal(info->weight_format, "bf16");
}

static void test_prompt_ids(void **state)
{
    (void)state;
    bml_error err;
    for (size_t c = 0; c < json_array_size(cases); c++) {
        const json_t *one = json_array_get(cases, c);
        const json_t *prompt = golden_member(one, "prompt");
        size_t n_want, n;
        int32_t *want = golden_ids(one, "ids", &n_want), *ids;
        expect_ok(bml_tokenize(bml_model_get_tokenizer(model), json_string_value(prompt),
                               json_string_length(prompt), false, &ids, &n, &err),
                  &err);
        expect_ids(json_string_value(prompt), ids, n, want, n_want);
        bml_free(ids);
        free(want);
    }
}

static void test_top10(void **state)
{
    (void)state;
    bml_session *session = session_new();
    size_t vocab = (size_t)bml_model_get_info(model)->vocab_size;
    for (size_t c = 0; c < json_array_size(cases); c++) {
        const json_t *one = json_array_get(cases, c);
        size_t n, n_top;
        int32_t *ids = golden_ids(one, "ids", &n), *top = golden_ids(one, "top10_ids", &n_top);
        const json_t *want = golden_member(one, "top10_logits");
        assert_int_equal(n_top, 10);

        float *logits = malloc(n * vocab * sizeof *logits);
        assert_non_null(logits);
        bml_error err;
        expect_ok(bml_session_truncate(session, 0, 0, &err), &err);
        eval_all(session, 0, ids, n, logits);
        float *last = logits + (n - 1) * vocab;
        for (size_t i = 0; i < n_top; i++) {
            size_t best = 0;
            for (size_t j = 1; j < vocab; j++)
                if (last[j] > last[best])
                    best = j;
            double logit = json_number_value(json_array_get(want, i));
            if ((int32_t)best != top[i] || !(fabs((double)last[best] - logit) <= 1e-4))
                fail_msg("prompt %zu, place %zu: id %zu with %.6f, should be %d with %.6f", c, i,
                         best, (double)last[best], (int)top[i], logit);
            last[best] = -INFINITY;
        }
        free(logits);
        free(ids);
        free(top);
    }
    bml_session_free(session);
}

static void test_token_logprobs(void **state)
{
    (void)state;
    bml_session *session = session_new();
    for (size_t c = 0; c < json_array_size(cases); c++) {
        const json_t *one = json_array_get(cases, c);
        const json_t *want = golden_member(one, "token_logprobs");
        size_t n;
        int32_t *ids = golden_ids(one, "ids", &n);
        assert_int_equal(json_array_size(want), n);
        bml_token_score *scores = calloc(n, sizeof *scores);
        assert_non_null(scores);
        bml_error err;
        expect_ok(bml_score(session, ids, n, 0, scores, NULL, NULL, &err), &err);
        assert_false(scores[0].scored);
        for (size_t i = 1; i < n; i++) {
            double logprob = json_number_value(json_array_get(want, i));
            assert_true(scores[i].scored);
            assert_true(scores[i].rank >= 1);
            assert_true(scores[i].entropy > 0);
            if (!(fabs(scores[i].logprob - logprob) <= 1e-4))
                fail_msg("prompt %zu, token %zu: %.6f, should be %.6f", c, i, scores[i].logprob,
                         logprob);
        }
        free(scores);
        free(ids);
    }
    bml_session_free(session);
}

static void test_greedy(void **state)
{
    (void)state;
    bml_session *session = session_new();
    for (size_t c = 0; c < json_array_size(cases); c++) {
        const json_t *one = json_array_get(cases, c);
        size_t n, n_greedy;
        int32_t *ids = golden_ids(one, "ids", &n), *greedy = golden_ids(one, "greedy", &n_greedy);
        assert_int_equal(n_greedy, 200);
        expect_greedy(json_string_value(golden_member(one, "prompt")), session, ids, n, greedy,
                      n_greedy);
        free(ids);
        free(greedy);
    }
    bml_session_free(session);
}

/* The held-out text; released by free. */
static char *read_valid(size_t *length)
{
    size_t capacity = 4 << 20;
    char *text = malloc(capacity);
    assert_non_null(text);
    FILE *pipe = popen("xz -dc '" VALID "'", "r");
    assert_non_null(pipe);
    *length = fread(text, 1, capacity, pipe);
    assert_int_equal(pclose(pipe), 0);
    return text;
}

/* The ids of the held-out text, checked for number; freed by bml_free. */
static int32_t *valid_ids(const json_t *golden, bool special, size_t *n)
{
    require_shared(VALID);
    bml_error err;
    size_t length;
    char *text = read_valid(&length);
    assert_int_equal(length, (size_t)golden_number(golden, "text_bytes"));
    int32_t *ids;
    expect_ok(bml_tokenize(bml_model_get_tokenizer(model), text, length, special, &ids, n, &err),
              &err);
    free(text);
    const json_t *parse = golden_member(golden, special ? "special" : "plain");
    assert_int_equal(*n, (size_t)golden_number(parse, "tokens"));
    return ids;
}

/* Scores the first N ids under the first MOST strides in GOLDENS ("full" or "first"). */
static void expect_perplexities(const int32_t *ids, size_t n, const json_t *goldens, size_t most)
{
    bml_error err;
    bml_session *session = session_new();
    assert_true(json_array_size(goldens) >= 2);
    bml_token_score *scores = calloc(n, sizeof *scores);
    assert_non_null(scores);
    for (size_t g = 0; g < json_array_size(goldens) && g < most; g++) {
        const json_t *golden = json_array_get(goldens, g);
        int stride = (int)golden_number(golden, "stride");
        const json_t *want = golden_member(golden, "hugging_face");
        expect_ok(bml_score(session, ids, n, stride, scores, NULL, NULL, &err), &err);
        size_t scored = 0;
        double nll = 0;
        for (size_t i = 0; i < n; i++) {
            if (!scores[i].scored)
                continue;
            scored++;
            nll -= scores[i].logprob;
        }
        assert_int_equal(scored, (size_t)golden_number(want, "scored"));
        double perplexity = exp(nll / (double)scored);
        double right = golden_number(want, "perplexity");
        if (!(fabs(perplexity / right - 1) <= 1e-5))
            fail_msg("stride %d: perplexity %.8f, should be %.8f", stride, perplexity, right);
    }
    free(scores);
    bml_session_free(session);
}

static void expect_valid(bool special, bool whole, size_t most)
{
    json_t *golden = golden_json(TEST_DATA "/storyteller_perplexity.json");
    size_t n;
    int32_t *ids = valid_ids(golden, special, &n);
    const json_t *parse = golden_member(golden, special ? "special" : "plain");
    size_t first = (size_t)golden_number(golden, "prefix");
    expect_perplexities(ids, whole ? n : first, golden_member(parse, whole ? "full" : "first"),
                        most);
    bml_free(ids);
    json_decref(golden);
}

static void test_perplexity_of_the_beginning(void **state)
{
    (void)state;
    expect_valid(false, false, TEST_SANITIZED ? 1 : 2);
}

static void test_special_tokens_in_text(void **state)
{
    (void)state;
    json_t *golden = golden_json(TEST_DATA "/storyteller_perplexity.json");
    size_t n, ends = 0;
    int32_t *ids = valid_ids(golden, true, &n);
    for (size_t i = 0; i < n; i++)
        ends += ids[i] == 8191;
    assert_int_equal(ends, 99);
    bml_free(ids);
    json_decref(golden);
}

static void test_perplexity_of_the_whole(void **state)
{
    (void)state;
    expect_valid(false, true, 2);
    expect_valid(true, true, 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_built_in),
        cmocka_unit_test(test_prompt_ids),
        cmocka_unit_test(test_top10),
        cmocka_unit_test(test_token_logprobs),
        cmocka_unit_test(test_greedy),
        cmocka_unit_test(test_special_tokens_in_text),
        cmocka_unit_test(test_perplexity_of_the_beginning),
    };
    const struct CMUnitTest slow_tests[] = {
        cmocka_unit_test(test_perplexity_of_the_whole), /* minutes */
    };
    int failed = cmocka_run_group_tests(tests, setup, teardown);
    if (getenv("BML_SLOW_TESTS"))
        failed += cmocka_run_group_tests(slow_tests, setup, teardown);
    return failed;
}
