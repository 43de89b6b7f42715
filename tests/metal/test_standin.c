/* The stand-in itself: what it runs is right, and every planted fault is caught, in every order. */
#include "testing.h"

#include "simulator.h"

#include <math.h>

extern const metal_compiled *const *planted_kernels(void);

static char *source;

/* A launch of NAME, whose buffers a test binds. */
static metal_launch launch_of(const char *name, metal_function *function, uint32_t n_groups,
                              uint32_t n_threads)
{
    char message[512];
    if (!metal_function_find(function, planted_kernels(), source, name, message, sizeof message))
        fail_msg("%s", message);
    metal_launch l = {.function = function, .n_groups = n_groups, .n_threads = n_threads};
    return l;
}

static void bind(metal_launch *l, size_t index, void *data, size_t bytes)
{
    l->buffers[index].data = data;
    l->buffers[index].bytes = bytes;
}

/* ---- faults -----------------------------------------------------------------------------------*/

enum { THREADS = 64 };

/* Runs NAME over out and x of THREADS floats, which have as much again behind them that is not
 * bound; the fault, or NULL. */
static const char *run_named(const char *name, float *out, float *x, uint32_t n_groups)
{
    metal_function function;
    metal_launch l = launch_of(name, &function, n_groups, THREADS);
    bind(&l, 0, out, THREADS * sizeof *out);
    bind(&l, 1, x, THREADS * sizeof *x);
    l.threadgroup_bytes[0] = THREADS * sizeof(float);
    bool fine = metal_run(&l);
    const char *fault = metal_take_fault();
    assert_int_equal(fine, fault == NULL);
    return fault;
}

static void test_faults_are_caught(void **state)
{
    (void)state;
    static const struct {
        const char *kernel;
        uint32_t n_groups;
        const char *fault; /* NULL: there is none */
    } cases[] = {
        {"exchange", 1, NULL},
        {"exchange_without_barrier", 1, "race on threadgroup(0)"},
        {"scratch_used_again", 1, "race on threadgroup(0)"},
        {"exchange_in_simdgroup", 1, NULL},
        {"exchange_in_simdgroup_without_barrier", 1, "threadgroup(0)"},
        {"exchange_with_wrong_flags", 1, "race on buffer(0)"},
        {"missed_barrier", 1, "wait at a barrier that the other 32 miss"},
        {"missed_simd_sum", 1, "wait for the other lanes"},
        {"different_operations", 1, "meet at different operations"},
        {"groups_share", 2, "race on buffer(0)"},
        {"groups_share", 1, NULL},
        {"reads_past_end", 1, "reads 4 bytes outside of everything bound"},
        {"writes_past_end", 1, "writes 4 bytes outside of everything bound"},
        {"writes_past_threadgroup", 1, "writes 4 bytes outside of everything bound"},
        {"writes_to_constant", 1, "bound for reading"},
        {"reads_unwritten", 1, "before anything is written"},
    };
    float *out = calloc(2 * THREADS, sizeof *out), *x = calloc(2 * THREADS, sizeof *x);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int order = 0; order < METAL_N_ORDERS; order++) {
            metal_set_order(order, i);
            const char *fault = run_named(cases[i].kernel, out, x, cases[i].n_groups);
            if (!cases[i].fault != !fault || (fault && !strstr(fault, cases[i].fault)))
                fail_msg("%s, order %d: the fault was %s", cases[i].kernel, order,
                         fault ? fault : "not seen");
        }
    free(out);
    free(x);
}

