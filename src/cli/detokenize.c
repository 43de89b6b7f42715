/* bml detokenize: ids to text. */
#include "io.h"
#include "model.h"
#include "prompt.h"

#include <stdlib.h>
#include <string.h>

static const cli_option options[] = {{.kind = CLI_GROUP, .value = bml_cli_model_name_option}, {0}};

static int run(int n_operands, char **operands);

const cli_command bml_cli_detokenize = {
    .name = "detokenize",
    .operands = "[IDS|-]...",
    .summary = "token ids to text",
    .description =
        "Writes the bytes that token ids stand for, verbatim and with nothing added. The ids are "
        "arguments or come from standard input, separated by blanks, commas or line ends; "
        "brackets around them are fine.",
    .options = options,
    .max_operands = -1,
    .run = run};

static int ids_from_input(int32_t **ids, size_t *n)
{
    cli_text text;
    char problem[160];
    if (!bml_cli_read(NULL, &text))
        return CLI_FAILED;
    bool ok = bml_cli_parse_ids(text.data, text.length, ids, n, problem);
    free(text.data);
    return ok ? CLI_OK : bml_cli_fail("standard input: %s", problem);
}

static int read_ids(int n_operands, char **operands, int32_t **ids, size_t *n)
{
    char problem[160];
    int status = n_operands ? CLI_OK : ids_from_input(ids, n);
    for (int i = 0; !status && i < n_operands; i++) {
        if (!strcmp(operands[i], "-"))
            status = ids_from_input(ids, n);
        else if (!bml_cli_parse_ids(operands[i], strlen(operands[i]), ids, n, problem))
            status = bml_cli_misuse(&bml_cli_detokenize, "%s", problem);
    }
    return status;
}

static int detokenize(const int32_t *ids, size_t n)
{
    bml_error err;
    bml_tokenizer *tokenizer;
    if (bml_tokenizer_load(bml_cli_model_name, &tokenizer, &err))
        return bml_cli_report(&err);
    char *text;
    size_t length;
    bml_status result = bml_detokenize(tokenizer, ids, n, &text, &length, &err);
    bml_tokenizer_free(tokenizer);
    if (result)
        return bml_cli_report(&err);
    bml_cli_write(text, length);
    bml_free(text);
    return CLI_OK;
}

static int run(int n_operands, char **operands)
{
    int32_t *ids = NULL;
    size_t n = 0;
    int status = read_ids(n_operands, operands, &ids, &n);
    if (!status)
        status = detokenize(ids, n);
    free(ids);
    return status;
}
