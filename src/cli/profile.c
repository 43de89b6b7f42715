#include "profile.h"

#include "io.h"

#include <errno.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

typedef struct kernel_event {
    const char *kernel; /* a literal of the library */
    int layer;
    double began, ended;
} kernel_event;

struct cli_profile {
    kernel_event *events;
    size_t n, capacity;
    bool out_of_memory;
};

cli_profile *bml_cli_profile_new(void)
{
    return calloc(1, sizeof(cli_profile));
}

void bml_cli_profile_free(cli_profile *p)
{
    if (p)
        free(p->events);
    free(p);
}

void bml_cli_profile_kernel(void *profile, const char *kernel, int layer, double began,
                            double ended)
{
    cli_profile *p = profile;
    if (p->n == p->capacity) {
        size_t capacity = p->capacity ? 2 * p->capacity : 256;
        kernel_event *grown = realloc(p->events, capacity * sizeof *grown);
        p->out_of_memory |= !grown;
        if (!grown)
            return;
        p->events = grown;
        p->capacity = capacity;
    }
    p->events[p->n++] = (kernel_event){kernel, layer, began, ended};
}

/* ---- the table -------------------------------------------------------------------------------*/

typedef struct total {
    const char *kernel;
    int calls;
    double seconds;
} total;

static int slowest_first(const void *a, const void *b)
{
    double x = ((const total *)a)->seconds, y = ((const total *)b)->seconds;
    return (x < y) - (x > y);
}

void bml_cli_profile_print(const cli_profile *p, const char *title)
{
    enum { MOST = 32 }; /* there are fourteen kernels */
    total totals[MOST] = {0};
    size_t n = 0;
    double all = 0;
    for (size_t i = 0; i < p->n; i++) {
        size_t t = 0;
        while (t < n && strcmp(totals[t].kernel, p->events[i].kernel))
            t++;
        if (t == MOST)
            continue;
        n += t == n;
        totals[t].kernel = p->events[i].kernel;
        totals[t].calls++;
        totals[t].seconds += p->events[i].ended - p->events[i].began;
        all += p->events[i].ended - p->events[i].began;
    }
    if (!n)
        return;
    qsort(totals, n, sizeof *totals, slowest_first);
    bml_cli_print("%s, kernel by kernel: %.3f ms\n", title, 1e3 * all);
    for (size_t t = 0; t < n; t++)
        bml_cli_print("  %-18s %5d calls %10.3f ms %5.1f%%\n", totals[t].kernel, totals[t].calls,
                      1e3 * totals[t].seconds, 100 * totals[t].seconds / all);
}

/* ---- the trace -------------------------------------------------------------------------------*/

/* Complete events ("ph": "X") of one phase, as one named track; times in microseconds. */
static void add_track(json_t *events, const cli_profile *p, const char *name, int track,
                      double origin)
{
    json_array_append_new(events,
                          json_pack("{s:s, s:s, s:i, s:i, s:{s:s}}", "name", "thread_name", "ph",
                                    "M", "pid", 1, "tid", track, "args", "name", name));
    for (size_t i = 0; i < p->n; i++) {
        const kernel_event *e = &p->events[i];
        json_array_append_new(
            events, json_pack("{s:s, s:s, s:i, s:i, s:f, s:f, s:{s:i}}", "name", e->kernel, "ph",
                              "X", "pid", 1, "tid", track, "ts", 1e6 * (e->began - origin), "dur",
                              1e6 * (e->ended - e->began), "args", "layer", e->layer));
    }
}

int bml_cli_profile_write(const cli_profile *prefill, const cli_profile *decode, const char *file)
{
    if (prefill->out_of_memory || decode->out_of_memory)
        return bml_cli_fail_memory();
    json_t *events = json_array();
    json_t *object = json_pack("{s:s, s:O}", "displayTimeUnit", "ms", "traceEvents", events);
    double origin = prefill->n ? prefill->events[0].began : decode->n ? decode->events[0].began : 0;
    add_track(events, prefill, "prefill", 1, origin);
    add_track(events, decode, "decode", 2, origin);
    int status = CLI_OK;
    if (!object || json_array_size(events) != prefill->n + decode->n + 2)
        status = bml_cli_fail_memory();
    else if (json_dump_file(object, file, JSON_COMPACT | JSON_REAL_PRECISION(12)))
        status = bml_cli_fail("%s: cannot write the trace: %s", file, strerror(errno));
    json_decref(object);
    json_decref(events);
    return status;
}