/* Even where nobody watches accesses, some order makes a race give another result. */
static void test_orders_expose_races(void **state)
{
    (void)state;
    static const struct {
        const char *kernel;
        float first; /* what thread 0 gets where nothing is missing */
        bool races;
    } cases[] = {{"exchange", THREADS - 1, false},
                 {"exchange_without_barrier", THREADS - 1, true},
                 {"scratch_used_again", 2 * 32 + 4 * 2 * 32, true},
                 {"exchange_in_simdgroup", 31, false},
                 {"exchange_in_simdgroup_without_barrier", 31, true}};
    float out[THREADS], x[THREADS] = {0};
    metal_watch(false);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int wrong = 0;
        for (int order = 0; order < METAL_N_ORDERS; order++) {
            metal_set_order(order, 1);
            assert_null(run_named(cases[i].kernel, out, x, 1));
            bool right = true;
            for (int t = 0; t < THREADS; t++)
                right &= out[t] == (cases[i].first == 31            ? (float)(t ^ 31)
                                    : cases[i].first == THREADS - 1 ? (float)(THREADS - 1 - t)
                                                                    : cases[i].first);
            wrong += !right;
        }
        if (cases[i].races != (wrong > 0))
            fail_msg("%s: wrong in %d orders", cases[i].kernel, wrong);
    }
    metal_watch(true);
}

/* What the host does wrong: each is refused before anything runs. */
static void test_launches_are_checked(void **state)
{
    (void)state;
    metal_function function;
    uint32_t out[10 * 32] = {0}, args[2] = {1, 2}, choice = 3;
    const metal_launch good = {.n_groups = 1, .n_threads = 32};
    for (int fault = 0; fault < 7; fault++) {
        static const char *const wanted[] = {NULL,
                                             "nothing is bound to buffer(0)",
                                             "buffer(2) has 4 bytes and needs 8",
                                             "32 threads",
                                             "2048 threads",
                                             "function constant 1 has 4 bytes",
                                             "0 threadgroups"};
        metal_launch l = launch_of("arguments", &function, good.n_groups, good.n_threads);
        bind(&l, 0, fault == 1 ? NULL : out, sizeof out);
        bind(&l, 2, args, fault == 2 ? 4 : sizeof args);
        l.constants[1].value = &choice;
        l.constants[1].bytes = fault == 5 ? 1 : sizeof choice;
        l.n_threads = fault == 3 ? 33 : fault == 4 ? 2048 : 32;
        l.n_groups = fault != 6;
        assert_int_equal(metal_run(&l), fault == 0);
        const char *text = metal_take_fault();
        if (!wanted[fault] != !text || (text && fault != 3 && !strstr(text, wanted[fault])))
            fail_msg("case %d: %s", fault, text ? text : "no fault");
    }
    metal_launch l = launch_of("exchange", &function, 1, 32);
    bind(&l, 0, out, sizeof out);
    assert_false(metal_run(&l));
    assert_non_null(strstr(metal_take_fault(), "threadgroup(0) has no memory"));
    l.threadgroup_bytes[0] = METAL_MAX_THREADGROUP_BYTES + 16;
    assert_false(metal_run(&l));
    assert_non_null(strstr(metal_take_fault(), "threadgroup memory; there are"));
    l.threadgroup_bytes[0] = 130;
    assert_false(metal_run(&l));
    assert_non_null(strstr(metal_take_fault(), "multiple of 16"));
    char message[512];
    assert_false(metal_function_find(&function, planted_kernels(), source, "nobody", message,
                                     sizeof message));
}

/* ---- what must be right -----------------------------------------------------------------------*/

static void test_arguments(void **state)
{
    (void)state;
    enum { GROUPS = 3 };
    metal_function function;
    static uint32_t out[GROUPS * THREADS][10];
    uint32_t args[2] = {77, 88}, choice = 99;
    for (int order = 0; order < METAL_N_ORDERS; order++) {
        memset(out, 0xff, sizeof out);
        metal_set_order(order, 4);
        metal_launch l = launch_of("arguments", &function, GROUPS, THREADS);
        bind(&l, 0, out, sizeof out);
        bind(&l, 2, args, sizeof args);
        l.constants[1].value = &choice;
        l.constants[1].bytes = sizeof choice;
        assert_true(metal_run(&l));
        for (uint32_t i = 0; i < GROUPS * THREADS; i++) {
            uint32_t t = i % THREADS, wanted[10] = {i / THREADS, GROUPS,       t,  THREADS, t % 32,
                                                    t / 32,      THREADS / 32, 77, 88,      99};
            assert_memory_equal(out[i], wanted, sizeof wanted);
        }
    }
}

