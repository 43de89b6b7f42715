/* Whole files as read-only memory. */
#ifndef BML_BASE_FILE_H
#define BML_BASE_FILE_H

#include "bml.h"

typedef struct bml_file {
    const uint8_t *data; /* size bytes, 64-byte aligned at least; not NULL even when size is 0 */
    size_t size;
    bool mapped;
} bml_file;

/* Maps PATH, or reads it where mapping fails. Errors name the path. */
bml_status bml_file_map(const char *path, bml_file *file, bml_error *err);

/* Reads PATH into memory, followed by a NUL that size does not count; a file of more than LIMIT
 * bytes is refused before anything is allocated. For the small files (JSON, merges). */
bml_status bml_file_read(const char *path, size_t limit, bml_file *file, bml_error *err);

/* {0} is fine. */
void bml_file_close(bml_file *file);

/* Whether something bears that name, be it a link to nowhere or in a directory that may not be
 * searched: opening it then tells what is wrong. */
bool bml_path_exists(const char *path);
bool bml_path_is_directory(const char *path);

/* "DIRECTORY/NAME", freed by free; NULL when out of memory. */
char *bml_path_join(const char *directory, const char *name);

/* PATH itself if it is a directory, else the directory that it lies in; freed by free, NULL when
 * out of memory. */
char *bml_path_directory(const char *path);

bool bml_path_ends_with(const char *path, const char *end);

#endif
