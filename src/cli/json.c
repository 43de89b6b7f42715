#include "json.h"

#include "cli.h"
#include "io.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

size_t bml_cli_utf8_next(const char *text, size_t length, bool *valid)
{
    const unsigned char *s = (const unsigned char *)text;
    unsigned char lead = s[0], low = 0x80, high = 0xbf;
    size_t size = 1;
    if (lead >= 0xc2 && lead <= 0xdf)
        size = 2;
    else if (lead >= 0xe0 && lead <= 0xef)
        size = 3;
    else if (lead >= 0xf0 && lead <= 0xf4)
        size = 4;
    /* The second byte is narrower after these: no overlong forms, surrogates, or beyond U+10FFFF.
     */
    if (lead == 0xe0)
        low = 0xa0;
    else if (lead == 0xed)
        high = 0x9f;
    else if (lead == 0xf0)
        low = 0x90;
    else if (lead == 0xf4)
        high = 0x8f;
    *valid = size > 1 || lead < 0x80;
    for (size_t i = 1; i < size; i++) {
        if (i == length || s[i] < low || s[i] > high) {
            *valid = false;
            return i;
        }
        low = 0x80;
        high = 0xbf;
    }
    return size;
}

json_t *bml_cli_json_text(const char *bytes, size_t length)
{
    if (length > (SIZE_MAX - 1) / 3)
        return NULL;
    char *text = malloc(3 * length + 1);
    if (!text)
        return NULL;
    size_t n = 0;
    for (size_t i = 0; i < length;) {
        bool valid;
        size_t step = bml_cli_utf8_next(bytes + i, length - i, &valid);
        memcpy(text + n, valid ? bytes + i : "\xef\xbf\xbd", valid ? step : 3);
        n += valid ? step : 3;
        i += step;
    }
    json_t *value = json_stringn(text, n);
    free(text);
    return value;
}

json_t *bml_cli_json_number(double number)
{
    return isfinite(number) ? json_real(number) : json_null();
}

json_t *bml_cli_json_ids(const int32_t *ids, size_t n)
{
    json_t *array = json_array();
    for (size_t i = 0; array && i < n; i++)
        if (json_array_append_new(array, json_integer(ids[i])) != 0) {
            json_decref(array);
            return NULL;
        }
    return array;
}

static int write_part(const char *buffer, size_t size, void *failed)
{
    *(bool *)failed = !bml_cli_write(buffer, size);
    return *(bool *)failed ? -1 : 0;
}

bool bml_cli_json_write(json_t *value)
{
    if (!value) {
        bml_cli_fail_memory();
        return false;
    }
    bool write_failed = false;
    bool ok = json_dump_callback(value, write_part, &write_failed, JSON_ENCODE_ANY) == 0;
    json_decref(value);
    if (!ok && !write_failed)
        bml_cli_fail_memory();
    return ok;
}
