/* vocab.json and merges.txt, the files that OpenAI published GPT-2 with, and the small files that
 * may lie beside them. What they mean together is what transformers' GPT2Tokenizer makes of them.*/
#include "tokenizer/load.h"

#include "base/error.h"
#include "tokenizer/tokenizer.h"
#include "tokenizer/tokens_json.h"

#include <stdlib.h>
#include <string.h>

static const char END_OF_TEXT[] = "<|endoftext|>";

/* ---- merges.txt -------------------------------------------------------------------------------*/

/* The line at TEXT without its end, "\n" or "\r\n"; returns where the next one starts. */
static const char *read_line(const char *text, const char *end, size_t *length)
{
    const char *newline = memchr(text, '\n', (size_t)(end - text));
    const char *stop = newline ? newline : end;
    *length = (size_t)(stop - text);
    if (*length && stop[-1] == '\r')
        --*length;
    return newline ? newline + 1 : end;
}

static size_t count_lines(const char *text, const char *end)
{
    size_t n = 0, length;
    while (text < end) {
        text = read_line(text, end, &length);
        n++;
    }
    return n;
}

/* One merge a line, "left right"; "#version" lines and empty ones mean nothing. */
static bml_status read_merges(bml_builder *builder, const bml_tokenizer_file *file, bml_error *err)
{
    const char *text = file->text, *end = text + file->length;
    uint32_t rank = 0;
    for (size_t number = 1; text < end; number++) {
        const char *line = text;
        size_t length;
        text = read_line(text, end, &length);
        if (length == 0 || (length >= 8 && memcmp(line, "#version", 8) == 0))
            continue;
        const char *space = memchr(line, ' ', length);
        size_t left = space ? (size_t)(space - line) : length;
        size_t right = space ? length - left - 1 : 0;
        if (left == 0 || right == 0 || memchr(space + 1, ' ', right))
            return bml_fail(err, BML_ERR_FORMAT,
                            "%s: line %zu: a merge is two tokens with one space between them",
                            file->path, number);
        bml_status status = bml_builder_merge(builder, file->path, "line", number, rank++, line,
                                              left, space + 1, right, err);
        if (status)
            return status;
    }
    return BML_OK;
}

/* ---- is it byte-level? ------------------------------------------------------------------------*/

/* Other tokenizers come in files of the same names. A byte-level vocabulary has the space byte,
 * "Ġ"; what lacks it and marks words in another way is named and refused. */
static bml_status check_byte_level(const bml_builder *builder, const char *file, bml_error *err)
{
    static const struct {
        const char *mark, *kind;
        bool at_end;
    } others[] = {{"</w>", "a word-level BPE, as GPT-1's and CLIP's", true},
                  {"\xe2\x96\x81", "a SentencePiece BPE, as Llama's", false},
                  {"##", "a WordPiece, as BERT's", false}};
    if (bml_builder_find(builder, "\xc4\xa0", 2) >= 0)
        return BML_OK;
    for (size_t k = 0; k < sizeof others / sizeof *others; k++) {
        size_t n = strlen(others[k].mark);
        for (size_t i = 0; i < builder->n_entries; i++) {
            const bml_vocab_entry *entry = &builder->entries[i];
            size_t at = others[k].at_end && entry->length > n ? entry->length - n : 0;
            if (entry->length > n && memcmp(entry->name + at, others[k].mark, n) == 0)
                return bml_fail(err, BML_ERR_UNSUPPORTED,
                                "%s: is the vocabulary of %s: only byte-level BPE tokenizers as "
                                "GPT-2's can be used with this program",
                                file, others[k].kind);
        }
    }
    return BML_OK;
}

/* ---- added and special tokens -----------------------------------------------------------------*/

/* The named special tokens, in the order in which transformers adds them. */
static const char *const special_names[] = {"bos_token", "eos_token", "unk_token", "sep_token",
                                            "pad_token", "cls_token", "mask_token"};
