#include "base/memory.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void *bml_calloc(size_t count, size_t size)
{
    size_t total;
    if (!bml_mul_size(count, size, &total))
        return NULL;
    return total ? calloc(count, size) : calloc(1, 1);
}

void *bml_realloc(void *old, size_t count, size_t size)
{
    size_t total;
    if (!bml_mul_size(count, size, &total))
        return NULL;
    return realloc(old, total ? total : 1);
}

char *bml_strndup(const char *text, size_t length)
{
    char *copy = bml_calloc(length + 1, 1);
    if (copy && length)
        memcpy(copy, text, length);
    return copy;
}

char *bml_format(const char *format, ...)
{
    va_list args, again;
    va_start(args, format);
    va_copy(again, args);
    int length = vsnprintf(NULL, 0, format, args);
    va_end(args);
    char *text = length < 0 ? NULL : bml_calloc((size_t)length + 1, 1);
    if (text)
        vsnprintf(text, (size_t)length + 1, format, again);
    va_end(again);
    return text;
}

bool bml_bytes_append(bml_bytes *bytes, const void *data, size_t length)
{
    size_t needed;
    if (!bml_add_size(bytes->length, length, &needed) || !bml_add_size(needed, 1, &needed))
        return false;
    if (needed > bytes->capacity) {
        size_t capacity = bytes->capacity < 64 ? 64 : bytes->capacity;
        while (capacity < needed)
            if (!bml_mul_size(capacity, 2, &capacity))
                return false;
        char *grown = bml_realloc(bytes->data, capacity, 1);
        if (!grown)
            return false;
        bytes->data = grown;
        bytes->capacity = capacity;
    }
    if (length)
        memcpy(bytes->data + bytes->length, data, length);
    bytes->length += length;
    bytes->data[bytes->length] = 0;
    return true;
}
