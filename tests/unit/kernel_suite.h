/*
 * The fourteen kernels of any backend against float64 loops: random shapes, odd sizes, poisoned
 * outputs. Errors are held against the sum of absolute terms, so a bound means the same for every
 * shape.
 */
#ifndef TESTS_KERNEL_SUITE_H
#define TESTS_KERNEL_SUITE_H

#include "backend/backend.h"

typedef struct kernel_suite {
    const char *title;
    const bml_backend *backend;
    int n_threads; /* of the queue; 0: the backend's own choice */
    uint64_t seed;
    /* Products with Q8 and Q4 weights round activations to int8 first, in blocks of 64. */
    bool quantizes_activations;
    /* Those blocks' scales are powers of two of the row's, as backend/cpu/quant.h has it; otherwise
     * each block has its own. */
    bool scales_by_row;
    /* Packs Q8 and Q4 weights into the layout of backend/cpu/quant.h; where the backend under test
     * has a layout of its own, the values it holds must be those. */
    const bml_backend *packer;
    bool few; /* a tool slows everything down: fewer of what takes longest */
} kernel_suite;

/* The number of tests that failed. */
int run_kernel_suite(const kernel_suite *suite);

#endif
