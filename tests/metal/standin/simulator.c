#include "simulator.h"

#include "fiber.h"
#include "watch.h"

#include <math.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LANES = 32, MAX_SIMDGROUPS = METAL_MAX_THREADS / LANES };

bool metal_fast_math;

/* ---- faults -----------------------------------------------------------------------------------*/

static char fault[512];
static bool fault_taken = true; /* whether the message has been handed out */

void metal_fault(const char *format, ...)
{
    if (!fault_taken)
        return;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(fault, sizeof fault, format, arguments);
    va_end(arguments);
    fault_taken = false;
}

const char *metal_take_fault(void)
{
    const char *taken = fault_taken ? NULL : fault;
    fault_taken = true;
    return taken;
}

/* ---- the threadgroup that is running ----------------------------------------------------------*/

typedef enum fiber_state { READY, AT_SIMD, AT_BARRIER, DONE } fiber_state;

typedef enum simd_operation {
    SUM,
    MAX,
    MAX_UINT,
    MIN_UINT,
    SHUFFLE,
    MULTIPLY,
    BARRIER
} simd_operation;

typedef struct fiber {
    void *stack_pointer;
    fiber_state state;
} fiber;

/* What the lanes of a simdgroup bring to an operation and take away from it. The last lane to come
 * does it for all; results have two turns, for a lane may be at the next one already. */
typedef struct simdgroup {
    simd_operation operation;
    int flags; /* of a barrier */
    uint32_t n_arrived, turn;
    union {
        float number;
        uint32_t integer;
        struct {
            const float *a, *b, *c;
            float *d;
        } matrix;
    } in[LANES];
    union {
        float number[LANES];
        uint32_t integer;
    } out[2];
} simdgroup;

static struct {
    const metal_launch *launch;
    char *stacks;
    void *threadgroup_memory[METAL_MAX_BUFFERS];
    uint32_t group;
    uint32_t n_threads, n_simdgroups;
    fiber fibers[METAL_MAX_THREADS];
    simdgroup simdgroups[MAX_SIMDGROUPS];
    uint32_t ready[MAX_SIMDGROUPS];       /* its lanes that can run, a bit each */
    watch_moment moments[MAX_SIMDGROUPS]; /* of each simdgroup's threads; .thread is not kept */
    uint32_t n_at_barrier;
    int barrier_flags;
    uint32_t current; /* the running thread */
    bool running;     /* a fiber is, not the scheduler */
    bool given_up;
    void *scheduler;
} gpu;

static int order;
static uint64_t order_seed;
static bool watching = true;
static pthread_mutex_t one_dispatch = PTHREAD_MUTEX_INITIALIZER;

void metal_set_order(int new_order, uint64_t seed)
{
    order = new_order;
    order_seed = seed * 0x9e3779b97f4a7c15 + 1;
}

void metal_watch(bool accesses)
{
    watching = accesses;
}

static uint32_t below(uint32_t n)
{
    order_seed = order_seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((order_seed >> 33) % n);
}

/* From a fiber to the scheduler, until that comes back to it. */
static void yield(fiber_state state)
{
    fiber *f = &gpu.fibers[gpu.current];
    f->state = state;
    if (state == READY)
        gpu.ready[gpu.current / LANES] |= 1u << gpu.current % LANES;
    gpu.running = false;
    fiber_switch(&f->stack_pointer, gpu.scheduler);
    gpu.running = true;
}

/* Ends the dispatch from within a fiber, which never goes on. */
static void give_up(void)
{
    gpu.given_up = true;
    yield(DONE);
}

/* ---- what kernels call ------------------------------------------------------------------------*/

uint32_t metal_lane(void)
{
    return gpu.current % LANES;
}

static void passed_barrier(watch_moment *moment, int flags, bool whole_group)
{
    uint32_t *count = whole_group ? moment->group_barriers : moment->simdgroup_barriers;
    count[0] += (flags & 1) != 0;
    count[1] += (flags & 2) != 0;
}

