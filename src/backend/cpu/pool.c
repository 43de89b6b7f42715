#define _GNU_SOURCE
#include "backend/cpu/pool.h"

#include "base/error.h"
#include "base/memory.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

enum { MAX_THREADS = 1024 };

/* How long a thread polls before it sleeps: longer than the gap between two kernels, short enough
 * that a thread whose partner lost its core to another process gives its own core up. */
static const int64_t spin_ns = 20000;

struct bml_pool {
    int n_threads, n_started;
    bool crowded; /* more threads than may run at once: who waits lets others run */
    pthread_t *threads;
    pthread_mutex_t mutex;
    pthread_cond_t job_ready, job_done;
    _Atomic unsigned epoch; /* one more for every job; workers wait for it to change */
    _Atomic int n_running;  /* workers that have not finished the job */
    _Atomic int n_sleeping; /* workers in, or on their way into, pthread_cond_wait */
    _Atomic bool caller_sleeping, stop;
    void (*work)(void *context, int part, int n_parts);
    void *context;
    _Atomic int n_arrived;          /* parts at the barrier */
    _Atomic unsigned barrier_epoch; /* one more for every barrier passed */
    _Atomic int barrier_sleepers;
    pthread_cond_t barrier_passed;
};

typedef struct worker {
    bml_pool *pool;
    int part;
} worker;

/* Leaves the core to its other hardware thread for some nanoseconds. Not x86's pause: a virtual
 * machine's host takes a loop of pauses for a lock that somebody else must be run for, and stops
 * the virtual processor; a barrier of two threads took 28 us so, and takes under 1 us without. */
static inline void cpu_relax(void)
{
#if defined(__x86_64__)
    for (int i = 0; i < 4; i++)
        __asm__ volatile("lfence");
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

/* Of a thread that is about to sleep and one that makes its condition true, at least one must see
 * the other. So these loads are sequentially consistent, and whoever says that it sleeps, or
 * changes a condition, does so by a read-modify-write: qemu (7.2, on x86-64) lets a load pass an
 * Arm store before it, sequentially consistent or not. (.stop changes under the mutex.) */
static bool job_is_new(bml_pool *pool, unsigned seen)
{
    return atomic_load(&pool->epoch) != seen ||
           atomic_load_explicit(&pool->stop, memory_order_relaxed);
}

static bool job_is_done(bml_pool *pool)
{
    return atomic_load(&pool->n_running) == 0;
}

static void pause_or_yield(const bml_pool *pool)
{
    if (pool->crowded)
        sched_yield();
    else
        cpu_relax();
}

/* Polls for up to spin_ns; the clock is read only now and then. */
#define SPIN_UNTIL(pool, condition)                                                                \
    do {                                                                                           \
        int64_t deadline = now_ns() + spin_ns;                                                     \
        for (int i = 1; !(condition) && (i % 64 || now_ns() < deadline); i++)                      \
            pause_or_yield(pool);                                                                  \
    } while (0)

static void *worker_main(void *argument)
{
    worker w = *(worker *)argument;
    free(argument);
    bml_pool *pool = w.pool;
    for (unsigned seen = 0;; seen++) {
        SPIN_UNTIL(pool, job_is_new(pool, seen));
        if (!job_is_new(pool, seen)) {
            pthread_mutex_lock(&pool->mutex);
            atomic_fetch_add(&pool->n_sleeping, 1);
            while (!job_is_new(pool, seen))
                pthread_cond_wait(&pool->job_ready, &pool->mutex);
            atomic_fetch_sub(&pool->n_sleeping, 1);
            pthread_mutex_unlock(&pool->mutex);
        }
        if (atomic_load(&pool->stop))
            return NULL;
        pool->work(pool->context, w.part, pool->n_threads);
        if (atomic_fetch_sub(&pool->n_running, 1) == 1 && atomic_load(&pool->caller_sleeping)) {
            pthread_mutex_lock(&pool->mutex);
            pthread_cond_signal(&pool->job_done);
            pthread_mutex_unlock(&pool->mutex);
        }
    }
}

void bml_pool_run(bml_pool *pool, void (*work)(void *context, int part, int n_parts), void *context)
{
    if (pool->n_threads == 1) {
        work(context, 0, 1);
        return;
    }
    pool->work = work;
    pool->context = context;
    atomic_store_explicit(&pool->n_running, pool->n_threads - 1, memory_order_relaxed);
    atomic_fetch_add(&pool->epoch, 1);
    if (atomic_load(&pool->n_sleeping)) {
        pthread_mutex_lock(&pool->mutex);
        pthread_cond_broadcast(&pool->job_ready);
        pthread_mutex_unlock(&pool->mutex);
    }
    work(context, 0, pool->n_threads);
    SPIN_UNTIL(pool, job_is_done(pool));
    if (!job_is_done(pool)) {
        pthread_mutex_lock(&pool->mutex);
        atomic_exchange(&pool->caller_sleeping, true);
        while (!job_is_done(pool))
            pthread_cond_wait(&pool->job_done, &pool->mutex);
        atomic_store(&pool->caller_sleeping, false);
        pthread_mutex_unlock(&pool->mutex);
    }
}

static bool barrier_is_passed(bml_pool *pool, unsigned seen)
{
    return atomic_load(&pool->barrier_epoch) != seen;
}

void bml_pool_barrier(bml_pool *pool)
{
    if (pool->n_threads == 1)
        return;
    unsigned seen = atomic_load_explicit(&pool->barrier_epoch, memory_order_relaxed);
    if (atomic_fetch_add(&pool->n_arrived, 1) == pool->n_threads - 1) {
        atomic_store_explicit(&pool->n_arrived, 0, memory_order_relaxed);
        atomic_fetch_add(&pool->barrier_epoch, 1);
        if (atomic_load(&pool->barrier_sleepers)) {
            pthread_mutex_lock(&pool->mutex);
            pthread_cond_broadcast(&pool->barrier_passed);
            pthread_mutex_unlock(&pool->mutex);
        }
        return;
    }
    SPIN_UNTIL(pool, barrier_is_passed(pool, seen));
    if (!barrier_is_passed(pool, seen)) {
        pthread_mutex_lock(&pool->mutex);
        atomic_fetch_add(&pool->barrier_sleepers, 1);
        while (!barrier_is_passed(pool, seen))
            pthread_cond_wait(&pool->barrier_passed, &pool->mutex);
        atomic_fetch_sub(&pool->barrier_sleepers, 1);
        pthread_mutex_unlock(&pool->mutex);
    }
}

#ifdef __linux__
/*
 * Where a pool takes every processor that it may use, each worker gets one of its own, the one the
 * caller is on excepted. Left to the scheduler, two threads that often sleep for a moment can end
 * up on one processor while another program has the second, and then every barrier costs two
 * switches.
 */
static void pin_workers(bml_pool *pool)
{
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed) || CPU_COUNT(&allowed) != pool->n_threads)
        return;
    int callers = sched_getcpu(), cpu = 0;
    for (int part = 1; part < pool->n_threads; part++, cpu++) {
        while (cpu < CPU_SETSIZE && (!CPU_ISSET(cpu, &allowed) || cpu == callers))
            cpu++;
        if (cpu == CPU_SETSIZE)
            return;
        cpu_set_t own;
        CPU_ZERO(&own);
        CPU_SET(cpu, &own);
        pthread_setaffinity_np(pool->threads[part], sizeof own, &own);
    }
}
#else
static void pin_workers(bml_pool *pool)
{
    (void)pool;
}
#endif

