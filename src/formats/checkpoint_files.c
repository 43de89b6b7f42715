#include "formats/checkpoint_files.h"

#include "base/error.h"
#include "base/file.h"
#include "base/memory.h"
#include "formats/foreign.h"

#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* What a directory holds in the way of weights. */
typedef struct listing {
    char *safetensors; /* the name of one *.safetensors file */
    size_t n_safetensors;
    char *foreign; /* the name of one file in a format that cannot be read */
} listing;

static bool is_foreign(const char *name)
{
    static const char *const ends[] = {".bin", ".pt",   ".pth",     ".ckpt",
                                       ".h5",  ".gguf", ".msgpack", ".onnx"};
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++)
        if (bml_path_ends_with(name, ends[i]))
            return true;
    return false;
}

/* Keeps the alphabetically first of the names, for errors that do not depend on the disk. */
static bool keep_first(char **kept, const char *name)
{
    if (*kept && strcmp(*kept, name) <= 0)
        return true;
    char *copy = bml_strndup(name, strlen(name));
    if (!copy)
        return false;
    free(*kept);
    *kept = copy;
    return true;
}

static void clear_listing(listing *found)
{
    free(found->safetensors);
    free(found->foreign);
}

static bml_status list(const char *directory, listing *found, bml_error *err)
{
    *found = (listing){0};
    DIR *dir = opendir(directory);
    if (!dir)
        return bml_fail(err, BML_ERR_IO, "%s: cannot read the directory: %s", directory,
                        strerror(errno));
    bool enough = true;
    for (struct dirent *entry; enough && (entry = readdir(dir));) {
        if (bml_path_ends_with(entry->d_name, ".safetensors")) {
            found->n_safetensors++;
            enough = keep_first(&found->safetensors, entry->d_name);
        } else if (is_foreign(entry->d_name)) {
            enough = keep_first(&found->foreign, entry->d_name);
        }
    }
    closedir(dir);
    if (enough)
        return BML_OK;
    clear_listing(found);
    return bml_fail_memory(err, 256, "a file's name");
}

bml_status bml_checkpoint_no_weights(const char *directory, bml_error *err)
{
    listing found;
    bml_status status = list(directory, &found, err);
    if (status)
        return status;
    if (found.n_safetensors)
        status = bml_fail(err, BML_ERR_IO,
                          "%s: holds %zu .safetensors files, but neither model.safetensors nor "
                          "model.safetensors.index.json; give the file itself, such as %s",
                          directory, found.n_safetensors, found.safetensors);
    else if (found.foreign)
        status = bml_fail(err, BML_ERR_UNSUPPORTED,
                          "%s: holds %s, but no model.safetensors, the only format that is read; "
                          "%s",
                          directory, found.foreign, BML_CONVERT_HINT);
    else
        status = bml_fail(err, BML_ERR_IO,
                          "%s: holds no weights: neither model.safetensors nor "
                          "model.safetensors.index.json is there",
                          directory);
    clear_listing(&found);
    return status;
}

/* *WEIGHTS is NULL when there are none, or more than one and none of the usual name. */
static bml_status find_weights(const char *directory, char **weights, bml_error *err)
{
    static const char *const usual[] = {"model.safetensors", "model.safetensors.index.json"};
    for (size_t i = 0; i < sizeof usual / sizeof *usual; i++) {
        *weights = bml_path_join(directory, usual[i]);
        if (!*weights)
            return bml_fail_memory(err, strlen(directory), "a path");
        if (bml_path_exists(*weights))
            return BML_OK;
        free(*weights);
        *weights = NULL;
    }
    listing found;
    bml_status status = list(directory, &found, err);
    if (status)
        return status;
    if (found.n_safetensors == 1) {
        *weights = bml_path_join(directory, found.safetensors);
        if (!*weights)
            status = bml_fail_memory(err, strlen(directory), "a path");
    }
    clear_listing(&found);
    return status;
}

bml_status bml_checkpoint_files_find(const char *path, bml_checkpoint_files *files, bml_error *err)
{
    *files = (bml_checkpoint_files){0};
    if (!bml_path_exists(path))
        return bml_fail(err, BML_ERR_IO, "%s: cannot open: %s", path, strerror(errno));
    bool is_directory = bml_path_is_directory(path);
    bml_status status = BML_OK;
    files->directory = bml_path_directory(path);
    if (files->directory)
        files->config = bml_path_join(files->directory, "config.json");
    if (!files->config)
        status = bml_fail_memory(err, strlen(path), "a path");
    else if (is_directory)
        status = find_weights(path, &files->weights, err);
    else if (!(files->weights = bml_strndup(path, strlen(path))))
        status = bml_fail_memory(err, strlen(path), "a path");
    if (status)
        bml_checkpoint_files_clear(files);
    return status;
}

void bml_checkpoint_files_clear(bml_checkpoint_files *files)
{
    free(files->directory);
    free(files->config);
    free(files->weights);
    *files = (bml_checkpoint_files){0};
}