void metal_threadgroup_barrier(int flags)
{
    if (gpu.n_at_barrier && gpu.barrier_flags != flags) {
        metal_fault("threads of threadgroup %u meet at different barriers", gpu.group);
        give_up();
    }
    gpu.barrier_flags = flags;
    if (++gpu.n_at_barrier < gpu.n_threads) {
        yield(AT_BARRIER);
        return;
    }
    gpu.n_at_barrier = 0;
    for (uint32_t s = 0; s < gpu.n_simdgroups; s++) {
        passed_barrier(&gpu.moments[s], flags, true);
        gpu.ready[s] = ~0u;
    }
    yield(READY); /* whoever came last does not have to go on first */
}

static void multiply_matrices(const simdgroup *s)
{
    float a[8][8], b[8][8], sum[8][8];
    for (int i = 0; i < LANES; i++)
        for (int e = 0; e < 2; e++) {
            a[i / 4][i % 4 * 2 + e] = s->in[i].matrix.a[e];
            b[i / 4][i % 4 * 2 + e] = s->in[i].matrix.b[e];
            sum[i / 4][i % 4 * 2 + e] = s->in[i].matrix.c[e];
        }
    for (int row = 0; row < 8; row++)
        for (int k = 0; k < 8; k++)
            for (int col = 0; col < 8; col++)
                sum[row][col] += a[row][k] * b[k][col];
    for (int i = 0; i < LANES; i++)
        for (int e = 0; e < 2; e++)
            s->in[i].matrix.d[e] = sum[i / 4][i % 4 * 2 + e];
}

static void perform(simdgroup *s)
{
    float *numbers = s->out[s->turn].number;
    for (int i = 0; i < LANES && s->operation != MULTIPLY; i++)
        numbers[i] = s->in[i].number;
    switch (s->operation) {
    case SUM: /* a tree, as the hardware's: neither order of the lanes is that of the sum */
        for (int step = LANES / 2; step; step /= 2)
            for (int i = 0; i < step; i++)
                numbers[i] += numbers[i + step];
        break;
    case MAX:
        for (int i = 1; i < LANES; i++)
            numbers[0] = fmaxf(numbers[0], numbers[i]);
        break;
    case MAX_UINT:
    case MIN_UINT:
        for (int i = 1; i < LANES; i++) {
            bool takes = s->operation == MAX_UINT ? s->in[i].integer > s->out[s->turn].integer
                                                  : s->in[i].integer < s->out[s->turn].integer;
            s->out[s->turn].integer = takes ? s->in[i].integer : s->out[s->turn].integer;
        }
        break;
    case MULTIPLY:
        multiply_matrices(s);
        break;
    case BARRIER:
        passed_barrier(&gpu.moments[gpu.current / LANES], s->flags, false);
        break;
    case SHUFFLE:
        break;
    }
}

/* The lane is here; returns the simdgroup's turn once all of them are. */
static uint32_t meet(simd_operation operation, int flags)
{
    simdgroup *s = &gpu.simdgroups[gpu.current / LANES];
    if (s->n_arrived && (s->operation != operation || s->flags != flags)) {
        metal_fault("lanes of simdgroup %u of threadgroup %u meet at different operations",
                    gpu.current / LANES, gpu.group);
        give_up();
    }
    s->operation = operation;
    s->flags = flags;
    uint32_t turn = s->turn;
    if (++s->n_arrived < LANES) {
        yield(AT_SIMD);
        return turn;
    }
    perform(s);
    s->n_arrived = 0;
    s->turn ^= 1;
    gpu.ready[gpu.current / LANES] = ~0u;
    yield(READY);
    return turn;
}

static simdgroup *own_simdgroup(void)
{
    return &gpu.simdgroups[gpu.current / LANES];
}

void metal_simdgroup_barrier(int flags)
{
    meet(BARRIER, flags);
}

