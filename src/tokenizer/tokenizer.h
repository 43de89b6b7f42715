/* What the rest of the library needs of the tokenizer beyond bml.h. */
#ifndef BML_TOKENIZER_TOKENIZER_H
#define BML_TOKENIZER_TOKENIZER_H

#include "base/utf8.h"
#include "bml.h"

/*
 * Loads tokenizer.json or, where there is none, vocab.json + merges.txt (with added_tokens.json,
 * special_tokens_map.json and tokenizer_config.json where present) from DIRECTORY. When the
 * directory has no tokenizer file at all, *TOKENIZER is NULL and the status BML_OK.
 */
bml_status bml_tokenizer_load_directory(const char *directory, bml_tokenizer **tokenizer,
                                        bml_error *err);

/* The same from memory, for tests and fuzzing. ORIGIN goes into error messages. */
bml_status bml_tokenizer_parse_json(const char *json, size_t length, const char *origin,
                                    bml_tokenizer **tokenizer, bml_error *err);
bml_status bml_tokenizer_parse_files(const char *vocab, size_t vocab_length, const char *merges,
                                     size_t merges_length, const char *origin,
                                     bml_tokenizer **tokenizer, bml_error *err);

#endif
