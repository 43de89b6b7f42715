#include "tokenizer/tokens_json.h"

#include "base/error.h"
#include "formats/json.h"

#include <stdlib.h>
#include <string.h>

bml_status bml_tokens_parse(const char *file, const char *text, size_t length, json_t **root,
                            bml_error *err)
{
    if (length > BML_TOKENIZER_FILE_LIMIT)
        return bml_fail(err, BML_ERR_FORMAT, "%s: is %zu bytes long, more than the %d allowed",
                        file, length, BML_TOKENIZER_FILE_LIMIT);
    return bml_json_parse_object(text, length, JSON_ALLOW_NUL | JSON_REJECT_DUPLICATES, file, root,
                                 err);
}

bml_status bml_tokens_add(bml_builder *builder, const char *file, const char *place,
                          const json_t *value, bool force_special, bml_error *err)
{
    if (json_is_string(value))
        return bml_builder_add(builder, file, json_string_value(value), json_string_length(value),
                               (bml_added_token){.special = true}, err);
    const json_t *content = json_object_get(value, "content");
    if (!json_is_string(content))
        return bml_fail(err, BML_ERR_FORMAT, "%s: %s: the token has no \"content\" string", file,
                        place);
    bml_added_token flags = {0};
    const struct {
        const char *key;
        bool *flag;
    } keys[] = {{"special", &flags.special},
                {"lstrip", &flags.lstrip},
                {"rstrip", &flags.rstrip},
                {"single_word", &flags.single_word},
                {"normalized", &flags.normalized}};
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        const json_t *flag = json_object_get(value, keys[i].key);
        if (flag && !json_is_boolean(flag))
            return bml_fail(err, BML_ERR_FORMAT, "%s: %s: \"%s\" is not true or false", file, place,
                            keys[i].key);
        *keys[i].flag = json_is_true(flag);
    }
    flags.special |= force_special;
    if (!json_object_get(value, "normalized"))
        flags.normalized = !flags.special;
    return bml_builder_add(builder, file, json_string_value(content), json_string_length(content),
                           flags, err);
}

typedef struct numbered {
    long id;
    const json_t *token;
} numbered;

static int by_id(const void *a, const void *b)
{
    const numbered *x = a, *y = b;
    return (x->id > y->id) - (x->id < y->id);
}

bml_status bml_tokens_add_decoder(bml_builder *builder, const char *file, const json_t *decoder,
                                  bml_error *err)
{
    if (!decoder)
        return BML_OK;
    if (!json_is_object(decoder))
        return bml_fail(err, BML_ERR_FORMAT, "%s: \"added_tokens_decoder\" is not an object", file);
    numbered *tokens = bml_calloc(json_object_size(decoder), sizeof *tokens);
    if (!tokens)
        return bml_fail_memory(err, json_object_size(decoder) * sizeof *tokens, "the added tokens");
    size_t n = 0;
    const char *key;
    json_t *token;
    json_object_foreach((json_t *)decoder, key, token) tokens[n++] =
        (numbered){strtol(key, NULL, 10), token};
    qsort(tokens, n, sizeof *tokens, by_id);
    bml_status status = BML_OK;
    for (size_t i = 0; i < n && !status; i++)
        status =
            bml_tokens_add(builder, file, "\"added_tokens_decoder\"", tokens[i].token, false, err);
    free(tokens);
    return status;
}
