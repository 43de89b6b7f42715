/* Time per kernel: collected from bml_session_trace, as a table and as a Chrome trace. */
#ifndef BML_CLI_PROFILE_H
#define BML_CLI_PROFILE_H

#include "cli.h"

typedef struct cli_profile cli_profile;

/* NULL when out of memory. */
cli_profile *bml_cli_profile_new(void);
void bml_cli_profile_free(cli_profile *profile);

/* The bml_trace_fn; its context is a cli_profile. */
void bml_cli_profile_kernel(void *profile, const char *kernel, int layer, double began,
                            double ended);

/* A table of the kernels, the slowest first, under a TITLE; nothing for an empty profile. */
void bml_cli_profile_print(const cli_profile *profile, const char *title);

/* Writes both phases to FILE in the Trace Event Format. */
int bml_cli_profile_write(const cli_profile *prefill, const cli_profile *decode, const char *file);

#endif
