#include "base/utf8.h"

/* What a lead byte promises: the length of its character and the range of the second byte, which
 * is where overlong forms, surrogates and the end of Unicode show. Length 0: not a lead byte. */
typedef struct lead {
    uint8_t length, low, high;
} lead;

static lead read_lead(uint8_t byte)
{
    if (byte < 0x80)
        return (lead){1, 0, 0};
    if (byte < 0xc2 || byte > 0xf4)
        return (lead){0, 0, 0};
    if (byte < 0xe0)
        return (lead){2, 0x80, 0xbf};
    if (byte < 0xf0)
        return (lead){3, byte == 0xe0 ? 0xa0 : 0x80, byte == 0xed ? 0x9f : 0xbf};
    return (lead){4, byte == 0xf0 ? 0x90 : 0x80, byte == 0xf4 ? 0x8f : 0xbf};
}

/* How many bytes at TEXT agree with what its lead byte promises; 0 where that is no lead byte. */
static size_t match_lead(lead first, const uint8_t *text, const uint8_t *end)
{
    if (first.length < 2 || end - text < 2 || text[1] < first.low || text[1] > first.high)
        return first.length ? 1 : 0;
    size_t n = 2;
    while (n < first.length && n < (size_t)(end - text) && (text[n] & 0xc0) == 0x80)
        n++;
    return n;
}

size_t bml_utf8_decode(const uint8_t *text, const uint8_t *end, uint32_t *code_point)
{
    lead first = read_lead(text[0]);
    if (first.length == 0 || match_lead(first, text, end) < first.length) {
        *code_point = 0xfffd;
        return 1;
    }
    static const uint8_t payload[] = {0, 0x7f, 0x1f, 0x0f, 0x07};
    uint32_t c = text[0] & payload[first.length];
    for (size_t i = 1; i < first.length; i++)
        c = c << 6 | (text[i] & 0x3f);
    *code_point = c;
    return first.length;
}

size_t bml_utf8_decode_back(const uint8_t *start, const uint8_t *text, uint32_t *code_point)
{
    for (size_t n = 1; n <= 4 && n <= (size_t)(text - start); n++)
        if (bml_utf8_decode(text - n, text, code_point) == n && (n > 1 || *code_point < 0x80))
            return n;
    *code_point = 0xfffd;
    return 1;
}

size_t bml_utf8_complete(const char *text, size_t length)
{
    const uint8_t *start = (const uint8_t *)text, *end = start + length;
    for (size_t n = 1; n <= 3 && n <= length; n++) {
        lead first = read_lead(end[-(ptrdiff_t)n]);
        if (first.length > n && match_lead(first, end - n, end) == n)
            return length - n;
    }
    return length;
}
