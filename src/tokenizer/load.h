/* The loaders behind bml_tokenizer_load_directory. */
#ifndef BML_TOKENIZER_LOAD_H
#define BML_TOKENIZER_LOAD_H

#include "bml.h"

#include <jansson.h>

/* As bml_tokenizer_parse_json; FILE is the path for messages. CONFIG is tokenizer_config.json as
 * an object, or NULL, and CONFIG_FILE its path. */
bml_status bml_tokenizer_from_json(const char *file, const char *json, size_t length,
                                   const char *config_file, const json_t *config,
                                   bml_tokenizer **tokenizer, bml_error *err);

/* One file of a tokenizer. text is NULL where there is none. */
typedef struct bml_tokenizer_file {
    const char *path; /* for messages */
    const char *text;
    size_t length;
} bml_tokenizer_file;

/* The files beside each other in a directory without tokenizer.json. */
typedef struct bml_tokenizer_files {
    bml_tokenizer_file vocab, merges;      /* vocab.json, merges.txt */
    bml_tokenizer_file added, special_map; /* added_tokens.json, special_tokens_map.json */
    const char *config_path;               /* tokenizer_config.json */
    const json_t *config;                  /* may be NULL */
} bml_tokenizer_files;

bml_status bml_tokenizer_from_files(const bml_tokenizer_files *files, bml_tokenizer **tokenizer,
                                    bml_error *err);

#endif