enum { N_SPECIAL_NAMES = sizeof special_names / sizeof *special_names };

/* What the files say of a key: special_tokens_map.json before tokenizer_config.json. */
typedef struct special_source {
    const char *map_file;
    const json_t *map; /* NULL where tokenizer_config.json has added_tokens_decoder */
    const char *config_file;
    const json_t *config;
} special_source;

static const json_t *look_up(const special_source *source, const char *key, const char **file)
{
    const json_t *value = json_object_get(source->map, key);
    *file = value ? source->map_file : source->config_file;
    return value ? value : json_object_get(source->config, key);
}

/* The content of a token given as a string or an object; NULL if VALUE is neither. */
static const json_t *content_of(const json_t *value)
{
    return json_is_string(value) ? value : json_object_get(value, "content");
}

static bool has_content(const json_t *value, const char *content)
{
    const char *text = json_string_value(content_of(value));
    return text && strcmp(text, content) == 0;
}

static bool names_special(const special_source *source, const char *content)
{
    const char *file;
    for (size_t i = 0; i < N_SPECIAL_NAMES; i++)
        if (has_content(look_up(source, special_names[i], &file), content))
            return true;
    const json_t *more = look_up(source, "additional_special_tokens", &file);
    for (size_t i = 0; i < json_array_size(more); i++)
        if (has_content(json_array_get(more, i), content))
            return true;
    return strcmp(content, END_OF_TEXT) == 0;
}

/* Adds a special token of the maps. One that is an added token already keeps its flags. */
static bml_status add_special(bml_builder *builder, const char *file, const char *key,
                              const json_t *value, bml_error *err)
{
    const json_t *content = content_of(value);
    const bml_tokenizer *t = builder->tokenizer;
    for (size_t i = 0; content && i < t->n_added; i++)
        if (t->added[i].length == json_string_length(content) &&
            memcmp(t->added[i].content, json_string_value(content), t->added[i].length) == 0)
            return BML_OK;
    return bml_tokens_add(builder, file, key, value, true, err);
}

static bml_status add_specials(bml_builder *builder, const special_source *source, bml_error *err)
{
    const char *file;
    bml_status status = BML_OK;
    for (size_t i = 0; i < N_SPECIAL_NAMES && !status; i++) {
        const json_t *value = look_up(source, special_names[i], &file);
        if (value && !json_is_null(value))
            status = add_special(builder, file, special_names[i], value, err);
    }
    const char *const lists[] = {"additional_special_tokens", "extra_special_tokens"};
    for (size_t k = 0; k < 2; k++) {
        const json_t *list = look_up(source, lists[k], &file);
        for (size_t i = 0; i < json_array_size(list) && !status; i++)
            status = add_special(builder, file, lists[k], json_array_get(list, i), err);
    }
    /* GPT2Tokenizer's default for each of its special tokens. Unlike there it is not made up where
     * the vocabulary lacks it: the model has no such id. */
    if (!status && bml_builder_find(builder, END_OF_TEXT, strlen(END_OF_TEXT)) >= 0)
        status = bml_builder_add(builder, file, END_OF_TEXT, strlen(END_OF_TEXT),
                                 (bml_added_token){.special = true}, err);
    return status;
}

typedef struct added_entry {
    const char *content;
    json_int_t id;
} added_entry;

static int by_id(const void *a, const void *b)
{
    const added_entry *x = a, *y = b;
    return (x->id > y->id) - (x->id < y->id);
}

