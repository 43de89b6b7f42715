/* Allocation with overflow checks. Sizes that come from a file are multiplied here. */
#ifndef BML_BASE_MEMORY_H
#define BML_BASE_MEMORY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* *product = a * b; false, and *product untouched, if that does not fit. */
static inline bool bml_mul_size(size_t a, size_t b, size_t *product)
{
    return !__builtin_mul_overflow(a, b, product);
}

/* *sum = a + b; false, and *sum untouched, if that does not fit. */
static inline bool bml_add_size(size_t a, size_t b, size_t *sum)
{
    size_t s;
    if (__builtin_add_overflow(a, b, &s))
        return false;
    *sum = s;
    return true;
}

/* Zeroed memory for COUNT items of SIZE bytes; NULL on overflow or when there is none. One byte
 * at least, so that NULL always means failure. Freed by free. */
void *bml_calloc(size_t count, size_t size);

/* Memory for COUNT items of SIZE bytes with the old content; NULL on failure, OLD stays then. */
void *bml_realloc(void *old, size_t count, size_t size);

/* A NUL-terminated copy of LENGTH bytes; NULL on failure. Freed by free. */
char *bml_strndup(const char *text, size_t length);

/* A new string made as printf does; NULL on failure. Freed by free. */
__attribute__((format(printf, 1, 2))) char *bml_format(const char *format, ...);

/* A buffer of bytes that grows. {0} is empty; .data is freed by free. */
typedef struct bml_bytes {
    char *data;
    size_t length, capacity;
} bml_bytes;

/* Appends; false when out of memory, the buffer stays as it was. After every success there is a
 * NUL behind the last byte that .length does not count. */
bool bml_bytes_append(bml_bytes *bytes, const void *data, size_t length);

#endif
