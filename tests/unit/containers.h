/* Checkpoints made in memory and in temporary directories, for the tests of the file formats. */
#ifndef TESTS_CONTAINERS_H
#define TESTS_CONTAINERS_H

#include "testing.h"

#include "base/memory.h"
#include "bml.h"

#include <dirent.h>
#include <inttypes.h>
#include <sys/stat.h>

/* A safetensors file: the header's text and N zero bytes behind it. Data is freed by free. */
static inline bml_bytes container_of(const char *header, size_t n)
{
    bml_bytes file = {0};
    uint64_t length = strlen(header);
    char *zeros = calloc(n + 1, 1);
    assert_true(zeros && bml_bytes_append(&file, &length, 8) &&
                bml_bytes_append(&file, header, (size_t)length) &&
                bml_bytes_append(&file, zeros, n));
    free(zeros);
    return file;
}

/* A container that is put together tensor by tensor. */
typedef struct container_builder {
    bml_bytes header, data;
} container_builder;

/* BYTES bytes that the caller fills; SHAPE as in JSON. Valid until the next call. */
static inline char *add_tensor(container_builder *b, const char *name, const char *dtype,
                               const char *shape, size_t bytes)
{
    char entry[512];
    size_t begin = b->data.length;
    int n = snprintf(entry, sizeof entry,
                     "%s\"%s\":{\"dtype\":\"%s\",\"shape\":%s,\"data_offsets\":[%zu,%zu]}",
                     b->header.length ? "," : "{", name, dtype, shape, begin, begin + bytes);
    char *zeros = calloc(bytes + 1, 1);
    assert_true(zeros && bml_bytes_append(&b->header, entry, (size_t)n) &&
                bml_bytes_append(&b->data, zeros, bytes));
    free(zeros);
    return b->data.data + begin;
}

/* The file; its data begins at a multiple of 64 plus MISALIGN. Empties the builder. */
static inline bml_bytes finish_container(container_builder *b, size_t misalign)
{
    bml_bytes file = {0};
    assert_true(
        bml_bytes_append(&b->header, b->header.length ? "}" : "{}", b->header.length ? 1 : 2));
    while ((8 + b->header.length) % 64 != misalign)
        assert_true(bml_bytes_append(&b->header, " ", 1));
    uint64_t length = b->header.length;
    assert_true(bml_bytes_append(&file, &length, 8) &&
                bml_bytes_append(&file, b->header.data, b->header.length) &&
                bml_bytes_append(&file, b->data.data, b->data.length));
    free(b->header.data);
    free(b->data.data);
    *b = (container_builder){0};
    return file;
}

/* ---- temporary directories -------------------------------------------------------------------*/

/* A new empty directory; freed and removed by remove_tree. */
static inline char *make_temp(void)
{
    const char *base = getenv("TMPDIR");
    char *path = bml_format("%s/bml-test-XXXXXX", base && *base ? base : "/tmp");
    assert_non_null(path);
    assert_non_null(mkdtemp(path));
    return path;
}

static inline void remove_below(const char *path)
{
    DIR *dir = opendir(path);
    if (dir) {
        for (struct dirent *entry; (entry = readdir(dir));) {
            if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
                continue;
            char *child = bml_format("%s/%s", path, entry->d_name);
            if (unlink(child) != 0)
                remove_below(child);
            free(child);
        }
        closedir(dir);
    }
    rmdir(path);
}

static inline void remove_tree(char *path)
{
    remove_below(path);
    free(path);
}

/* Writes DIRECTORY/NAME; directories in NAME are made. */
static inline void put_file(const char *directory, const char *name, const void *data, size_t size)
{
    char *path = bml_format("%s/%s", directory, name);
    assert_non_null(path);
    for (char *p = path + strlen(directory) + 1; *p; p++) {
        if (*p == '/') {
            *p = 0;
            mkdir(path, 0777);
            *p = '/';
        }
    }
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(data, 1, size, file), size);
    assert_int_equal(fclose(file), 0);
    free(path);
}

static inline void put_text(const char *directory, const char *name, const char *text)
{
    put_file(directory, name, text, strlen(text));
}

/* The number of entries of a directory. */
static inline int count_entries(const char *path)
{
    int n = 0;
    DIR *dir = opendir(path);
    assert_non_null(dir);
    for (struct dirent *entry; (entry = readdir(dir));)
        n += strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0;
    closedir(dir);
    return n;
}

/* An error of the right kind whose single line holds PART. */
static inline void check_error(const bml_error *err, bml_status status, bml_status expected,
                               const char *part)
{
    if (status != expected || err->code != expected || !strstr(err->message, part) ||
        strpbrk(err->message, "\r\n"))
        fail_msg("status %d, code %d, \"%s\"; expected %d and \"%s\"", status, err->code,
                 err->message, expected, part);
}

#endif
