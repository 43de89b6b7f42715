/* Filling a bml_error: every failure in the library passes through here. */
#ifndef BML_BASE_ERROR_H
#define BML_BASE_ERROR_H

#include "bml.h"

/* Fills ERR (which may be NULL) with one line of text and returns CODE. */
__attribute__((format(printf, 3, 4))) bml_status bml_fail(bml_error *err, bml_status code,
                                                          const char *format, ...);

/* The error for a failed allocation of SIZE bytes; WHAT names what they were for. */
bml_status bml_fail_memory(bml_error *err, size_t size, const char *what);

/* Puts "PREFIX: " in front of the message of an error that is already filled. */
void bml_error_prefix(bml_error *err, const char *prefix);

/* The same with "step STEP". */
void bml_error_step(bml_error *err, uint64_t step);

#endif
