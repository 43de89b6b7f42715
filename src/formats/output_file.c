#include "formats/output_file.h"

#include "base/error.h"
#include "base/file.h"
#include "base/memory.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Large pieces at multiples of their size: Linux keeps these in large pages, which reading a mapped
 * file is faster with. */
enum { BLOCK = 8 << 20 };

/* Frees what a file needs while it is open. */
static void closed(bml_output_file *file)
{
    free(file->temporary);
    free(file->block);
    file->temporary = file->block = NULL;
}

bml_status bml_output_open(bml_output_file *file, const char *path, bml_error *err)
{
    *file = (bml_output_file){.path = path};
    /* The process id keeps two writers of one file apart. */
    char *temporary = bml_format("%s.%ld.tmp", path, (long)getpid());
    if (!temporary)
        return bml_fail_memory(err, strlen(path), "a path");
    file->fd = open(temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (file->fd < 0) {
        bml_status status =
            bml_fail(err, BML_ERR_IO, "%s: cannot create: %s", path, strerror(errno));
        free(temporary);
        return status;
    }
    file->temporary = temporary;
    file->block = bml_calloc(1, BLOCK);
    if (file->block)
        return BML_OK;
    bml_output_abandon(file);
    return bml_fail_memory(err, BLOCK, "writing a file");
}

static bml_status write_block(bml_output_file *file, bml_error *err)
{
    for (size_t done = 0; done < file->filled;) {
        ssize_t n = write(file->fd, file->block + done, file->filled - done);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return bml_fail(err, BML_ERR_IO, "%s: cannot write: %s", file->path, strerror(errno));
        done += (size_t)n;
    }
    file->filled = 0;
    return BML_OK;
}

bml_status bml_output_write(bml_output_file *file, const void *data, size_t size, bml_error *err)
{
    const char *bytes = data;
    bml_status status = BML_OK;
    while (size && !status) {
        size_t n = size < BLOCK - file->filled ? size : BLOCK - file->filled;
        memcpy(file->block + file->filled, bytes, n);
        file->filled += n;
        bytes += n;
        size -= n;
        if (file->filled == BLOCK)
            status = write_block(file, err);
    }
    return status;
}

bml_status bml_output_commit(bml_output_file *file, bml_error *err)
{
    bml_status status = write_block(file, err);
    int failed = close(file->fd);
    if (!status && !failed)
        failed = rename(file->temporary, file->path);
    if (!status && failed)
        status = bml_fail(err, BML_ERR_IO, "%s: cannot finish: %s", file->path, strerror(errno));
    if (status)
        unlink(file->temporary);
    closed(file);
    return status;
}

void bml_output_abandon(bml_output_file *file)
{
    if (!file->temporary)
        return;
    close(file->fd);
    unlink(file->temporary);
    closed(file);
}

bml_status bml_make_directory(const char *path, bool *made, bml_error *err)
{
    *made = false;
    char *copy = bml_strndup(path, strlen(path));
    if (!copy)
        return bml_fail_memory(err, strlen(path), "a path");
    for (char *p = copy; *p; p++) {
        if (*p != '/' || p == copy)
            continue;
        *p = 0;
        mkdir(copy, 0777); /* if it fails, so does what follows, and that is reported */
        *p = '/';
    }
    *made = mkdir(copy, 0777) == 0;
    int reason = errno;
    free(copy);
    if (*made || bml_path_is_directory(path))
        return BML_OK;
    return bml_fail(err, BML_ERR_IO, "%s: cannot make the directory: %s", path,
                    reason == EEXIST ? "it is a file" : strerror(reason));
}