/* added_tokens.json, an object of content to id. */
static bml_status add_legacy(bml_builder *builder, const bml_tokenizer_file *file,
                             const special_source *source, bml_error *err)
{
    json_t *root;
    bml_status status = bml_tokens_parse(file->path, file->text, file->length, &root, err);
    if (status)
        return status;
    size_t n = 0;
    added_entry *entries = bml_calloc(json_object_size(root), sizeof *entries);
    const char *content;
    json_t *id;
    if (!entries)
        status = bml_fail_memory(err, json_object_size(root) * sizeof *entries, "added tokens");
    else
        json_object_foreach(root, content, id)
        {
            if (!json_is_integer(id) && !status)
                status = bml_fail(err, BML_ERR_FORMAT, "%s: the id of \"%.48s\" is not an integer",
                                  file->path, content);
            entries[n++] = (added_entry){content, json_integer_value(id)};
        }
    if (entries)
        qsort(entries, n, sizeof *entries, by_id);
    for (size_t i = 0; i < n && !status; i++) {
        bool special = names_special(source, entries[i].content);
        status =
            bml_builder_add(builder, file->path, entries[i].content, strlen(entries[i].content),
                            (bml_added_token){.special = special, .normalized = !special}, err);
    }
    free(entries);
    json_decref(root);
    return status;
}

/* As transformers does: "added_tokens_decoder" in tokenizer_config.json makes the two older files
 * void. */
static bml_status add_tokens(bml_builder *builder, const bml_tokenizer_files *files, bml_error *err)
{
    special_source source = {files->special_map.path, NULL, files->config_path, files->config};
    const json_t *decoder = json_object_get(files->config, "added_tokens_decoder");
    json_t *map = NULL;
    bml_status status = BML_OK;
    if (!decoder && files->special_map.text)
        status = bml_tokens_parse(files->special_map.path, files->special_map.text,
                                  files->special_map.length, &map, err);
    source.map = map;
    if (!status && decoder)
        status = bml_tokens_add_decoder(builder, files->config_path, decoder, err);
    else if (!status && files->added.text)
        status = add_legacy(builder, &files->added, &source, err);
    if (!status)
        status = add_specials(builder, &source, err);
    json_decref(map);
    return status;
}

/* ---- all of it --------------------------------------------------------------------------------*/

bml_status bml_tokenizer_from_files(const bml_tokenizer_files *files, bml_tokenizer **tokenizer,
                                    bml_error *err)
{
    const bml_tokenizer_file *merges = &files->merges;
    if (merges->length > BML_TOKENIZER_FILE_LIMIT)
        return bml_fail(err, BML_ERR_FORMAT, "%s: is %zu bytes long, more than the %d allowed",
                        merges->path, merges->length, BML_TOKENIZER_FILE_LIMIT);
    json_t *vocab;
    bml_status status =
        bml_tokens_parse(files->vocab.path, files->vocab.text, files->vocab.length, &vocab, err);
    if (status)
        return status;
    bml_builder builder = {0};
    status = bml_builder_start(&builder, files->vocab.path, vocab,
                               count_lines(merges->text, merges->text + merges->length), err);
    if (!status)
        status = check_byte_level(&builder, files->vocab.path, err);
    if (!status)
        status = read_merges(&builder, merges, err);
    if (!status)
        status = add_tokens(&builder, files, err);
    if (!status)
        status = bml_builder_finish(&builder, false, tokenizer, err);
    if (!status)
        (*tokenizer)->add_prefix_space =
            json_is_true(json_object_get(files->config, "add_prefix_space"));
    bml_builder_clear(&builder);
    json_decref(vocab);
    return status;
}

bml_status bml_tokenizer_parse_files(const char *vocab, size_t vocab_length, const char *merges,
                                     size_t merges_length, const char *origin,
                                     bml_tokenizer **tokenizer, bml_error *err)
{
    char *vocab_path = bml_format("%s/vocab.json", origin);
    char *merges_path = bml_format("%s/merges.txt", origin);
    bml_status status;
    if (vocab_path && merges_path) {
        bml_tokenizer_files files = {.vocab = {vocab_path, vocab, vocab_length},
                                     .merges = {merges_path, merges, merges_length}};
        status = bml_tokenizer_from_files(&files, tokenizer, err);
    } else {
        status = bml_fail_memory(err, strlen(origin) + 16, "a path");
    }
    free(vocab_path);
    free(merges_path);
    return status;
}
