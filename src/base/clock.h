/* Wall time for statistics. */
#ifndef BML_BASE_CLOCK_H
#define BML_BASE_CLOCK_H

#include <time.h>

/* Seconds from a fixed point in the past. */
static inline double bml_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

#endif
