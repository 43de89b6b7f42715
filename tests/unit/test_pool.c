/* The thread pool: every part runs once a job, whatever the number of threads and the load. */
#include "testing.h"

#include "backend/cpu/cpu.h"
#include "base/clock.h"

#include <stdatomic.h>
#include <time.h>

typedef struct counts {
    _Atomic int runs[64];
    _Atomic int n_parts;
    int jobs;
} counts;

static void count(void *context, int part, int n_parts)
{
    counts *c = context;
    atomic_fetch_add(&c->runs[part], 1);
    atomic_store(&c->n_parts, n_parts);
}

static void test_every_part_runs_once(void **state)
{
    (void)state;
    for (int n = 1; n <= 9; n++) {
        bml_pool *pool;
        counts c = {.jobs = 2000};
        assert_int_equal(bml_pool_new(n, &pool, NULL), BML_OK);
        assert_int_equal(bml_pool_threads(pool), n);
        for (int job = 0; job < c.jobs; job++) {
            bml_pool_run(pool, count, &c);
            for (int part = 0; part < n; part++) /* all are done when run returns */
                assert_int_equal(atomic_load(&c.runs[part]), job + 1);
        }
        assert_int_equal(atomic_load(&c.n_parts), n);
        assert_int_equal(atomic_load(&c.runs[n]), 0);
        bml_pool_free(pool);
    }
}

/* Jobs with pauses between them, so that workers, and the caller, really fall asleep. */
static void nap(void *context, int part, int n_parts)
{
    counts *c = context;
    (void)n_parts;
    struct timespec t = {0, part % 2 ? 300000 : 0};
    nanosleep(&t, NULL);
    atomic_fetch_add(&c->runs[part], 1);
}

static void test_sleepers_wake(void **state)
{
    (void)state;
    bml_pool *pool;
    counts c = {.jobs = 200};
    assert_int_equal(bml_pool_new(4, &pool, NULL), BML_OK);
    for (int job = 0; job < c.jobs; job++) {
        struct timespec t = {0, job % 3 ? 200000 : 0};
        nanosleep(&t, NULL);
        bml_pool_run(pool, nap, &c);
        for (int part = 0; part < 4; part++)
            assert_int_equal(atomic_load(&c.runs[part]), job + 1);
    }
    bml_pool_free(pool);
}

/* Jobs that end about when the caller, which polls for 20 us, falls asleep: a wake-up that gets
 * lost there hangs the test. */
static void linger(void *context, int part, int n_parts)
{
    counts *c = context;
    (void)n_parts;
    double end = bml_now() + 15e-6 + 1e-9 * (c->jobs * 7919 % 20000);
    while (part && bml_now() < end)
        ;
    atomic_fetch_add(&c->runs[part], 1);
}

static void test_jobs_end_as_the_caller_falls_asleep(void **state)
{
    (void)state;
    bml_pool *pool;
    counts c = {0};
    assert_int_equal(bml_pool_new(2, &pool, NULL), BML_OK);
    for (c.jobs = 0; c.jobs < 40000; c.jobs++)
        bml_pool_run(pool, linger, &c);
    assert_int_equal(atomic_load(&c.runs[1]), c.jobs);
    bml_pool_free(pool);
}

static void test_bad_counts(void **state)
{
    (void)state;
    bml_pool *pool = NULL;
    bml_error err;
    assert_int_equal(bml_pool_new(-1, &pool, &err), BML_ERR_ARGUMENT);
    assert_non_null(strstr(err.message, "-1 threads"));
    assert_int_equal(bml_pool_new(100000, &pool, &err), BML_ERR_ARGUMENT);
    assert_null(pool);
    assert_int_equal(bml_pool_new(0, &pool, &err), BML_OK);
    assert_int_equal(bml_pool_threads(pool), bml_cpu_count());
    bml_pool_free(pool);
    bml_pool_free(NULL);
}

static void test_split(void **state)
{
    (void)state;
    for (size_t n = 0; n < 200; n += 7)
        for (size_t grain = 1; grain < 20; grain += 3)
            for (int parts = 1; parts < 9; parts++) {
                size_t begin, end, next = 0;
                for (int part = 0; part < parts; part++) {
                    bml_split(n, grain, part, parts, &begin, &end);
                    assert_int_equal(begin, next);
                    assert_true(end >= begin && (end % grain == 0 || end == n));
                    next = end;
                }
                assert_int_equal(next, n);
            }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_part_runs_once),
        cmocka_unit_test(test_sleepers_wake),
        cmocka_unit_test(test_jobs_end_as_the_caller_falls_asleep),
        cmocka_unit_test(test_bad_counts),
        cmocka_unit_test(test_split),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
