/* What tests ask of the stand-in for Metal, and tell it. */
#ifndef TESTS_METAL_STANDIN_H
#define TESTS_METAL_STANDIN_H

#include "simulator.h"

/* Since the program began. */
typedef struct standin_counts {
    size_t live_objects;    /* not yet deallocated */
    size_t command_buffers; /* committed */
    size_t encoders, dispatches;
    size_t buffers, wrapped; /* made; of these, over the caller's own memory */
    size_t functions, pipelines, libraries;
    size_t most_threadgroup_bytes; /* of a dispatch */
} standin_counts;

standin_counts standin_get_counts(void);

/* The kernels that newLibraryWithSource can give: the backend's own unless a test says otherwise.
 */
void standin_use_library(const metal_compiled *const *kernels);

/* Whether there is a device, and whether the next things asked of it fail. */
void standin_set_device(bool present, bool has_matrices);
void standin_fail_pipelines(bool fail);
void standin_fail_buffers(bool fail);
void standin_refuse_pages(bool refuse); /* buffers over the caller's own memory */

/* As though compile options had asked for fast math. */
void standin_assume_fast_math(bool assume);

#endif
