/* What the subcommands share: how a command is described, exit statuses, and error lines. */
#ifndef BML_CLI_CLI_H
#define BML_CLI_CLI_H

#include "bml.h"

#include "options.h"

/* What main returns; and 128 + the signal's number when interrupted. */
enum { CLI_OK = 0, CLI_FAILED = 1, CLI_USAGE = 2 };

typedef struct cli_command {
    const char *name;
    const char *operands;    /* what follows the options, for the usage line: "[FILE|-]" */
    const char *summary;     /* one line, for bml --help */
    const char *description; /* a paragraph, for bml NAME --help */
    const cli_option *options;
    int max_operands; /* -1: any number */

    /* The options are in their variables by now. Returns an exit status; it has printed its own
     * error line by then. */
    int (*run)(int n_operands, char **operands);
} cli_command;

extern const cli_command bml_cli_generate, bml_cli_score, bml_cli_logits, bml_cli_tokenize,
    bml_cli_detokenize, bml_cli_bench, bml_cli_inspect, bml_cli_synth;

/* "bml: TEXT" as one line on stderr; returns CLI_FAILED. */
__attribute__((format(printf, 1, 2))) int bml_cli_fail(const char *format, ...);

/* The same for an error of the library. */
int bml_cli_report(const bml_error *err);

int bml_cli_fail_memory(void);

/* "bml COMMAND: TEXT; see bml COMMAND --help" as one line on stderr; returns CLI_USAGE. */
__attribute__((format(printf, 2, 3))) int bml_cli_misuse(const cli_command *command,
                                                         const char *format, ...);

#endif
