/*
 * A GPU for tests: runs kernels that were compiled for the CPU on fibers, one for each thread, a
 * threadgroup at a time, in orders meant to break them, and watches what memory they touch. One
 * dispatch at a time in the whole process. A fault ends the dispatch; the first one is kept.
 *
 * Faults: part of a threadgroup misses a barrier, or part of a simdgroup an operation of all its
 * lanes; an access outside of what is bound, or a write to what is bound for reading; threadgroup
 * memory read before it is written; and races: two threads touch the same bytes, at least one of
 * them writing, with no barrier for that kind of memory in between.
 */
#ifndef TESTS_METAL_SIMULATOR_H
#define TESTS_METAL_SIMULATOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
    METAL_MAX_BUFFERS = 31,
    METAL_MAX_THREADS = 1024, /* a threadgroup */
    METAL_MAX_THREADGROUP_BYTES = 32768,
    METAL_MAX_CONSTANTS = 8,
    METAL_N_ORDERS = 10 /* of scheduling: see simulator.cpp */
};

/* ---- what kernels call, through the stand-in's metal_stdlib ----------------------------------*/

extern bool metal_fast_math; /* of the library whose kernel runs */

uint32_t metal_lane(void);
void metal_threadgroup_barrier(int mem_flags);
void metal_simdgroup_barrier(int mem_flags);
float metal_simd_sum(float value);
float metal_simd_max(float value);
uint32_t metal_simd_max_uint(uint32_t value);
uint32_t metal_simd_min_uint(uint32_t value);
float metal_simd_shuffle(float value, uint32_t lane);
/* d = a b + c of 8 by 8 matrices, of which lane i holds elements (i / 4, 2 (i % 4)) and the next */
void metal_simd_multiply(float *d, const float *a, const float *b, const float *c);

/* ---- functions --------------------------------------------------------------------------------*/

/* One argument of a kernel, for one thread. */
typedef struct metal_argument {
    void *pointer;  /* of a buffer or threadgroup memory */
    uint32_t value; /* of a position */
} metal_argument;

/* A kernel compiled for the CPU. */
typedef struct metal_compiled {
    const char *name;
    void (*call)(const metal_argument *arguments);
    const size_t *sizes; /* of each parameter that is a reference, and 0 */
    size_t n_parameters;
} metal_compiled;

typedef enum metal_parameter_kind {
    METAL_BUFFER,
    METAL_THREADGROUP,
    METAL_GROUP_IN_GRID,
    METAL_GROUPS_PER_GRID,
    METAL_THREAD_IN_GRID,
    METAL_THREAD_IN_GROUP,
    METAL_THREADS_PER_GROUP,
    METAL_SIMDGROUP_IN_GROUP,
    METAL_SIMDGROUPS_PER_GROUP,
    METAL_THREAD_IN_SIMDGROUP
} metal_parameter_kind;

typedef struct metal_parameter {
    metal_parameter_kind kind;
    uint32_t index; /* [[buffer(index)]], [[threadgroup(index)]] */
    bool writable;  /* a buffer that is neither const nor constant */
    size_t bytes;   /* the least that must be bound: a referenced struct's size */
} metal_parameter;

typedef struct metal_function {
    const metal_compiled *compiled;
    metal_parameter parameters[METAL_MAX_BUFFERS];
    size_t n_parameters;
} metal_function;

/* The kernel NAME of the program text SOURCE, which is where its attributes are read from. False,
 * with a message: no such kernel, or one that the stand-in cannot call. */
bool metal_function_find(metal_function *function, const metal_compiled *const *compiled,
                         const char *source, const char *name, char *message, size_t size);

/* ---- dispatches -------------------------------------------------------------------------------*/

typedef struct metal_launch {
    const metal_function *function;
    struct {
        void *data; /* NULL: not bound */
        size_t bytes;
    } buffers[METAL_MAX_BUFFERS];
    size_t threadgroup_bytes[METAL_MAX_BUFFERS];
    struct {
        const void *value; /* NULL: not set */
        size_t bytes;
    } constants[METAL_MAX_CONSTANTS];
    uint32_t n_groups, n_threads; /* threadgroups, threads in each */
    bool fast_math;
} metal_launch;

/* How dispatches run from now on: one of METAL_N_ORDERS, and whether accesses are watched. */
void metal_set_order(int order, uint64_t seed);
void metal_watch(bool accesses);

/* False when a fault ended it. */
bool metal_run(const metal_launch *launch);

/* A fault that a class of the stand-in has found; kept if it is the first. */
void metal_fault(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* The first fault since the last call, or NULL. Valid until the next fault. */
const char *metal_take_fault(void);

#ifdef __cplusplus
}
#endif
#endif
