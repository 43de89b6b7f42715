/* A small thread pool: one job at a time, split statically, one part a thread. */
#ifndef BML_BACKEND_CPU_POOL_H
#define BML_BACKEND_CPU_POOL_H

#include "bml.h"

typedef struct bml_pool bml_pool;

/* N_THREADS counts the calling thread; 0 means bml_cpu_count(). */
bml_status bml_pool_new(int n_threads, bml_pool **pool, bml_error *err);
void bml_pool_free(bml_pool *pool);
int bml_pool_threads(const bml_pool *pool);

/* Runs WORK(CONTEXT, part, n_parts) for part = 0 .. n_parts-1, part 0 on the caller, and returns
 * when all are done; n_parts is the pool's number of threads. */
void bml_pool_run(bml_pool *pool, void (*work)(void *context, int part, int n_parts),
                  void *context);

/* Inside WORK: returns once every part of the job has called it. */
void bml_pool_barrier(bml_pool *pool);

/* How many threads make sense here: the affinity mask, limited by the cgroup's CPU quota. */
int bml_cpu_count(void);

#endif
