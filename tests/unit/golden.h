/* Reading goldens, and comparing with them. Every failure here ends the test. */
#ifndef TESTS_GOLDEN_H
#define TESTS_GOLDEN_H

#include "testing.h"

#include "bml.h"

#include <jansson.h>
#include <math.h>

/* Ends the test with the library's message unless STATUS is BML_OK. */
static inline void expect_ok(bml_status status, const bml_error *err)
{
    if (status != BML_OK)
        fail_msg("status %d: %s", (int)status, err->message);
}

/* A JSON file; released by json_decref. */
static inline json_t *golden_json(const char *path)
{
    json_error_t error;
    json_t *json = json_load_file(path, 0, &error);
    if (!json)
        fail_msg("%s:%d: %s", path, error.line, error.text);
    return json;
}

/* The member KEY of OBJECT, which must be there. */
static inline json_t *golden_member(const json_t *object, const char *key)
{
    json_t *value = json_object_get(object, key);
    if (!value)
        fail_msg("the golden has no \"%s\"", key);
    return value;
}

static inline double golden_number(const json_t *object, const char *key)
{
    return json_number_value(golden_member(object, key));
}

/* An array of ids; released by free. */
static inline int32_t *golden_ids(const json_t *object, const char *key, size_t *n)
{
    json_t *array = golden_member(object, key);
    *n = json_array_size(array);
    int32_t *ids = malloc((*n + 1) * sizeof *ids);
    assert_non_null(ids);
    for (size_t i = 0; i < *n; i++)
        ids[i] = (int32_t)json_integer_value(json_array_get(array, i));
    return ids;
}

static inline void expect_ids(const char *what, const int32_t *got, size_t n_got,
                              const int32_t *want, size_t n_want)
{
    size_t n = n_got < n_want ? n_got : n_want;
    for (size_t i = 0; i < n; i++)
        if (got[i] != want[i])
            fail_msg("%s: id %zu is %d, should be %d", what, i, (int)got[i], (int)want[i]);
    if (n_got != n_want)
        fail_msg("%s: %zu ids, should be %zu", what, n_got, n_want);
}

/* N values, each within TOLERANCE * SCALE of what it should be; NaN never is. */
static inline void expect_near(const char *what, const float *got, const float *want, size_t n,
                               double tolerance, double scale)
{
    size_t worst = 0;
    double largest = -1;
    for (size_t i = 0; i < n; i++) {
        double off = fabs((double)got[i] - (double)want[i]);
        if (!(off <= largest)) {
            largest = off;
            worst = i;
        }
        if (isnan(off))
            break;
    }
    if (!(largest <= tolerance * scale))
        fail_msg("%s: value %zu is %.9g, should be %.9g (off by %.3g, %.3g allowed)", what, worst,
                 (double)got[worst], (double)want[worst], largest, tolerance * scale);
}

/* Logits: within 1e-4, relative to the largest where that exceeds 10. */
static inline void expect_logits(const char *what, const float *got, const float *want, size_t n)
{
    double largest = 10;
    for (size_t i = 0; i < n; i++)
        largest = fmax(largest, fabs((double)want[i]));
    expect_near(what, got, want, n, 1e-4, largest / 10);
}

/* Evaluates N tokens into SLOT, asking for the logits of all, [n, vocab_size]. */
static inline void eval_all(bml_session *session, int slot, const int32_t *ids, size_t n,
                            float *logits)
{
    bml_error err;
    bml_batch_token *batch = calloc(n + 1, sizeof *batch);
    assert_non_null(batch);
    for (size_t i = 0; i < n; i++)
        batch[i] = (bml_batch_token){.token = ids[i], .slot = slot, .want_logits = true};
    expect_ok(bml_session_eval(session, batch, n, logits, &err), &err);
    free(batch);
}

/* Greedy continuation of N tokens, whatever the end-of-text token. */
static inline void expect_greedy(const char *what, bml_session *session, const int32_t *prompt,
                                 size_t n_prompt, const int32_t *want, size_t n)
{
    bml_error err;
    bml_generate_options options = {.sampling = bml_sampling_default(), .ignore_eos = true};
    options.sampling.temperature = 0;
    options.max_tokens = (int)n;
    bml_generation out;
    expect_ok(bml_generate(session, 0, prompt, n_prompt, &options, &out, &err), &err);
    expect_ids(what, out.ids, out.n_ids, want, n);
    assert_int_equal(out.finish_reason, BML_FINISH_LENGTH);
    bml_generation_clear(&out);
}

/* The CPU's kernels, also where the machine has a GPU. */
static const bml_model_options on_cpu = {.backend = BML_BACKEND_CPU};

#endif
