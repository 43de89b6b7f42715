/* The sampler: transformers' semantics, extreme settings, reproducible draws. */
#include "testing.h"

#include "base/philox.h"
#include "bml.h"

#include <limits.h>
#include <math.h>

enum { V = 50 };

static int32_t pick(const bml_sampling *s, const float *logits, int n, uint64_t step)
{
    int32_t token = -1;
    bml_error err = {0};
    if (bml_sample(s, logits, n, NULL, 0, step, &token, &err))
        fail_msg("%s", err.message);
    assert_in_range(token, 0, n - 1);
    return token;
}

/* How often each id is drawn in n steps. */
static void frequencies(const bml_sampling *s, const float *logits, int n, int draws, double *f)
{
    memset(f, 0, (size_t)n * sizeof *f);
    for (int i = 0; i < draws; i++)
        f[pick(s, logits, n, (uint64_t)i)] += 1.0 / draws;
}

static void test_philox_known_answers(void **state)
{
    (void)state;
    /* From Random123's kat_vectors, philox4x32 with 10 rounds. */
    uint32_t block[4];
    bml_philox(0, 0, block);
    const uint32_t zeros[4] = {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8};
    assert_memory_equal(block, zeros, sizeof block);
}

static void test_greedy(void **state)
{
    (void)state;
    float logits[V] = {0};
    bml_sampling s = bml_sampling_default();
    s.temperature = 0;
    logits[17] = logits[31] = 2; /* a tie goes to the lower id */
    assert_int_equal(pick(&s, logits, V, 0), 17);
    s.top_k = 3;
    s.top_p = 0.1f;
    assert_int_equal(pick(&s, logits, V, 9), 17);
    assert_int_equal(pick(&s, logits, 10, 9), 0); /* what lies past n_tokens is masked */
}

static void test_distribution(void **state)
{
    (void)state;
    float logits[4] = {0, 1, 2, 3};
    double f[4], sum = 0;
    bml_sampling s = bml_sampling_default();
    s.temperature = 0.7f;
    s.seed = 5;
    frequencies(&s, logits, 4, 40000, f);
    for (int i = 0; i < 4; i++)
        sum += exp(logits[i] / 0.7);
    for (int i = 0; i < 4; i++)
        assert_true(fabs(f[i] - exp(logits[i] / 0.7) / sum) < 0.01);
}

static void test_top_k(void **state)
{
    (void)state;
    float logits[6] = {1, 5, 3, 5, 3, 0};
    double f[6];
    bml_sampling s = bml_sampling_default();
    s.top_k = 2;
    frequencies(&s, logits, 6, 3000, f);
    assert_true(f[1] > 0.4 && f[3] > 0.4 && f[1] + f[3] > 0.999);
    s.top_k = 3; /* both of the two that share third place stay, as in transformers */
    frequencies(&s, logits, 6, 3000, f);
    assert_true(f[2] > 0.02 && f[4] > 0.02 && f[0] == 0 && f[5] == 0);
    static const int all[] = {0, -1, 6, 7, INT_MIN, INT_MAX};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        s.top_k = all[i];
        s.temperature = 5;
        frequencies(&s, logits, 6, 2000, f);
        for (int id = 0; id < 6; id++)
            assert_true(f[id] > 0);
    }
    s.top_k = 1;
    logits[3] = 4.9f;
    frequencies(&s, logits, 6, 500, f);
    assert_true(f[1] > 0.999);
}

static void test_top_p(void **state)
{
    (void)state;
    /* probabilities 0.5, 0.25, 0.15, 0.1, in another order */
    float logits[4] = {logf(0.15f), logf(0.5f), logf(0.1f), logf(0.25f)};
    static const struct {
        float p;
        int kept;
    } cases[] = {{0, 1},     {0.3f, 1},  {0.49f, 1},      {0.6f, 2}, {0.74f, 2},
                 {0.85f, 3}, {0.95f, 4}, {0.9999999f, 4}, {1, 4}};
    static const int order[] = {1, 3, 0, 2};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int k = 0; k <= 4; k += 4) {
            double f[4];
            bml_sampling s = bml_sampling_default();
            s.top_p = cases[i].p;
            s.top_k = k;
            frequencies(&s, logits, 4, 3000, f);
            for (int j = 0; j < 4; j++)
                assert_true((f[order[j]] > 0) == (j < cases[i].kept));
        }
}

