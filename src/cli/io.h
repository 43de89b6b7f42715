/* Input, output and signals: whole files in, checked writes out, progress for people. */
#ifndef BML_CLI_IO_H
#define BML_CLI_IO_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Bytes, which may hold NUL; followed by a NUL that length does not count. */
typedef struct cli_text {
    char *data; /* freed by free */
    size_t length;
} cli_text;

/* Reads a whole file, or standard input when PATH is NULL or "-". False after an error line. */
bool bml_cli_read(const char *path, cli_text *text);

/* Write to stdout; after a failure these and all later calls return false. */
bool bml_cli_write(const void *data, size_t length);
__attribute__((format(printf, 1, 2))) bool bml_cli_print(const char *format, ...);
bool bml_cli_flush(void);

/* Flushes stdout. CLI_OK, or CLI_FAILED after an error line (none when the reader of a pipe has
 * gone away, which is no error of ours to explain). */
int bml_cli_finish_output(void);

/*
 * A progress line on stderr, when that is a terminal and QUIET is false: "WHAT: 40%". It is
 * redrawn a few times a second at most and erased by bml_cli_progress_end.
 */
void bml_cli_progress(const char *what, uint64_t done, uint64_t total, bool quiet);
void bml_cli_progress_end(void);

/* From now on the first interrupt (Ctrl-C, SIGTERM) only sets a flag; a second one kills. */
void bml_cli_catch_interrupt(void);

/* 0, or the exit status that tells of the signal: 130 for Ctrl-C, 143 for SIGTERM. */
int bml_cli_interrupted(void);

/* Seconds of a clock that never goes back. */
double bml_cli_seconds(void);

#endif
