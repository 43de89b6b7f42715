/* From the name of a model to a path: a path itself, the Hugging Face cache, the built-in model. */
#define _GNU_SOURCE /* dladdr, where glibc hides it */

#include "base/error.h"
#include "base/file.h"
#include "base/memory.h"

#include <ctype.h>
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define BUILTIN "models/storyteller"

/* ---- the built-in model ---------------------------------------------------------------------*/

/* *PATH = BASE/RELATIVE if there is such a directory. */
static bml_status try_builtin(const char *base, const char *relative, char **path, bml_error *err)
{
    char *candidate = bml_path_join(base, relative);
    if (!candidate)
        return bml_fail_memory(err, strlen(base), "a path");
    if (bml_path_is_directory(candidate))
        *path = candidate;
    else
        free(candidate);
    return BML_OK;
}

/* The model installed with the program or library at BINARY: in ../share, or one level further up
 * where libraries lie in lib/TRIPLET. */
static bml_status try_installed(const char *binary, char **path, bml_error *err)
{
    char *resolved = realpath(binary, NULL);
    if (!resolved)
        return BML_OK;
    char *directory = bml_path_directory(resolved);
    free(resolved);
    if (!directory)
        return bml_fail_memory(err, PATH_MAX, "a path");
    bml_status status = try_builtin(directory, "../share/bml/" BUILTIN, path, err);
    if (!status && !*path)
        status = try_builtin(directory, "../../share/bml/" BUILTIN, path, err);
    free(directory);
    return status;
}

static bml_status find_builtin(char **path, bml_error *err)
{
    char *found = NULL;
    bml_status status = BML_OK;
    /* What holds this code: the shared library, or a program by the name it was started as, which
     * says where it lies unless it came from PATH. */
    Dl_info info;
    if (dladdr((void *)(uintptr_t)bml_model_find, &info) && info.dli_fname &&
        strchr(info.dli_fname, '/'))
        status = try_installed(info.dli_fname, &found, err);
    if (!status && !found)
        status = try_installed("/proc/self/exe", &found, err);
    if (!status && !found)
        status = try_builtin(BML_DATA_DIR, BUILTIN, &found, err);
    if (!status && !found)
        status = try_builtin(BML_SOURCE_DIR, BUILTIN, &found, err);
    if (!status && !found)
        status = bml_fail(err, BML_ERR_IO,
                          "the built-in model is not installed: there is neither %s/%s nor %s/%s; "
                          "install it with 'make install' or name a model",
                          BML_DATA_DIR, BUILTIN, BML_SOURCE_DIR, BUILTIN);
    if (!status)
        *path = found;
    return status;
}

/* ---- the Hugging Face cache -----------------------------------------------------------------*/

/* "ORG/NAME@REVISION" taken apart; ORG and REVISION may be empty. */
typedef struct hub_id {
    char org[97], name[97], revision[256];
} hub_id;

/* As huggingface_hub's validate_repo_id: letters, digits, "-_.", no "--" or "..", and at neither
 * end a "-" or ".". A part that passes is a plain file name. */
static bool is_repo_part(const char *part)
{
    size_t length = strlen(part);
    if (length == 0 || length > 96 || strstr(part, "--") || strstr(part, "..") ||
        strchr("-.", part[0]) || strchr("-.", part[length - 1]))
        return false;
    for (; *part; part++)
        if (!isalnum((unsigned char)*part) && !strchr("-_.", *part))
            return false;
    return true;
}

/* A branch, a tag ("refs/pr/1" has slashes) or a commit; nothing that leads out of the cache. */
static bool is_revision(const char *text)
{
    if (*text == '/' || *text == '.' || strstr(text, "..") || strstr(text, "/."))
        return false;
    for (; *text; text++)
        if (!isalnum((unsigned char)*text) && !strchr("-_./+", *text))
            return false;
    return true;
}

static bool copy_part(char *out, size_t size, const char *text, size_t length)
{
    if (length >= size)
        return false;
    memcpy(out, text, length);
    out[length] = 0;
    return true;
}

