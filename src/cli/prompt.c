#include "prompt.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *prompt_text, *prompt_file, *ids_text;
static bool parse_special;

const cli_option bml_cli_ids_options[] = {
    {.name = "ids",
     .kind = CLI_TEXT,
     .value = &ids_text,
     .argument = "IDS",
     .help = "token ids instead of text, separated by blanks or commas"},
    {.name = "special",
     .kind = CLI_FLAG,
     .value = &parse_special,
     .help = "special tokens such as <|endoftext|> in the text are tokens, not plain text"},
    {0}};

const cli_option bml_cli_prompt_options[] = {{.name = "prompt",
                                              .letter = 'p',
                                              .kind = CLI_TEXT,
                                              .value = &prompt_text,
                                              .argument = "TEXT",
                                              .help = "the prompt"},
                                             {.name = "file",
                                              .letter = 'f',
                                              .kind = CLI_TEXT,
                                              .value = &prompt_file,
                                              .argument = "FILE",
                                              .help = "a file that holds the prompt; - for "
                                                      "standard input"},
                                             {.kind = CLI_GROUP, .value = bml_cli_ids_options},
                                             {0}};

bool bml_cli_parse_ids(const char *text, size_t length, int32_t **ids, size_t *n_ids, char *problem)
{
    size_t capacity = *n_ids;
    for (size_t i = 0; i < length; i++) {
        if (text[i] && strchr(" \t\r\n,[]", text[i]))
            continue;
        size_t start = i;
        int64_t id = 0;
        for (; i < length && text[i] >= '0' && text[i] <= '9' && id <= INT32_MAX; i++)
            id = 10 * id + (text[i] - '0');
        if (id > INT32_MAX) {
            snprintf(problem, 160, "the id at byte %zu is larger than %d", start, INT32_MAX);
            return false;
        }
        if (i < length && (!text[i] || !strchr(" \t\r\n,[]", text[i]))) {
            snprintf(problem, 160,
                     "'%c' at byte %zu is not part of a list of token ids (whole numbers "
                     "separated by blanks or commas)",
                     text[i], i);
            return false;
        }
        if (*n_ids == capacity) {
            capacity = capacity ? 2 * capacity : 64;
            int32_t *grown =
                capacity < SIZE_MAX / sizeof **ids ? realloc(*ids, capacity * sizeof **ids) : NULL;
            if (!grown) {
                snprintf(problem, 160, "out of memory after %zu ids", *n_ids);
                return false;
            }
            *ids = grown;
        }
        (*ids)[(*n_ids)++] = (int32_t)id;
    }
    return true;
}

int bml_cli_prompt_read(const cli_command *command, const char *operand, cli_prompt *prompt)
{
    *prompt = (cli_prompt){0};
    int sources = !!operand + !!prompt_text + !!prompt_file + !!ids_text;
    if (sources > 1)
        return bml_cli_misuse(command, "give one source of tokens only, not %d", sources);
    prompt->given = sources == 1;
    if (ids_text) {
        char problem[160];
        if (!bml_cli_parse_ids(ids_text, strlen(ids_text), &prompt->ids, &prompt->n_ids, problem))
            return bml_cli_misuse(command, "--ids: %s", problem);
        return CLI_OK;
    }
    prompt->is_text = prompt->given;
    if (prompt_text) {
        prompt->text.length = strlen(prompt_text);
        prompt->text.data = malloc(prompt->text.length + 1);
        if (!prompt->text.data)
            return bml_cli_fail_memory();
        memcpy(prompt->text.data, prompt_text, prompt->text.length + 1);
    } else if (prompt->given) {
        if (!bml_cli_read(operand ? operand : prompt_file, &prompt->text))
            return CLI_FAILED;
    }
    return CLI_OK;
}

int bml_cli_prompt_tokenize(const bml_model *model, cli_prompt *prompt)
{
    if (!prompt->is_text || prompt->text.length == 0)
        return CLI_OK;
    const bml_tokenizer *tokenizer = bml_model_get_tokenizer(model);
    if (!tokenizer)
        return bml_cli_fail("%s: has no tokenizer, so it takes no text; give token ids with --ids",
                            bml_model_get_info(model)->name);
    bml_error err;
    int32_t *ids;
    size_t n_ids;
    if (bml_tokenize(tokenizer, prompt->text.data, prompt->text.length, parse_special, &ids, &n_ids,
                     &err))
        return bml_cli_report(&err);
    /* The library's memory and ours need not come from the same allocator. */
    prompt->ids = malloc((n_ids + 1) * sizeof *ids);
    if (prompt->ids) {
        memcpy(prompt->ids, ids, n_ids * sizeof *ids);
        prompt->n_ids = n_ids;
    }
    bml_free(ids);
    return prompt->ids ? CLI_OK : bml_cli_fail_memory();
}

void bml_cli_prompt_free(cli_prompt *prompt)
{
    free(prompt->text.data);
    free(prompt->ids);
    *prompt = (cli_prompt){0};
}
