/* The classes of code points that the pre-tokeniser and added tokens distinguish, in Unicode 16. */
#ifndef BML_TOKENIZER_UNICODE_H
#define BML_TOKENIZER_UNICODE_H

#include <stdint.h>

typedef enum bml_unicode_class {
    BML_UNICODE_OTHER,
    BML_UNICODE_LETTER, /* \p{L} */
    BML_UNICODE_NUMBER, /* \p{N} */
    BML_UNICODE_SPACE   /* \s: the property White_Space */
} bml_unicode_class;

enum {
    BML_UNICODE_CLASS = 3, /* the bits of a bml_unicode_class in a table value */
    BML_UNICODE_WORD = 4   /* set for \w: letters, marks, decimal and letter numbers, ... */
};

/* Two stages: the upper bits of a code point choose a block of 128 values (unicode_table.c). */
extern const uint8_t bml_unicode_index[0x110000 / 128];
extern const uint8_t bml_unicode_blocks[][128];

/* The table value of a code point below 0x110000: a class, perhaps with BML_UNICODE_WORD. */
static inline unsigned bml_unicode_lookup(uint32_t code_point)
{
    return bml_unicode_blocks[bml_unicode_index[code_point >> 7]][code_point & 127];
}

#endif
