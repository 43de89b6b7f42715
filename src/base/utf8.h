/* Decoding UTF-8, strictly: no overlong forms, no surrogates, nothing above U+10FFFF. */
#ifndef BML_BASE_UTF8_H
#define BML_BASE_UTF8_H

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

/*
 * The length of the longest prefix of TEXT that ends on a character boundary: everything but an
 * unfinished UTF-8 sequence at the end. Invalid bytes count as finished. For streaming.
 */
size_t bml_utf8_complete(const char *text, size_t length);

#endif