bml_status bml_pool_new(int n_threads, bml_pool **out, bml_error *err)
{
    if (n_threads == 0)
        n_threads = bml_cpu_count();
    if (n_threads < 1 || n_threads > MAX_THREADS)
        return bml_fail(err, BML_ERR_ARGUMENT, "%d threads asked for; 1 to %d are possible",
                        n_threads, MAX_THREADS);
    bml_pool *pool = bml_calloc(1, sizeof *pool);
    pthread_t *threads = bml_calloc((size_t)n_threads, sizeof *threads);
    if (!pool || !threads) {
        free(pool);
        free(threads);
        return bml_fail_memory(err, sizeof *pool, "the thread pool");
    }
    pool->threads = threads;
    pool->n_threads = n_threads;
    pool->crowded = n_threads > bml_cpu_count();
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->job_ready, NULL);
    pthread_cond_init(&pool->job_done, NULL);
    pthread_cond_init(&pool->barrier_passed, NULL);
    for (int part = 1; part < n_threads; part++) {
        worker *w = bml_calloc(1, sizeof *w);
        if (w)
            *w = (worker){pool, part};
        if (!w || pthread_create(&pool->threads[part], NULL, worker_main, w) != 0) {
            free(w);
            bml_pool_free(pool);
            return bml_fail(err, BML_ERR_MEMORY, "out of memory: could not start thread %d of %d",
                            part + 1, n_threads);
        }
        pool->n_started++;
    }
    pin_workers(pool);
    *out = pool;
    return BML_OK;
}

void bml_pool_free(bml_pool *pool)
{
    if (!pool)
        return;
    pthread_mutex_lock(&pool->mutex);
    atomic_store(&pool->stop, true);
    pthread_cond_broadcast(&pool->job_ready);
    pthread_mutex_unlock(&pool->mutex);
    for (int i = 1; i <= pool->n_started; i++)
        pthread_join(pool->threads[i], NULL);
    pthread_cond_destroy(&pool->job_ready);
    pthread_cond_destroy(&pool->job_done);
    pthread_cond_destroy(&pool->barrier_passed);
    pthread_mutex_destroy(&pool->mutex);
    free(pool->threads);
    free(pool);
}

int bml_pool_threads(const bml_pool *pool)
{
    return pool->n_threads;
}