float metal_simd_sum(float value)
{
    own_simdgroup()->in[metal_lane()].number = value;
    uint32_t turn = meet(SUM, 0);
    return own_simdgroup()->out[turn].number[0];
}

float metal_simd_max(float value)
{
    own_simdgroup()->in[metal_lane()].number = value;
    uint32_t turn = meet(MAX, 0);
    return own_simdgroup()->out[turn].number[0];
}

uint32_t metal_simd_max_uint(uint32_t value)
{
    own_simdgroup()->in[metal_lane()].integer = value;
    uint32_t turn = meet(MAX_UINT, 0);
    return own_simdgroup()->out[turn].integer;
}

uint32_t metal_simd_min_uint(uint32_t value)
{
    own_simdgroup()->in[metal_lane()].integer = value;
    uint32_t turn = meet(MIN_UINT, 0);
    return own_simdgroup()->out[turn].integer;
}

float metal_simd_shuffle(float value, uint32_t lane)
{
    if (lane >= LANES) {
        metal_fault("a shuffle from lane %u", lane);
        give_up();
    }
    own_simdgroup()->in[metal_lane()].number = value;
    uint32_t turn = meet(SHUFFLE, 0);
    return own_simdgroup()->out[turn].number[lane];
}

void metal_simd_multiply(float *d, const float *a, const float *b, const float *c)
{
    simdgroup *s = own_simdgroup();
    s->in[metal_lane()].matrix.a = a;
    s->in[metal_lane()].matrix.b = b;
    s->in[metal_lane()].matrix.c = c;
    s->in[metal_lane()].matrix.d = d;
    meet(MULTIPLY, 0);
}

/* ---- accesses: the compiler calls these at every load and store of a kernel
 * ---------------------*/

static void on_access(const void *address, size_t bytes, bool store)
{
    if (!gpu.running || !watching)
        return;
    const char *p = address;
    if (p >= gpu.stacks && p < gpu.stacks + (size_t)METAL_MAX_THREADS * FIBER_STACK_BYTES)
        return; /* a thread's own variables */
    gpu.moments[gpu.current / LANES].thread = gpu.current;
    if (!watch_access(address, bytes, store, &gpu.moments[gpu.current / LANES]))
        give_up();
}

void __sanitizer_cov_load1(uint8_t *p);
void __sanitizer_cov_load2(uint16_t *p);
void __sanitizer_cov_load4(uint32_t *p);
void __sanitizer_cov_load8(uint64_t *p);
void __sanitizer_cov_load16(void *p);
void __sanitizer_cov_store1(uint8_t *p);
void __sanitizer_cov_store2(uint16_t *p);
void __sanitizer_cov_store4(uint32_t *p);
void __sanitizer_cov_store8(uint64_t *p);
void __sanitizer_cov_store16(void *p);

void __sanitizer_cov_load1(uint8_t *p)
{
    on_access(p, 1, false);
}

void __sanitizer_cov_load2(uint16_t *p)
{
    on_access(p, 2, false);
}

void __sanitizer_cov_load4(uint32_t *p)
{
    on_access(p, 4, false);
}

void __sanitizer_cov_load8(uint64_t *p)
{
    on_access(p, 8, false);
}

void __sanitizer_cov_load16(void *p)
{
    on_access(p, 16, false);
}

void __sanitizer_cov_store1(uint8_t *p)
{
    on_access(p, 1, true);
}

void __sanitizer_cov_store2(uint16_t *p)
{
    on_access(p, 2, true);
}

void __sanitizer_cov_store4(uint32_t *p)
{
    on_access(p, 4, true);
}

void __sanitizer_cov_store8(uint64_t *p)
{
    on_access(p, 8, true);
}

void __sanitizer_cov_store16(void *p)
{
    on_access(p, 16, true);
}

/* ---- scheduling -------------------------------------------------------------------------------*/

