#include "base/file.h"

#include "base/error.h"
#include "base/memory.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static const uint8_t no_bytes[64] __attribute__((aligned(64)));

/* Opens a regular file and tells its size. */
static bml_status open_regular(const char *path, int *fd, size_t *size, bml_error *err)
{
    /* O_NONBLOCK: a FIFO must be refused below, not waited for. */
    *fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (*fd < 0)
        return bml_fail(err, BML_ERR_IO, "%s: cannot open: %s", path, strerror(errno));
    struct stat st;
    bml_status status = BML_OK;
    if (fstat(*fd, &st) != 0)
        status = bml_fail(err, BML_ERR_IO, "%s: cannot stat: %s", path, strerror(errno));
    else if (!S_ISREG(st.st_mode))
        status = bml_fail(err, BML_ERR_IO, "%s: is not a regular file", path);
    else if ((uint64_t)st.st_size > SIZE_MAX - 1)
        status = bml_fail(err, BML_ERR_IO, "%s: is larger than the address space", path);
    else
        *size = (size_t)st.st_size;
    if (status)
        close(*fd);
    return status;
}

static bml_status read_all(int fd, const char *path, size_t size, bml_file *file, bml_error *err)
{
    size_t padded;
    if (!bml_add_size(size, 64, &padded))
        return bml_fail_memory(err, size, path);
    padded &= ~(size_t)63;
    uint8_t *data = aligned_alloc(64, padded);
    if (!data)
        return bml_fail_memory(err, padded, path);
    size_t done = 0;
    while (done < size) {
        ssize_t n = read(fd, data + done, size - done);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0) {
            free(data);
            return bml_fail(err, BML_ERR_IO, "%s: cannot read byte %zu of %zu: %s", path, done,
                            size, n ? strerror(errno) : "the file became shorter");
        }
        done += (size_t)n;
    }
    memset(data + size, 0, padded - size);
    *file = (bml_file){.data = data, .size = size, .mapped = false};
    return BML_OK;
}

bml_status bml_file_map(const char *path, bml_file *file, bml_error *err)
{
    int fd;
    size_t size = 0;
    bml_status status = open_regular(path, &fd, &size, err);
    if (status)
        return status;
    if (size == 0) {
        *file = (bml_file){.data = no_bytes, .size = 0, .mapped = true};
    } else {
        void *data = mmap(NULL, size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (data == MAP_FAILED)
            status = read_all(fd, path, size, file, err);
        else
            *file = (bml_file){.data = data, .size = size, .mapped = true};
    }
    close(fd);
    return status;
}

bml_status bml_file_read(const char *path, size_t limit, bml_file *file, bml_error *err)
{
    int fd;
    size_t size = 0;
    bml_status status = open_regular(path, &fd, &size, err);
    if (status)
        return status;
    if (size > limit)
        status = bml_fail(err, BML_ERR_FORMAT, "%s: is %zu bytes long, more than the %zu allowed",
                          path, size, limit);
    else
        status = read_all(fd, path, size, file, err);
    close(fd);
    return status;
}

void bml_file_close(bml_file *file)
{
    if (file->data && file->data != no_bytes) {
        if (file->mapped)
            munmap((void *)file->data, file->size);
        else
            free((void *)file->data);
    }
    *file = (bml_file){0};
}

bool bml_path_exists(const char *path)
{
    struct stat st;
    return lstat(path, &st) == 0 || (errno != ENOENT && errno != ENOTDIR);
}

bool bml_path_is_directory(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0 && S_ISDIR(st.st_mode);
}

char *bml_path_join(const char *directory, const char *name)
{
    size_t length = strlen(directory);
    bool slash = length && directory[length - 1] == '/';
    return bml_format("%s%s%s", directory, slash ? "" : "/", name);
}

bool bml_path_ends_with(const char *path, const char *end)
{
    size_t length = strlen(path), n = strlen(end);
    return length >= n && strcmp(path + length - n, end) == 0;
}

char *bml_path_directory(const char *path)
{
    const char *slash = strrchr(path, '/');
    if (bml_path_is_directory(path))
        return bml_strndup(path, strlen(path));
    if (!slash)
        return bml_strndup(".", 1);
    return bml_strndup(path, slash == path ? 1 : (size_t)(slash - path));
}
