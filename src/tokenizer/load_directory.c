/* Which files of a directory make up its tokenizer. */
#include "tokenizer/load.h"

#include "base/error.h"
#include "base/file.h"
#include "formats/json.h"
#include "tokenizer/tokenizer.h"
#include "tokenizer/tokens_json.h"

#include <stdlib.h>
#include <string.h>

enum { TOKENIZER, VOCAB, MERGES, ADDED, SPECIAL_MAP, CONFIG, N_FILES };
static const char *const names[N_FILES] = {
    "tokenizer.json",          "vocab.json",           "merges.txt", "added_tokens.json",
    "special_tokens_map.json", "tokenizer_config.json"};

/* The files of tokenizers that are not byte-level BPE, and what they are. */
static const char *const foreign[][2] = {{"spiece.model", "SentencePiece"},
                                         {"tokenizer.model", "SentencePiece"},
                                         {"sentencepiece.bpe.model", "SentencePiece"},
                                         {"vocab.txt", "WordPiece"}};

typedef struct directory {
    char *paths[N_FILES];
    bml_file files[N_FILES];
    json_t *config;
} directory;

static bml_tokenizer_file view(const directory *d, int which)
{
    const bml_file *file = &d->files[which];
    return (bml_tokenizer_file){d->paths[which], (const char *)file->data, file->size};
}

/* Reads one file if it is there. */
static bml_status read_file(directory *d, int which, bml_error *err)
{
    if (!bml_path_exists(d->paths[which]))
        return BML_OK;
    return bml_file_read(d->paths[which], BML_TOKENIZER_FILE_LIMIT, &d->files[which], err);
}

/* tokenizer_config.json. Its numbers do not matter and may be of any size: transformers writes a
 * "model_max_length" of 10^30, which only fits a float64. As in Python, the last of two keys
 * counts.
 */
static bml_status read_config(directory *d, bml_error *err)
{
    bml_status status = read_file(d, CONFIG, err);
    if (status || !d->files[CONFIG].data)
        return status;
    return bml_json_parse_object((const char *)d->files[CONFIG].data, d->files[CONFIG].size,
                                 JSON_ALLOW_NUL | JSON_DECODE_INT_AS_REAL, d->paths[CONFIG],
                                 &d->config, err);
}

static bml_status refuse_foreign(const char *path, bml_error *err)
{
    for (size_t i = 0; i < sizeof foreign / sizeof *foreign; i++) {
        char *file = bml_path_join(path, foreign[i][0]);
        if (!file)
            return bml_fail_memory(err, strlen(path), "a path");
        bool found = bml_path_exists(file);
        if (found)
            bml_fail(err, BML_ERR_UNSUPPORTED,
                     "%s: is the vocabulary of a %s tokenizer: only byte-level BPE tokenizers as "
                     "GPT-2's (tokenizer.json, or vocab.json and merges.txt) can be used",
                     file, foreign[i][1]);
        free(file);
        if (found)
            return BML_ERR_UNSUPPORTED;
    }
    return BML_OK;
}

static bml_status load(directory *d, const char *path, bml_tokenizer **tokenizer, bml_error *err)
{
    for (int i = 0; i < N_FILES; i++)
        if (!(d->paths[i] = bml_path_join(path, names[i])))
            return bml_fail_memory(err, strlen(path) + strlen(names[i]), "a path");
    bool has_json = bml_path_exists(d->paths[TOKENIZER]);
    bool has_vocab = bml_path_exists(d->paths[VOCAB]);
    bool has_merges = bml_path_exists(d->paths[MERGES]);
    if (!has_json && !has_vocab && !has_merges)
        return refuse_foreign(path, err);
    if (!has_json && has_vocab != has_merges)
        return bml_fail(err, BML_ERR_IO, "%s: is missing beside %s: a tokenizer needs both",
                        d->paths[has_vocab ? MERGES : VOCAB], names[has_vocab ? VOCAB : MERGES]);
    bml_status status = read_config(d, err);
    if (has_json) {
        if (!status)
            status = read_file(d, TOKENIZER, err);
        return status ? status
                      : bml_tokenizer_from_json(
                            d->paths[TOKENIZER], (const char *)d->files[TOKENIZER].data,
                            d->files[TOKENIZER].size, d->paths[CONFIG], d->config, tokenizer, err);
    }
    for (int i = VOCAB; i <= SPECIAL_MAP && !status; i++)
        status = read_file(d, i, err);
    if (status)
        return status;
    bml_tokenizer_files files = {view(d, VOCAB),       view(d, MERGES),  view(d, ADDED),
                                 view(d, SPECIAL_MAP), d->paths[CONFIG], d->config};
    return bml_tokenizer_from_files(&files, tokenizer, err);
}

bml_status bml_tokenizer_load_directory(const char *path, bml_tokenizer **tokenizer, bml_error *err)
{
    directory d = {0};
    bml_tokenizer *loaded = NULL;
    bml_status status = load(&d, path, &loaded, err);
    for (int i = 0; i < N_FILES; i++) {
        free(d.paths[i]);
        bml_file_close(&d.files[i]);
    }
    json_decref(d.config);
    if (!status)
        *tokenizer = loaded;
    return status;
}