static void test_simd_operations(void **state)
{
    (void)state;
    metal_function function;
    float x[THREADS], out[THREADS][6];
    for (int t = 0; t < THREADS; t++)
        x[t] = (float)((t * 37 + 11) % 101);
    for (int order = 0; order < METAL_N_ORDERS; order++) {
        metal_set_order(order, 5);
        metal_launch l = launch_of("simd_operations", &function, 1, THREADS);
        bind(&l, 0, out, sizeof out);
        bind(&l, 1, x, sizeof x);
        assert_true(metal_run(&l));
        for (int t = 0; t < THREADS; t++) {
            const float *lanes = x + t / 32 * 32;
            float sum = 0, most = 0, least = 1000;
            for (int i = 0; i < 32; i++) {
                sum += lanes[i];
                most = fmaxf(most, lanes[i]);
                least = fminf(least, lanes[i]);
            }
            float wanted[6] = {sum, most, most, least, lanes[t % 32 ^ 5], lanes[7]};
            assert_memory_equal(out[t], wanted, sizeof wanted);
        }
    }
}

static void test_matrices(void **state)
{
    (void)state;
    metal_function function;
    float a[8][8], b[8][8], out[8][8];
    for (int i = 0; i < 64; i++) {
        a[i / 8][i % 8] = (float)(i % 7);
        b[i / 8][i % 8] = (float)(i * i % 5);
    }
    metal_launch l = launch_of("matrices", &function, 1, 32);
    bind(&l, 0, out, sizeof out);
    bind(&l, 1, a, sizeof a);
    bind(&l, 2, b, sizeof b);
    assert_true(metal_run(&l));
    for (int r = 0; r < 8; r++)
        for (int c = 0; c < 8; c++) {
            float sum = 0;
            for (int k = 0; k < 8; k++)
                sum += a[r][k] * b[k][c] + a[r][k] * b[c][k];
            assert_true(out[r][c] == sum);
        }
}

static void test_vectors(void **state)
{
    (void)state;
    metal_function function;
    /* 1, 2, -1, 0.5 and 0 in halves */
    static uint16_t x[4 * 32] = {0x3c00, 0x4000, 0xbc00, 0x3800};
    static float out[4 * 32];
    metal_launch l = launch_of("vectors", &function, 1, 32);
    bind(&l, 0, out, sizeof out);
    bind(&l, 1, x, sizeof x);
    assert_true(metal_run(&l));
    static const float wanted[8] = {3.5f, 6.5f, 1.5f, 5.5f, 1.5f, 2.5f, 3.5f, 4.5f};
    assert_memory_equal(out, wanted, sizeof wanted);
}

/* Fast math may make NaN of what overflows on the way; here it does. */
static void test_fast_math(void **state)
{
    (void)state;
    metal_function function;
    float x[32] = {0, 0.5f, 40, -40, 1e4f}, out[32];
    for (int fast = 0; fast < 2; fast++) {
        metal_launch l = launch_of("plain_tanh", &function, 1, 32);
        bind(&l, 0, out, sizeof out);
        bind(&l, 1, x, sizeof x);
        l.fast_math = fast;
        assert_true(metal_run(&l));
        assert_true(fabsf(out[1] - tanhf(0.5f)) < 1e-6f);
        assert_int_equal(isnan(out[4]) != 0, fast);
    }
}

static int read_source(void **state)
{
    (void)state;
    FILE *file = fopen(PLANTED_SOURCE, "r");
    source = calloc(1 << 16, 1);
    bool fine = file && source && fread(source, 1, (1 << 16) - 1, file) > 0;
    if (file)
        fclose(file);
    return fine ? 0 : -1;
}

static int free_source(void **state)
{
    (void)state;
    free(source);
    return 0;
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_faults_are_caught),
        cmocka_unit_test(test_orders_expose_races),
        cmocka_unit_test(test_launches_are_checked),
        cmocka_unit_test(test_arguments),
        cmocka_unit_test(test_simd_operations),
        cmocka_unit_test(test_matrices),
        cmocka_unit_test(test_vectors),
        cmocka_unit_test(test_fast_math),
    };
    return cmocka_run_group_tests_name("the stand-in", tests, read_source, free_source);
}
