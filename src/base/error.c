#include "base/error.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* What a file or a user put into a name must not break the one-line rule or a terminal. */
static void keep_one_line(char *text)
{
    for (; *text; text++)
        if ((unsigned char)*text < 0x20 || *text == 0x7f)
            *text = '?';
}

bml_status bml_fail(bml_error *err, bml_status code, const char *format, ...)
{
    if (!err)
        return code;
    va_list args;
    va_start(args, format);
    vsnprintf(err->message, sizeof err->message, format, args);
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

const char *bml_version(void)
{
    return BML_VERSION;
}

void bml_free(void *memory)
{
    free(memory);
}
