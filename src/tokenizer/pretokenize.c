#include "tokenizer/pretokenize.h"

#include "base/utf8.h"
#include "tokenizer/unicode.h"

/* Not a class: a byte that only decoding can classify. */
enum { NOT_ASCII = BML_UNICODE_SPACE + 1 };

#define O BML_UNICODE_OTHER
#define L BML_UNICODE_LETTER
#define N BML_UNICODE_NUMBER
#define S BML_UNICODE_SPACE
static const uint8_t ascii_class[256] = {O, O, O,
                                         O, O, O,
                                         O, O, O,
                                         S, S, S,
                                         S, S, O,
                                         O, O, O,
                                         O, O, O,
                                         O, O, O,
                                         O, O, O,
                                         O, O, O,
                                         O, O, S,
                                         O, O, O,
                                         O, O, O,
                                         O, O, O,
                                         O, O, O,
                                         O, O, O,
                                         N, N, N,
                                         N, N, N,
                                         N, N, N,
                                         N, O, O,
                                         O, O, O,
                                         O, O, L,
                                         L, L, L,
                                         L, L, L,
                                         L, L, L,
                                         L, L, L,
                                         L, L, L,
                                         L, L, L,
                                         L, L, L,
                                         L, L, L,
                                         L, O, O,
                                         O, O, O,
                                         O, L, L,
                                         L, L, L,
                                         L, L, L,
                                         L, L, L,
                                         L, L, L,
                                         L, L, L,
                                         L, L, L,
                                         L, L, L,
                                         L, L, L,
                                         O, O, O,
                                         O, O, [128 ... 255] = NOT_ASCII};
#undef O
#undef L
#undef N
#undef S

/* The class of the character at TEXT and its length in bytes. */
static inline unsigned classify(const uint8_t *text, const uint8_t *end, size_t *length)
{
    unsigned class = ascii_class[*text];
    if (class != NOT_ASCII) {
        *length = 1;
        return class;
    }
    uint32_t code_point;
    *length = bml_utf8_decode(text, end, &code_point);
    return bml_unicode_lookup(code_point) & BML_UNICODE_CLASS;
}

/* The end of the run of characters of one class that goes on at TEXT. */
static inline const uint8_t *skip_run(const uint8_t *text, const uint8_t *end, unsigned class)
{
    while (text < end) {
        if (ascii_class[*text] == class) {
            text++;
        } else {
            size_t length;
            if (ascii_class[*text] != NOT_ASCII || classify(text, end, &length) != class)
                break;
            text += length;
        }
    }
    return text;
}

/* The length of 's, 't, 'm, 'd, 're, 've or 'll at TEXT, which is an apostrophe; else 0. */
static size_t contraction(const uint8_t *text, size_t length)
{
    if (length < 2)
        return 0;
    switch (text[1]) {
    case 's':
    case 't':
    case 'm':
    case 'd':
        return 2;
    case 'r':
    case 'v':
        return length > 2 && text[2] == 'e' ? 3 : 0;
    case 'l':
        return length > 2 && text[2] == 'l' ? 3 : 0;
    default:
        return 0;
    }
}

/*
 * The length of a piece of white space: \s+(?!\S)|\s+. A run that something else follows leaves
 * its last character to the next piece, unless the run is that one character.
 */
static size_t white_space(const uint8_t *text, const uint8_t *end)
{
    const uint8_t *last = text, *p = text;
    while (p < end) {
        size_t length;
        if (classify(p, end, &length) != BML_UNICODE_SPACE)
            break;
        last = p;
        p += length;
    }
    return (size_t)((p == end || last == text ? p : last) - text);
}

size_t bml_pretokenize(const uint8_t *text, size_t length)
{
    const uint8_t *end = text + length, *run = text;
    if (*text == '\'') {
        size_t n = contraction(text, length);
        if (n)
            return n;
    }
    if (*text == ' ' && length > 1)
        run++; /* the optional space in front of a run */
    size_t n;
    unsigned class = classify(run, end, &n);
    if (class == BML_UNICODE_SPACE)
        return white_space(text, end);
    return (size_t)(skip_run(run + n, end, class) - text);
}