static void test_top_p_counts_what_top_k_left(void **state)
{
    (void)state;
    float logits[4] = {logf(0.4f), logf(0.3f), logf(0.2f), logf(0.1f)};
    double f[5];
    bml_sampling s = bml_sampling_default();
    s.top_k = 2; /* leaves 4/7 and 3/7 */
    s.top_p = 0.5f;
    frequencies(&s, logits, 4, 1000, f);
    assert_true(f[0] > 0.999);
    s.top_p = 0.6f;
    frequencies(&s, logits, 4, 1000, f);
    assert_true(f[1] > 0.3 && f[2] == 0);
    float equal[5] = {2, 2, 2, 2,
                      1}; /* top-k leaves all four, and of these the lower ids are first */
    s.top_p = 0.5f;
    frequencies(&s, equal, 5, 2000, f);
    assert_true(f[0] > 0.4 && f[1] > 0.4 && f[2] == 0 && f[3] == 0 && f[4] == 0);
}

static int descending(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x < y) - (x > y);
}

/* More logits than are looked at one by one: the largest K in any order, equal ones among them. */
static void test_top_k_of_many(void **state)
{
    (void)state;
    enum { N = 1000, DRAWS = 400 };
    static float logits[N];
    uint64_t random = 3;
    for (int k = 1; k < N; k = 3 * k + 1) {
        for (int i = 0; i < N; i++)
            logits[i] = (float)(test_random(&random) % 700) / 100;
        float sorted[N];
        memcpy(sorted, logits, sizeof sorted);
        qsort(sorted, N, sizeof *sorted, descending);
        bml_sampling s = bml_sampling_default();
        s.top_k = k;
        s.temperature = 50; /* nearly uniform */
        int drawn = 0;
        bool seen[N] = {0};
        for (uint64_t step = 0; step < DRAWS; step++) {
            int32_t token = pick(&s, logits, N, step);
            assert_true(logits[token] >= sorted[k - 1]);
            drawn += !seen[token];
            seen[token] = true;
        }
        assert_true(drawn >= (k < DRAWS ? k : DRAWS) / 3);
    }
}

static void test_min_p(void **state)
{
    (void)state;
    float logits[4] = {logf(0.5f), logf(0.3f), logf(0.15f), logf(0.05f)};
    for (int i = 0; i < 4; i++) {
        double f[4];
        bml_sampling s = bml_sampling_default();
        s.min_p = 0.2f; /* of the best: 0.1 */
        s.top_k = i % 2 ? 4 : 3;
        s.top_p = i / 2 ? 1 : 0.999f;
        frequencies(&s, logits, 4, 3000, f);
        assert_true(f[0] > 0 && f[1] > 0 && f[2] > 0 && f[3] == 0);
        s.min_p = 1;
        frequencies(&s, logits, 4, 300, f);
        assert_true(f[0] > 0.999);
    }
}

static void test_repetition_penalty(void **state)
{
    (void)state;
    float logits[4] = {3, 2.9f, -1, -1.1f};
    int32_t history[] = {0, 0, 0, 2, 99, -5}, token; /* once per distinct token; strays ignored */
    bml_sampling s = bml_sampling_default();
    s.temperature = 0;
    s.repetition_penalty = 1.02f; /* 3 / 1.02 = 2.94, still the best */
    assert_int_equal(bml_sample(&s, logits, 4, history, 6, 0, &token, NULL), BML_OK);
    assert_int_equal(token, 0);
    s.repetition_penalty = 1.05f;
    assert_int_equal(bml_sample(&s, logits, 4, history, 6, 0, &token, NULL), BML_OK);
    assert_int_equal(token, 1);
    float negative[2] = {-1, -1.1f}; /* multiplied when negative */
    assert_int_equal(bml_sample(&s, negative, 2, history, 1, 0, &token, NULL), BML_OK);
    assert_int_equal(token, 0);
    s.repetition_penalty = 1.2f;
    assert_int_equal(bml_sample(&s, negative, 2, history, 1, 0, &token, NULL), BML_OK);
    assert_int_equal(token, 1);
}

