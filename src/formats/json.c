#include "formats/json.h"

#include "base/error.h"

bml_status bml_json_parse(const char *text, size_t length, size_t flags, const char *origin,
                          json_t **json, bml_error *err)
{
    json_error_t error;
    *json = json_loadb(text, length, flags, &error);
    if (*json)
        return BML_OK;
    /* jansson tells only some failures of memory from faults of the text. */
    if (json_error_code(&error) == json_error_out_of_memory || !error.text[0])
        return bml_fail(err, BML_ERR_MEMORY,
                        "%s: out of memory while reading its %zu bytes of JSON", origin, length);
    return bml_fail(err, BML_ERR_FORMAT, "%s: invalid JSON at line %d, column %d: %s", origin,
                    error.line, error.column, error.text);
}

bml_status bml_json_parse_object(const char *text, size_t length, size_t flags, const char *origin,
                                 json_t **json, bml_error *err)
{
    bml_status status = bml_json_parse(text, length, flags | JSON_DECODE_ANY, origin, json, err);
    if (status || json_is_object(*json))
        return status;
    status = bml_fail(err, BML_ERR_FORMAT, "%s: the JSON is %s, not an object", origin,
                      bml_json_type_name(*json));
    json_decref(*json);
    *json = NULL;
    return status;
}

const char *bml_json_type_name(const json_t *json)
{
    switch (json_typeof(json)) {
    case JSON_OBJECT:
        return "an object";
    case JSON_ARRAY:
        return "an array";
    case JSON_STRING:
        return "a string";
    case JSON_INTEGER:
        return "an integer";
    case JSON_REAL:
        return "a number with a fraction";
    case JSON_TRUE:
    case JSON_FALSE:
        return "a boolean";
    default:
        return "null";
    }
}
