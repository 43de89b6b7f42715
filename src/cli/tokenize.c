/* bml tokenize: text to ids. */
#include "io.h"
#include "json.h"
#include "model.h"

#include <stdlib.h>

static bool parse_special, as_json;

static const cli_option options[] = {
    {.name = "special",
     .kind = CLI_FLAG,
     .value = &parse_special,
     .help = "special tokens such as <|endoftext|> in the text are tokens, not plain text"},
    {.name = "json",
     .kind = CLI_FLAG,
     .value = &as_json,
     .help = "print one JSON object with the ids and the text of each"},
    {.kind = CLI_GROUP, .value = bml_cli_model_name_option},
    {0}};

static int print_json(const bml_tokenizer *tokenizer, const int32_t *ids, size_t n)
{
    bool ok = bml_cli_print("{\"ids\": [");
    for (size_t i = 0; ok && i < n; i++)
        ok = bml_cli_print("%d%s", ids[i], i + 1 < n ? ", " : "");
    ok = ok && bml_cli_print("], \"tokens\": [");
    for (size_t i = 0; ok && i < n; i++) {
        size_t length = 0;
        const char *bytes = bml_token_bytes(tokenizer, ids[i], &length);
        ok = (i == 0 || bml_cli_print(", ")) &&
             bml_cli_json_write(bml_cli_json_text(bytes ? bytes : "", length));
    }
    ok = ok && bml_cli_print("]}\n");
    return ok ? CLI_OK : CLI_FAILED;
}

static int tokenize(const bml_tokenizer *tokenizer, const cli_text *text)
{
    bml_error err;
    int32_t *ids;
    size_t n;
    if (bml_tokenize(tokenizer, text->data, text->length, parse_special, &ids, &n, &err))
        return bml_cli_report(&err);
    int status = CLI_OK;
    if (as_json) {
        status = print_json(tokenizer, ids, n);
    } else {
        for (size_t i = 0; i < n && bml_cli_print("%d%s", ids[i], i + 1 < n ? " " : ""); i++)
            ;
        bml_cli_print("\n");
    }
    bml_free(ids);
    return status;
}

static int run(int n_operands, char **operands)
{
    cli_text text;
    bml_tokenizer *tokenizer;
    bml_error err;
    if (!bml_cli_read(n_operands ? operands[0] : NULL, &text))
        return CLI_FAILED;
    int status;
    if (bml_tokenizer_load(bml_cli_model_name, &tokenizer, &err)) {
        status = bml_cli_report(&err);
    } else {
        status = tokenize(tokenizer, &text);
        bml_tokenizer_free(tokenizer);
    }
    free(text.data);
    return status;
}

const cli_command bml_cli_tokenize = {
    .name = "tokenize",
    .operands = "[FILE|-]",
    .summary = "text to token ids",
    .description =
        "Prints the token ids of a file or of standard input on one line. In --json, bytes that "
        "are not valid UTF-8 appear as U+FFFD in \"tokens\"; a character may be spread over "
        "several tokens. bml detokenize gives back the exact bytes.",
    .options = options,
    .max_operands = 1,
    .run = run};
