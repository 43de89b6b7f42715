/* GPT-2's pre-tokeniser: where a text is cut into the pieces that BPE works on. */
#ifndef BML_TOKENIZER_PRETOKENIZE_H
#define BML_TOKENIZER_PRETOKENIZE_H

#include <stddef.h>
#include <stdint.h>

/*
 * The length in bytes of the first piece of TEXT, 1 to LENGTH; LENGTH is at least 1. Called again
 * on the rest it gives exactly the matches of GPT-2's pattern
 *
 *     's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
 *
 * in Unicode 16. The pattern is defined on characters only; here every byte that is not part of a
 * valid UTF-8 character counts as one character of the kind [^\s\p{L}\p{N}], as U+FFFD would. The
 * time to cut a whole text is linear in its length.
 */
size_t bml_pretokenize(const uint8_t *text, size_t length);

#endif
