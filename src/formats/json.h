/* JSON files through jansson, with errors that name the file and the place. */
#ifndef BML_FORMATS_JSON_H
#define BML_FORMATS_JSON_H

#include "bml.h"

#include <jansson.h>

/*
 * Parses LENGTH bytes of TEXT; FLAGS are jansson's. ORIGIN names the file in errors. *JSON is
 * released by json_decref.
 */
bml_status bml_json_parse(const char *text, size_t length, size_t flags, const char *origin,
                          json_t **json, bml_error *err);

/* The same, and the outermost value must be an object. */
bml_status bml_json_parse_object(const char *text, size_t length, size_t flags, const char *origin,
                                 json_t **json, bml_error *err);

/* "an object", "a string", ...: for errors about a value of the wrong type. */
const char *bml_json_type_name(const json_t *json);

#endif