/*
 * Orders. A simdgroup runs until all its lanes wait; then, going deep, the same one goes on as long
 * as it can, so that it is as far ahead as barriers allow; going broad, the next one has its turn.
 *   0, 1: deep, simdgroups and lanes in ascending, descending order
 *   2, 3: broad, likewise
 *   4, 5: deep, the first, the last simdgroup only when no other can run
 *   6, 7: broad, simdgroups ascending and lanes descending, and the reverse
 *   8, 9: at random, threadgroups too
 */
static bool descending_groups(void)
{
    return order == 1 || order == 3 || order == 5 || order == 7;
}

/* The simdgroup to run after LAST; MAX_SIMDGROUPS if none can. */
static uint32_t next_simdgroup(uint32_t last)
{
    uint32_t n = gpu.n_simdgroups, first = order >= 8 ? below(n) : 0;
    bool deep = order == 0 || order == 1 || order == 4 || order == 5, broad = !deep && order < 8;
    if (deep && last < n && gpu.ready[last])
        return last;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t s = descending_groups() ? n - 1 - i : i;
        if (order == 4)
            s = (i + 1) % n;
        else if (order == 5)
            s = n - 1 - (i + 1) % n;
        else if (broad && last < n)
            s = descending_groups() ? (last + n - 1 - i) % n : (last + 1 + i) % n;
        else if (order >= 8)
            s = (first + i) % n;
        if (gpu.ready[s])
            return s;
    }
    return MAX_SIMDGROUPS;
}

static void run_lanes(uint32_t s)
{
    bool descending = order == 1 || order == 3 || order == 6 || (order >= 8 && below(2));
    uint32_t offset = order >= 8 ? below(LANES) : 0;
    uint32_t ready = gpu.ready[s]; /* those that become so meanwhile wait for the next turn */
    gpu.ready[s] = 0;
    for (uint32_t i = 0; i < LANES && !gpu.given_up; i++) {
        uint32_t lane = ((descending ? LANES - 1 - i : i) + offset) % LANES;
        if (!(ready >> lane & 1))
            continue;
        gpu.current = s * LANES + lane;
        gpu.running = true;
        fiber_switch(&gpu.scheduler, gpu.fibers[gpu.current].stack_pointer);
        gpu.running = false;
    }
}

/* Nobody can run: all have ended, or some wait for others that will not come. */
static void check_all_done(void)
{
    uint32_t count[DONE + 1] = {0};
    for (uint32_t t = 0; t < gpu.n_threads; t++)
        count[gpu.fibers[t].state]++;
    if (count[AT_SIMD])
        metal_fault("%u threads of threadgroup %u wait for the other lanes of their simdgroups, "
                    "which have ended or wait elsewhere",
                    count[AT_SIMD], gpu.group);
    else if (count[AT_BARRIER])
        metal_fault("%u threads of threadgroup %u wait at a barrier that the other %u miss",
                    count[AT_BARRIER], gpu.group, gpu.n_threads - count[AT_BARRIER]);
    gpu.given_up |= count[DONE] != gpu.n_threads;
}

static uint32_t position(metal_parameter_kind kind)
{
    const metal_launch *l = gpu.launch;
    switch (kind) {
    case METAL_GROUP_IN_GRID:
        return gpu.group;
    case METAL_GROUPS_PER_GRID:
        return l->n_groups;
    case METAL_THREAD_IN_GRID:
        return gpu.group * l->n_threads + gpu.current;
    case METAL_THREAD_IN_GROUP:
        return gpu.current;
    case METAL_THREADS_PER_GROUP:
        return l->n_threads;
    case METAL_SIMDGROUP_IN_GROUP:
        return gpu.current / LANES;
    case METAL_SIMDGROUPS_PER_GROUP:
        return gpu.n_simdgroups;
    default:
        return gpu.current % LANES;
    }
}