static bool parse_id(const char *text, hub_id *id)
{
    *id = (hub_id){0};
    size_t length = strcspn(text, "@");
    if (text[length] && (!copy_part(id->revision, sizeof id->revision, text + length + 1,
                                    strlen(text + length + 1)) ||
                         !*id->revision || !is_revision(id->revision)))
        return false;
    const char *slash = memchr(text, '/', length);
    if (slash) {
        if (!copy_part(id->org, sizeof id->org, text, (size_t)(slash - text)) ||
            !is_repo_part(id->org))
            return false;
        length -= (size_t)(slash + 1 - text);
        text = slash + 1;
    }
    return copy_part(id->name, sizeof id->name, text, length) && is_repo_part(id->name);
}

/* The cache that huggingface_hub uses under this environment; NULL, and no error, if it has no
 * place. */
static bml_status find_cache(char **cache, bml_error *err)
{
    static const struct {
        const char *variable, *below;
    } places[] = {
        {"HF_HUB_CACHE", ""},
        {"HUGGINGFACE_HUB_CACHE", ""},
        {"HF_HOME", "hub"},
        {"XDG_CACHE_HOME", "huggingface/hub"},
        {"HOME", ".cache/huggingface/hub"},
    };
    *cache = NULL;
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        const char *value = getenv(places[i].variable);
        if (!value || !*value)
            continue;
        *cache = *places[i].below ? bml_path_join(value, places[i].below)
                                  : bml_strndup(value, strlen(value));
        return *cache ? BML_OK : bml_fail_memory(err, strlen(value), "a path");
    }
    return BML_OK;
}

/* The commit that the file REPOSITORY/refs/REVISION names; empty if there is none. */
static bml_status read_ref(const char *repository, const char *revision, char *commit, size_t size,
                           bml_error *err)
{
    *commit = 0;
    char *path = bml_format("%s/refs/%s", repository, revision);
    if (!path)
        return bml_fail_memory(err, strlen(repository), "a path");
    bml_file file;
    bml_status status = BML_OK;
    if (bml_path_exists(path) && !bml_path_is_directory(path)) {
        status = bml_file_read(path, size - 1, &file, err);
        if (!status) {
            const char *text = (const char *)file.data;
            copy_part(commit, size, text, strcspn(text, " \t\r\n"));
            bml_file_close(&file);
            if (!is_repo_part(commit))
                status = bml_fail(err, BML_ERR_FORMAT, "%s: holds no commit hash", path);
        }
    }
    free(path);
    return status;
}

/* The name of the only snapshot of REPOSITORY; empty if there is not exactly one. */
static bml_status only_snapshot(const char *repository, char *name, size_t size, bml_error *err)
{
    *name = 0;
    char *path = bml_path_join(repository, "snapshots");
    if (!path)
        return bml_fail_memory(err, strlen(repository), "a path");
    DIR *dir = opendir(path);
    free(path);
    if (!dir)
        return BML_OK;
    size_t n = 0;
    for (struct dirent *entry; (entry = readdir(dir));)
        if (entry->d_name[0] != '.' && copy_part(name, size, entry->d_name, strlen(entry->d_name)))
            n++;
    closedir(dir);
    if (n != 1)
        *name = 0;
    return BML_OK;
}

/* *PATH = the snapshot of ORG/NAME (ORG may be empty) at REVISION, if the cache holds it. */
static bml_status try_repository(const char *cache, const char *org, const char *name,
                                 const char *revision, char **path, bml_error *err)
{
    char *repository = bml_format("%s/models--%s%s%s", cache, org, *org ? "--" : "", name);
    if (!repository)
        return bml_fail_memory(err, strlen(cache), "a path");
    char commit[256];
    bml_status status =
        read_ref(repository, *revision ? revision : "main", commit, sizeof commit, err);
    if (!status && !*commit) {
        if (!*revision)
            status = only_snapshot(repository, commit, sizeof commit, err);
        else
            copy_part(commit, sizeof commit, revision, strlen(revision));
    }
    if (!status && *commit) {
        char *snapshot = bml_format("%s/snapshots/%s", repository, commit);
        if (!snapshot)
            status = bml_fail_memory(err, strlen(repository), "a path");
        else if (bml_path_is_directory(snapshot))
            *path = snapshot;
        else
            free(snapshot);
    }
    free(repository);
    return status;
}

