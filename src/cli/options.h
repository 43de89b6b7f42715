/*
 * A small declarative option parser. Each command has one table that says what its options are,
 * where their values go and what they mean; parsing and --help both come from it. The variables
 * hold the defaults before parsing, and --help shows those.
 */
#ifndef BML_CLI_OPTIONS_H
#define BML_CLI_OPTIONS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum cli_kind {
    CLI_FLAG,   /* bool; takes no value */
    CLI_INT,    /* int from min to max */
    CLI_SEED,   /* uint64_t */
    CLI_FLOAT,  /* float from min to max */
    CLI_TEXT,   /* const char * */
    CLI_TEXTS,  /* cli_texts: may be given several times */
    CLI_CHOICE, /* int: an index into choices */
    CLI_GROUP   /* value is another table, whose options belong here */
} cli_kind;

typedef struct cli_texts {
    const char **items;
    size_t count;
} cli_texts;

typedef struct cli_option {
    const char *name; /* long, without dashes; NULL ends a table (except for a group) */
    char letter;      /* short; 0 for none */
    cli_kind kind;
    const void *value;    /* points to the variable, or to a group's table */
    const char *argument; /* the value's name in --help */
    const char *help;
    double min, max;            /* of numbers, inclusive; INT_MAX or FLT_MAX: no upper limit */
    bool above;                 /* min itself is not allowed */
    bool show_default;          /* --help names the variable's value */
    const char *const *choices; /* NULL-terminated */
    bool *given;                /* set when the option was there; may be NULL */
} cli_option;

struct cli_command;

enum { CLI_CONTINUE = -1 };

/*
 * Parses ARGV. What is not an option is moved to its front and counted in *N_OPERANDS. Returns
 * CLI_CONTINUE, or the exit status when there is nothing left to do: after --help (printed) or an
 * error (one line on stderr).
 */
int bml_cli_parse(const struct cli_command *command, int argc, char **argv, int *n_operands);

/* Prints the command's --help to stdout. */
void bml_cli_help(const struct cli_command *command);

/* How many letters must be changed to make A into B, for "did you mean"; 0 where B begins with A.
 */
size_t bml_cli_distance(const char *a, const char *b);

#endif