static void fiber_entry(void)
{
    const metal_launch *l = gpu.launch;
    metal_argument arguments[METAL_MAX_BUFFERS] = {0};
    for (size_t i = 0; i < l->function->n_parameters; i++) {
        const metal_parameter *p = &l->function->parameters[i];
        if (p->kind == METAL_BUFFER)
            arguments[i].pointer = l->buffers[p->index].data;
        else if (p->kind == METAL_THREADGROUP)
            arguments[i].pointer = gpu.threadgroup_memory[p->index];
        else
            arguments[i].value = position(p->kind);
    }
    l->function->compiled->call(arguments);
    yield(DONE);
}

static void run_group(uint32_t group)
{
    gpu.group = group;
    gpu.n_at_barrier = 0;
    memset(gpu.simdgroups, 0, sizeof gpu.simdgroups);
    memset(gpu.moments, 0, sizeof gpu.moments);
    for (uint32_t s = 0; s < gpu.n_simdgroups; s++) {
        gpu.moments[s].group = group;
        gpu.ready[s] = ~0u;
    }
    watch_next_group();
    for (uint32_t t = 0; t < gpu.n_threads; t++)
        gpu.fibers[t] =
            (fiber){fiber_start(gpu.stacks + (size_t)t * FIBER_STACK_BYTES, fiber_entry), READY};
    for (uint32_t last = MAX_SIMDGROUPS; !gpu.given_up;) {
        last = next_simdgroup(last);
        if (last == MAX_SIMDGROUPS) {
            check_all_done();
            return;
        }
        run_lanes(last);
    }
}

/* Threadgroups in ascending or descending order or, at random, by a stride that reaches all. */
static void run_groups(void)
{
    uint32_t n = gpu.launch->n_groups, stride = 1, at = order >= 8 ? below(n) : 0;
    if (order >= 8)
        for (stride = 1 + below(n); stride > 1; stride--) {
            uint32_t a = stride, b = n;
            while (b) {
                uint32_t rest = a % b;
                a = b;
                b = rest;
            }
            if (a == 1)
                break;
        }
    for (uint32_t i = 0; i < n && !gpu.given_up; i++) {
        run_group(descending_groups() ? n - 1 - at : at);
        at = (uint32_t)(((uint64_t)at + stride) % n);
    }
}

/* ---- dispatches -------------------------------------------------------------------------------*/

/* The section of each function constant; absent where a library has none of that number. */
#define CONSTANT(n)                                                                                \
    extern char __start_metal_constant_##n[] __attribute__((weak));                                \
    extern char __stop_metal_constant_##n[] __attribute__((weak));
CONSTANT(0)
CONSTANT(1)
CONSTANT(2)
CONSTANT(3)
CONSTANT(4)
CONSTANT(5)
CONSTANT(6)
CONSTANT(7)

static bool set_constants(const metal_launch *l)
{
    char *const sections[METAL_MAX_CONSTANTS][2] = {
        {__start_metal_constant_0, __stop_metal_constant_0},
        {__start_metal_constant_1, __stop_metal_constant_1},
        {__start_metal_constant_2, __stop_metal_constant_2},
        {__start_metal_constant_3, __stop_metal_constant_3},
        {__start_metal_constant_4, __stop_metal_constant_4},
        {__start_metal_constant_5, __stop_metal_constant_5},
        {__start_metal_constant_6, __stop_metal_constant_6},
        {__start_metal_constant_7, __stop_metal_constant_7},
    };
    for (size_t i = 0; i < METAL_MAX_CONSTANTS; i++) {
        size_t bytes = (size_t)(sections[i][1] - sections[i][0]);
        if (l->constants[i].value && l->constants[i].bytes != bytes) {
            metal_fault("function constant %zu has %zu bytes and is given %zu", i, bytes,
                        l->constants[i].bytes);
            return false;
        }
        /* One that is not given must not be used: it holds nothing sensible. */
        if (l->constants[i].value)
            memcpy(sections[i][0], l->constants[i].value, bytes);
        else if (bytes)
            memset(sections[i][0], bytes == 1 ? 1 : 0x7e, bytes);
    }
    return true;
}