/* The organisation that now holds a model which once had none; NULL for any other. */
static const char *home_of(const char *name)
{
    static const char *const gpt2[] = {"gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"};
    if (strcmp(name, "distilgpt2") == 0)
        return "distilbert";
    for (size_t i = 0; i < sizeof gpt2 / sizeof *gpt2; i++)
        if (strcmp(name, gpt2[i]) == 0)
            return "openai-community";
    return NULL;
}

static bml_status find_in_cache(const hub_id *id, const char *cache, char **path, bml_error *err)
{
    bml_status status = try_repository(cache, id->org, id->name, id->revision, path, err);
    /* "gpt2" and "openai-community/gpt2" are one model, cached under the name it was asked by. */
    const char *home = home_of(id->name);
    if (status || *path || !home)
        return status;
    if (!*id->org)
        return try_repository(cache, home, id->name, id->revision, path, err);
    if (strcmp(id->org, home) == 0)
        return try_repository(cache, "", id->name, id->revision, path, err);
    return BML_OK;
}

static bml_status not_found(const char *name, const hub_id *id, const char *cache, bml_error *err)
{
    if (!cache)
        return bml_fail(err, BML_ERR_IO,
                        "model \"%s\" not found: there is no such path, and no Hugging Face cache "
                        "to look in (none of HF_HUB_CACHE, HF_HOME and HOME is set)",
                        name);
    const char *org = *id->org ? id->org : home_of(id->name);
    if (!org)
        return bml_fail(
            err, BML_ERR_IO,
            "model \"%s\" not found: there is no such path, and %s holds no snapshot in "
            "models--%s; a Hub id has the form ORGANISATION/NAME",
            name, cache, id->name);
    char bare[128] = "";
    if (!*id->org) /* that is tried first */
        snprintf(bare, sizeof bare, "models--%s or ", id->name);
    return bml_fail(err, BML_ERR_IO,
                    "model \"%s\" not found: there is no such path, and %s holds no snapshot in "
                    "%smodels--%s--%s; get it with 'hf download %s/%s%s%s'",
                    name, cache, bare, org, id->name, org, id->name,
                    *id->revision ? " --revision " : "", id->revision);
}

/* ---- any name -------------------------------------------------------------------------------*/

static bml_status find_hub_model(const char *name, char **path, bml_error *err)
{
    hub_id id;
    if (!parse_id(name, &id))
        return bml_fail(err, BML_ERR_IO,
                        "%s: no such file or directory, nor can it be a Hub id (such as "
                        "openai-community/gpt2)",
                        name);
    char *cache, *found = NULL;
    bml_status status = find_cache(&cache, err);
    if (!status && cache)
        status = find_in_cache(&id, cache, &found, err);
    if (!status && !found)
        status = not_found(name, &id, cache, err);
    free(cache);
    if (!status)
        *path = found;
    return status;
}

bml_status bml_model_find(const char *name, char **path, bml_error *err)
{
    if (!name)
        return find_builtin(path, err);
    if (!*name)
        return bml_fail(err, BML_ERR_ARGUMENT, "the model's name is empty");
    if (!bml_path_exists(name))
        return find_hub_model(name, path, err);
    if (access(name, F_OK) != 0)
        return bml_fail(err, BML_ERR_IO, "%s: cannot open: %s", name, strerror(errno));
    char *copy = bml_strndup(name, strlen(name));
    if (!copy)
        return bml_fail_memory(err, strlen(name), "a path");
    *path = copy;
    return BML_OK;
}
