/*
 * Every way a checkpoint may look, against transformers: each directory under data/variants holds
 * a tiny model, the logits of a prompt and a greedy continuation
 * (tools/reference/make_variants.py).
 */
#include "golden.h"

#include <dirent.h>

enum { MAX_VARIANTS = 256, MIN_VARIANTS = 40 };

typedef struct variant {
    char name[64];
    char directory[1024];
} variant;

/* What one directory says, and the model in it. */
typedef struct loaded {
    bml_model *model;
    const bml_model_info *info;
    json_t *golden;
    int32_t *prompt, *greedy;
    size_t n_prompt, n_greedy;
    float *logits; /* [n_prompt, vocab_size] */
    size_t n_logits;
} loaded;

static loaded variant_load(const variant *v)
{
    loaded l = {0};
    bml_error err;
    char path[1100];

    snprintf(path, sizeof path, "%s/golden.json", v->directory);
    l.golden = golden_json(path);
    l.prompt = golden_ids(l.golden, "prompt_ids", &l.n_prompt);
    l.greedy = golden_ids(l.golden, "greedy", &l.n_greedy);

    expect_ok(bml_model_load(v->directory, &on_cpu, &l.model, &err), &err);
    l.info = bml_model_get_info(l.model);
    l.n_logits = l.n_prompt * (size_t)l.info->vocab_size;
    l.logits = malloc((l.n_logits + 1) * sizeof *l.logits);
    assert_non_null(l.logits);
    snprintf(path, sizeof path, "%s/golden.bin", v->directory);
    FILE *file = fopen(path, "rb");
    assert_non_null(file);
    /* One more than there should be: a wrong vocab_size is noticed here. */
    assert_int_equal(fread(l.logits, sizeof *l.logits, l.n_logits + 1, file), l.n_logits);
    fclose(file);
    return l;
}

static void variant_free(loaded *l)
{
    bml_model_free(l->model);
    json_decref(l->golden);
    free(l->prompt);
    free(l->greedy);
    free(l->logits);
}

static void test_info(void **state)
{
    const variant *v = *state;
    loaded l = variant_load(v);
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
    loaded l = variant_load(v);
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
    loaded l = variant_load(*state);
    for (size_t i = 0; i < sizeof n_threads / sizeof *n_threads; i++)
        greedy_with(&l, n_threads[i]);
    variant_free(&l);
}

/* Where the continuation holds the end-of-text token, generation ends before it. */
static void test_stops(void **state)
{
    const variant *v = *state;
    loaded l = variant_load(v);
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

static int compare_variants(const void *a, const void *b)
{
    return strcmp(((const variant *)a)->name, ((const variant *)b)->name);
}

/* The directories under data/variants, by name; their number. */
static size_t find_variants(variant *variants)
{
    DIR *directory = opendir(TEST_DATA "/variants");
    size_t n = 0;
    if (!directory)
        return 0;
    for (struct dirent *entry; n < MAX_VARIANTS && (entry = readdir(directory));) {
        variant *v = &variants[n];
        int length = snprintf(v->name, sizeof v->name, "%s", entry->d_name);
        if (entry->d_name[0] == '.' || length < 0 || (size_t)length >= sizeof v->name)
            continue;
        snprintf(v->directory, sizeof v->directory, TEST_DATA "/variants/%s", v->name);
        n++;
    }
    closedir(directory);
    qsort(variants, n, sizeof *variants, compare_variants);
    return n;
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
