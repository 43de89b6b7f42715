/* What both loaders of tokenizer files need of JSON. */
#ifndef BML_TOKENIZER_TOKENS_JSON_H
#define BML_TOKENIZER_TOKENS_JSON_H

#include "tokenizer/builder.h"

/* Parses a file that must hold one object; a key given twice is an error. *ROOT is freed by
 * json_decref. */
bml_status bml_tokens_parse(const char *file, const char *text, size_t length, json_t **root,
                            bml_error *err);

/*
 * Adds the token that VALUE describes: an object {content, special, lstrip, ...} as in
 * tokenizer.json's "added_tokens", or just the content as a string, which is then special. PLACE
 * says where it stands in FILE. FORCE_SPECIAL: it is special whatever the object says.
 */
bml_status bml_tokens_add(bml_builder *builder, const char *file, const char *place,
                          const json_t *value, bool force_special, bml_error *err);

/* Adds the tokens of tokenizer_config.json's "added_tokens_decoder", an object of id to token, in
 * the order of their ids. DECODER may be NULL. */
bml_status bml_tokens_add_decoder(bml_builder *builder, const char *file, const json_t *decoder,
                                  bml_error *err);

#endif
