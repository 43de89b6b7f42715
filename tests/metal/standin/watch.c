#include "watch.h"

#include "simulator.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { GRAIN = 2, MAX_REGIONS = 2 * METAL_MAX_BUFFERS };

/* Who touched GRAIN bytes last. Two readers are enough: of two, one is not the writer to come. */
typedef struct touch {
    uint32_t group, thread; /* thread + 1; 0 for nobody */
    uint32_t group_barriers, simdgroup_barriers;
} touch;

typedef struct cell {
    touch writer, reader, other_reader;
} cell;

typedef struct region {
    char *data;
    size_t bytes;
    bool writable, in_threadgroup;
    const char *what;
    uint32_t index;
    cell *cells; /* NULL: races are not watched here */
} region;

static region regions[MAX_REGIONS];
static size_t n_regions;
static bool watch_races;

static size_t cells_bytes(const region *r)
{
    return (r->bytes / GRAIN + 2) * sizeof(cell);
}

void watch_begin(bool races)
{
    n_regions = 0;
    watch_races = races;
}

void watch_add(void *data, size_t bytes, bool writable, bool in_threadgroup, const char *what,
               uint32_t index)
{
    region r = {data, bytes, writable, in_threadgroup, what, index, NULL};
    if (writable && watch_races) { /* zeroed, and resident only where it is touched */
        r.cells = mmap(NULL, cells_bytes(&r), PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (r.cells == MAP_FAILED)
            r.cells = NULL;
    }
    /* What may be written is looked up first, in case the same memory is bound for reading too. */
    size_t at = writable ? 0 : n_regions;
    memmove(regions + at + 1, regions + at, (n_regions - at) * sizeof *regions);
    regions[at] = r;
    n_regions++;
}

void watch_next_group(void)
{
    for (size_t i = 0; i < n_regions; i++)
        if (regions[i].in_threadgroup) {
            memset(regions[i].data, 0xff, regions[i].bytes); /* NaN, and far out as an index */
            if (regions[i].cells)
                memset(regions[i].cells, 0, cells_bytes(&regions[i]));
        }
}

void watch_end(void)
{
    for (size_t i = 0; i < n_regions; i++)
        if (regions[i].cells)
            munmap(regions[i].cells, cells_bytes(&regions[i]));
    n_regions = 0;
}

/* Whether EARLIER, by another thread, need not have happened yet, or may be happening now. */
static bool unordered(const touch *earlier, const watch_moment *now, bool in_threadgroup)
{
    if (!earlier->thread)
        return false;
    uint32_t thread = earlier->thread - 1;
    if (earlier->group != now->group)
        return true; /* threadgroups of a dispatch run in any order */
    if (thread == now->thread || earlier->group_barriers < now->group_barriers[in_threadgroup])
        return false;
    bool same_simdgroup = thread / 32 == now->thread / 32;
    return !same_simdgroup ||
           earlier->simdgroup_barriers >= now->simdgroup_barriers[in_threadgroup];
}

static bool race(const region *r, const void *address, const touch *earlier, const char *first,
                 const char *second, const watch_moment *now)
{
    metal_fault("race on %s(%u), byte %zu: %s by thread %u of threadgroup %u and %s by thread %u "
                "of threadgroup %u with no barrier for this memory between them",
                r->what, r->index, (size_t)((const char *)address - r->data), first,
                earlier->thread - 1, earlier->group, second, now->thread, now->group);
    return false;
}

static bool touch_cell(const region *r, cell *c, const void *address, bool store,
                       const watch_moment *now)
{
    bool local = r->in_threadgroup;
    touch own = {now->group, now->thread + 1, now->group_barriers[local],
                 now->simdgroup_barriers[local]};
    if (unordered(&c->writer, now, local))
        return race(r, address, &c->writer, "a write", store ? "a write" : "a read", now);
    if (!store) {
        if (local && !c->writer.thread) {
            metal_fault("thread %u reads byte %zu of threadgroup(%u) before anything is written "
                        "there",
                        now->thread, (size_t)((const char *)address - r->data), r->index);
            return false;
        }
        if (c->reader.thread != own.thread || c->reader.group != own.group)
            c->other_reader = c->reader;
        c->reader = own;
        return true;
    }
    if (unordered(&c->reader, now, local))
        return race(r, address, &c->reader, "a read", "a write", now);
    if (unordered(&c->other_reader, now, local))
        return race(r, address, &c->other_reader, "a read", "a write", now);
    c->writer = own;
    c->reader = c->other_reader = (touch){0};
    return true;
}

/* The program's own data: function constants, tables, the exchange between lanes. */
static bool in_program(const char *p)
{
    extern char __executable_start[], _end[];
    return p >= __executable_start && p < _end;
}

bool watch_access(const void *address, size_t bytes, bool store, const watch_moment *now)
{
    const char *p = address;
    for (size_t i = 0; i < n_regions; i++) {
        const region *r = &regions[i];
        if (p < r->data || p >= r->data + r->bytes)
            continue;
        size_t at = (size_t)(p - r->data);
        if (bytes > r->bytes - at)
            break;
        if (store && !r->writable) {
            metal_fault("thread %u of threadgroup %u writes byte %zu of %s(%u), which is bound for "
                        "reading",
                        now->thread, now->group, at, r->what, r->index);
            return false;
        }
        for (size_t b = at / GRAIN; r->cells && b < (at + bytes + GRAIN - 1) / GRAIN; b++)
            if (!touch_cell(r, &r->cells[b], p, store, now))
                return false;
        return true;
    }
    if (!store && in_program(p))
        return true;
    metal_fault("thread %u of threadgroup %u %s %zu bytes outside of everything bound", now->thread,
                now->group, store ? "writes" : "reads", bytes);
    return false;
}
