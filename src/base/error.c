#include "base/error.h"

#include "base/utf8.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* What a file or a user put into a name must not break the one-line rule, a terminal or the UTF-8
 * of a log. */
static void keep_one_line(char *text)
{
    const char *end = text + strlen(text);
    while (text < end) {
        uint32_t c;
        size_t length = bml_utf8_decode((const uint8_t *)text, (const uint8_t *)end, &c);
        bool invalid = c == 0xfffd && length == 1;
        bool control = c < 0x20 || (c >= 0x7f && c < 0xa0);
        if (invalid || control || c == 0x2028 || c == 0x2029) /* line and paragraph separator */
            memset(text, '?', length);
        text += length;
    }
}

/* Where a name makes the text too long its middle goes: it begins with where and ends with why. */
static void format_message(char *message, size_t size, const char *format, va_list args)
{
    static const char gap[] = " ... ";
    va_list again;
    va_copy(again, args);
    int length = vsnprintf(message, size, format, args);
    char *whole = length < 0 || (size_t)length < size ? NULL : malloc((size_t)length + 1);
    if (whole) {
        vsnprintf(whole, (size_t)length + 1, format, again);
        size_t tail = size / 2, head = size - tail - strlen(gap);
        memcpy(message + head, gap, strlen(gap));
        memcpy(message + head + strlen(gap), whole + length + 1 - tail, tail);
    }
    free(whole);
    va_end(again);
}

bml_status bml_fail(bml_error *err, bml_status code, const char *format, ...)
{
    if (!err)
        return code;
    va_list args;
    va_start(args, format);
    format_message(err->message, sizeof err->message, format, args);
    va_end(args);
    keep_one_line(err->message);
    err->code = code;
    return code;
}

bml_status bml_fail_memory(bml_error *err, size_t size, const char *what)
{
    return bml_fail(err, BML_ERR_MEMORY, "out of memory: could not allocate %zu bytes for %s", size,
                    what);
}

void bml_error_prefix(bml_error *err, const char *prefix)
{
    if (!err)
        return;
    char old[sizeof err->message];
    memcpy(old, err->message, sizeof old);
    bml_fail(err, err->code, "%s: %s", prefix, old);
}

void bml_error_step(bml_error *err, uint64_t step)
{
    char prefix[40];
    snprintf(prefix, sizeof prefix, "step %llu", (unsigned long long)step);
    bml_error_prefix(err, prefix);
}

const char *bml_version(void)
{
    return BML_VERSION;
}

void bml_free(void *memory)
{
    free(memory);
}
