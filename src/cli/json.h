/* JSON output. Text that is not valid UTF-8 cannot stand in JSON: every maximal invalid part of it
 * becomes U+FFFD, as in Python's errors="replace". */
#ifndef BML_CLI_JSON_H
#define BML_CLI_JSON_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

/* NULL when out of memory, which the json_ functions and bml_cli_json_print pass on. */
json_t *bml_cli_json_text(const char *bytes, size_t length);

/* A number, or null if it is not finite. */
json_t *bml_cli_json_number(double number);

json_t *bml_cli_json_ids(const int32_t *ids, size_t n);

/* Writes VALUE (which it takes; NULL means that memory ran out) to stdout, without a newline. False
 * after an error line, or if the write failed (see bml_cli_finish_output). */
bool bml_cli_json_write(json_t *value);

/*
 * The length of the UTF-8 sequence at TEXT (LENGTH bytes, at least one); *VALID tells whether it is
 * one or a maximal part of an invalid one.
 */
size_t bml_cli_utf8_next(const char *text, size_t length, bool *valid);

#endif
