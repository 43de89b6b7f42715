/* Where a command's tokens come from: text given, in a file or on stdin, or ids. */
#ifndef BML_CLI_PROMPT_H
#define BML_CLI_PROMPT_H

#include "cli.h"
#include "io.h"

/* -p, -f, --ids, --special */
extern const cli_option bml_cli_prompt_options[];

/* --ids, --special */
extern const cli_option bml_cli_ids_options[];

typedef struct cli_prompt {
    bool given;    /* false: no source at all was named */
    bool is_text;  /* text holds what to tokenise, else ids are final */
    cli_text text; /* as given; empty for ids */
    int32_t *ids;
    size_t n_ids;
} cli_prompt;

/*
 * Reads what the options and the one operand (a FILE or "-"; NULL for none) name, before any model
 * is loaded. CLI_OK, or an exit status after an error line. Free with bml_cli_prompt_free either
 * way.
 */
int bml_cli_prompt_read(const cli_command *command, const char *operand, cli_prompt *prompt);

/* Turns text into ids with the model's tokenizer. */
int bml_cli_prompt_tokenize(const bml_model *model, cli_prompt *prompt);

void bml_cli_prompt_free(cli_prompt *prompt);

/*
 * Adds the ids in TEXT (whole numbers separated by blanks or commas; brackets around them are
 * fine) to *IDS, which is freed by free. On failure *PROBLEM says what is wrong, with room for
 * 160 bytes.
 */
bool bml_cli_parse_ids(const char *text, size_t length, int32_t **ids, size_t *n_ids,
                       char *problem);

#endif
