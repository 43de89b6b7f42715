/* Decoding UTF-8, strictly: no overlong forms, no surrogates, nothing above U+10FFFF. */
#ifndef BML_TOKENIZER_UTF8_H
#define BML_TOKENIZER_UTF8_H

#include <stddef.h>
#include <stdint.h>

/*
 * Decodes the character at TEXT, where END - TEXT is at least 1, and returns its length in bytes.
 * Where no valid character starts, *code_point is U+FFFD and the length 1: every invalid byte
 * stands for itself.
 */
size_t bml_utf8_decode(const uint8_t *text, const uint8_t *end, uint32_t *code_point);

/* The same for the character that ends before TEXT; TEXT - START is at least 1. */
size_t bml_utf8_decode_back(const uint8_t *start, const uint8_t *text, uint32_t *code_point);

#endif