static void test_extremes_are_safe(void **state)
{
    (void)state;
    float logits[V];
    uint64_t seed = 1;
    for (int i = 0; i < V; i++)
        logits[i] = (float)((int)(test_random(&seed) % 2001) - 1000) / 10;
    bml_sampling greedy = bml_sampling_default();
    greedy.temperature = 0;
    int32_t best = pick(&greedy, logits, V, 0);
    static const float temperatures[] = {1e-45f, 1e-30f, 1e-6f, 1e-3f};
    for (size_t i = 0; i < sizeof temperatures / sizeof *temperatures; i++) {
        bml_sampling s = bml_sampling_default();
        s.temperature = temperatures[i];
        assert_int_equal(pick(&s, logits, V, i), best);
        s.top_p = nextafterf(1, 0);
        assert_int_equal(pick(&s, logits, V, i), best);
    }
    bml_sampling hot = bml_sampling_default();
    hot.temperature = 3e38f;
    hot.top_p = nextafterf(1, 0);
    pick(&hot, logits, V, 0);
    float huge[3] = {3e38f, -3e38f, 3e38f};
    pick(&hot, huge, 3, 0);
    hot.temperature = 1;
    pick(&hot, huge, 3, 0);
    float one[1] = {-5};
    assert_int_equal(pick(&hot, one, 1, 0), 0);
}

static void test_same_seed_same_draw(void **state)
{
    (void)state;
    float logits[V] = {0};
    bml_sampling s = bml_sampling_default();
    s.seed = 42;
    int32_t first[100], differences = 0;
    for (int i = 0; i < 100; i++)
        first[i] = pick(&s, logits, V, (uint64_t)i);
    for (int i = 99; i >= 0; i--)
        assert_int_equal(first[i], pick(&s, logits, V, (uint64_t)i));
    s.seed = 43;
    for (int i = 0; i < 100; i++)
        differences += first[i] != pick(&s, logits, V, (uint64_t)i);
    assert_true(differences > 80);
}

static void test_errors(void **state)
{
    (void)state;
    float logits[V] = {0};
    int32_t token;
    bml_error err;
    static const struct {
        float temperature, top_p, min_p, penalty;
        const char *named;
    } bad[] = {
        {-1, 1, 0, 1, "temperature"},
        {NAN, 1, 0, 1, "temperature"},
        {INFINITY, 1, 0, 1, "temperature"},
        {1, 1.5f, 0, 1, "top_p"},
        {1, NAN, 0, 1, "top_p"},
        {1, -0.1f, 0, 1, "top_p"},
        {1, 1, 2, 1, "min_p"},
        {1, 1, -1, 1, "min_p"},
        {1, 1, 0, 0, "repetition_penalty"},
        {1, 1, 0, -2, "repetition_penalty"},
        {1, 1, 0, NAN, "repetition_penalty"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        bml_sampling s = {bad[i].temperature, 0, bad[i].top_p, bad[i].min_p, bad[i].penalty, 0};
        assert_int_equal(bml_sample(&s, logits, V, NULL, 0, 0, &token, &err), BML_ERR_ARGUMENT);
        assert_non_null(strstr(err.message, bad[i].named));
    }
    static const float not_finite[] = {NAN, INFINITY, -INFINITY};
    for (int i = 0; i < 3; i++) {
        bml_sampling s = bml_sampling_default();
        logits[7] = not_finite[i];
        assert_int_equal(bml_sample(&s, logits, V, NULL, 0, 12, &token, &err), BML_ERR_NUMERIC);
        assert_non_null(strstr(err.message, "step 12"));
        assert_non_null(strstr(err.message, "token 7"));
        assert_int_equal(bml_sample(&s, logits, 7, NULL, 0, 12, &token, &err), BML_OK);
    }
    bml_sampling s = bml_sampling_default();
    assert_int_equal(bml_sample(&s, logits, 0, NULL, 0, 0, &token, &err), BML_ERR_ARGUMENT);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_philox_known_answers),
        cmocka_unit_test(test_greedy),
        cmocka_unit_test(test_distribution),
        cmocka_unit_test(test_top_k),
        cmocka_unit_test(test_top_p),
        cmocka_unit_test(test_top_p_counts_what_top_k_left),
        cmocka_unit_test(test_top_k_of_many),
        cmocka_unit_test(test_min_p),
        cmocka_unit_test(test_repetition_penalty),
        cmocka_unit_test(test_extremes_are_safe),
        cmocka_unit_test(test_same_seed_same_draw),
        cmocka_unit_test(test_errors),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
