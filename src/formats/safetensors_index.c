/* model.safetensors.index.json: {"weight_map": {tensor: file}, ...} for a sharded checkpoint. */
#include "base/error.h"
#include "base/memory.h"
#include "formats/foreign.h"
#include "formats/json.h"
#include "formats/safetensors_set.h"

#include <stdlib.h>
#include <string.h>

enum { MAX_INDEX = 100000000 };

/* Shards lie beside the index: a plain file name, nothing that leads elsewhere. */
static bool is_plain_name(const char *name)
{
    return *name && !strchr(name, '/') && !strchr(name, '\\') && strcmp(name, ".") != 0 &&
           strcmp(name, "..") != 0;
}

/* The path of file NAME beside the index at PATH. */
static char *beside(const char *path, const char *name)
{
    char *directory = bml_path_directory(path);
    char *joined = directory ? bml_path_join(directory, name) : NULL;
    free(directory);
    return joined;
}

/* Opens the shard NAME unless that is done already, which SHARDS (name -> true) remembers. */
static bml_status open_shard(bml_safetensors *st, const char *path, const char *tensor,
                             const char *name, json_t *shards, bml_error *err)
{
    if (json_object_get(shards, name))
        return BML_OK;
    if (!is_plain_name(name))
        return bml_fail(err, BML_ERR_FORMAT,
                        "%s: tensor \"%s\" is said to lie in \"%s\", which is not the plain name "
                        "of a file beside the index",
                        path, tensor, name);
    char *shard = beside(path, name);
    if (!shard || json_object_set_new(shards, name, json_true()) != 0) {
        free(shard);
        return bml_fail_memory(err, strlen(name), "the list of shards");
    }
    bml_status status = bml_safetensors_add_file(st, shard, err);
    if (status) {
        char *where = bml_format("%s names the shard \"%s\"", path, name);
        if (where)
            bml_error_prefix(err, where);
        free(where);
    }
    free(shard);
    return status;
}

/* Every tensor of the index must be in the shard that the index says. */
static bml_status check_places(const bml_safetensors *st, const char *path, json_t *weight_map,
                               bml_error *err)
{
    const char *tensor;
    json_t *shard;
    json_object_foreach(weight_map, tensor, shard)
    {
        const char *name = json_string_value(shard);
        const bml_tensor *t = bml_safetensors_find(st, tensor);
        if (!t)
            return bml_fail(err, BML_ERR_FORMAT, "%s: tensor \"%s\" is not in its shard \"%s\"",
                            path, tensor, name);
        const char *slash = strrchr(t->file, '/');
        if (strcmp(slash ? slash + 1 : t->file, name) != 0)
            return bml_fail(err, BML_ERR_FORMAT,
                            "%s: tensor \"%s\" is not in its shard \"%s\", but in %s", path, tensor,
                            name, t->file);
    }
    return BML_OK;
}

static bml_status open_shards(bml_safetensors *st, const char *path, json_t *index, bml_error *err)
{
    json_t *weight_map = json_object_get(index, "weight_map");
    if (!json_is_object(weight_map) || json_object_size(weight_map) == 0)
        return bml_fail(err, BML_ERR_FORMAT, "%s: has no \"weight_map\" object from tensor to file",
                        path);
    json_t *shards = json_object();
    if (!shards)
        return bml_fail_memory(err, 64, "the list of shards");
    bml_status status = BML_OK;
    const char *tensor;
    json_t *shard;
    json_object_foreach(weight_map, tensor, shard)
    {
        if (!json_is_string(shard))
            status = bml_fail(err, BML_ERR_FORMAT, "%s: the file of tensor \"%s\" is not a string",
                              path, tensor);
        else
            status = open_shard(st, path, tensor, json_string_value(shard), shards, err);
        if (status)
            break;
    }
    json_decref(shards);
    if (!status)
        status = bml_safetensors_finish(st, err);
    return status ? status : check_places(st, path, weight_map, err);
}

bml_status bml_safetensors_add_index(bml_safetensors *st, const char *path, bml_error *err)
{
    bml_file file;
    json_t *index = NULL;
    bml_status status = bml_file_read(path, MAX_INDEX, &file, err);
    if (status)
        return status;
    const char *text = (const char *)file.data;
    status = bml_refuse_foreign(text, file.size, path, err);
    if (!status)
        status = bml_json_parse_object(text, file.size, JSON_REJECT_DUPLICATES, path, &index, err);
    bml_file_close(&file);
    if (status)
        return status;
    status = open_shards(st, path, index, err);
    json_decref(index);
    return status;
}