static bool check_launch(const metal_launch *l)
{
    const char *name = l->function->compiled->name;
    if (!l->n_groups || !l->n_threads || l->n_threads % LANES || l->n_threads > METAL_MAX_THREADS) {
        metal_fault("%s: %u threadgroups of %u threads; threads must be a multiple of %d up to %d",
                    name, l->n_groups, l->n_threads, LANES, METAL_MAX_THREADS);
        return false;
    }
    size_t local = 0;
    for (size_t i = 0; i < l->function->n_parameters; i++) {
        const metal_parameter *p = &l->function->parameters[i];
        if (p->kind == METAL_BUFFER && !l->buffers[p->index].data) {
            metal_fault("%s: nothing is bound to buffer(%u)", name, p->index);
            return false;
        }
        if (p->kind == METAL_BUFFER && l->buffers[p->index].bytes < p->bytes) {
            metal_fault("%s: buffer(%u) has %zu bytes and needs %zu", name, p->index,
                        l->buffers[p->index].bytes, p->bytes);
            return false;
        }
        if (p->kind == METAL_THREADGROUP && !l->threadgroup_bytes[p->index]) {
            metal_fault("%s: threadgroup(%u) has no memory", name, p->index);
            return false;
        }
    }
    for (size_t i = 0; i < METAL_MAX_BUFFERS; i++) {
        local += l->threadgroup_bytes[i];
        if (l->threadgroup_bytes[i] % 16) {
            metal_fault("%s: %zu bytes of threadgroup memory are not a multiple of 16", name,
                        l->threadgroup_bytes[i]);
            return false;
        }
    }
    if (local > METAL_MAX_THREADGROUP_BYTES) {
        metal_fault("%s: %zu bytes of threadgroup memory; there are %d", name, local,
                    METAL_MAX_THREADGROUP_BYTES);
        return false;
    }
    return true;
}

static bool prepare(const metal_launch *l)
{
    gpu.launch = l;
    gpu.n_threads = l->n_threads;
    gpu.n_simdgroups = l->n_threads / LANES;
    gpu.given_up = false;
    metal_fast_math = l->fast_math;
    if (!gpu.stacks)
        gpu.stacks = fiber_stacks_new(METAL_MAX_THREADS);
    if (!gpu.stacks) {
        metal_fault("no memory for the threads' stacks");
        return false;
    }
    watch_begin(watching);
    for (size_t i = 0; i < l->function->n_parameters; i++) {
        const metal_parameter *p = &l->function->parameters[i];
        if (p->kind == METAL_BUFFER)
            watch_add(l->buffers[p->index].data, l->buffers[p->index].bytes, p->writable, false,
                      "buffer", p->index);
        if (p->kind != METAL_THREADGROUP)
            continue;
        /* From malloc, so that AddressSanitizer knows where it ends. */
        void *memory = malloc(l->threadgroup_bytes[p->index]);
        if (!memory) {
            metal_fault("no memory for a threadgroup");
            return false;
        }
        gpu.threadgroup_memory[p->index] = memory;
        watch_add(memory, l->threadgroup_bytes[p->index], true, true, "threadgroup", p->index);
    }
    return true;
}

static void tidy(void)
{
    watch_end();
    for (size_t i = 0; i < METAL_MAX_BUFFERS; i++) {
        free(gpu.threadgroup_memory[i]);
        gpu.threadgroup_memory[i] = NULL;
    }
    fiber_stacks_free(gpu.given_up ? gpu.stacks : NULL, METAL_MAX_THREADS);
    gpu.stacks = gpu.given_up ? NULL : gpu.stacks;
    gpu.launch = NULL;
}

bool metal_run(const metal_launch *launch)
{
    pthread_mutex_lock(&one_dispatch);
    bool fine = set_constants(launch) && check_launch(launch);
    if (fine) {
        fine = prepare(launch);
        if (fine)
            run_groups();
        fine &= !gpu.given_up;
        tidy();
    }
    pthread_mutex_unlock(&one_dispatch);
    return fine;
}
