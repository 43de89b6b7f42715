/* The inside of bml_safetensors: what the single file and the sharded index are both built of. */
#ifndef BML_FORMATS_SAFETENSORS_SET_H
#define BML_FORMATS_SAFETENSORS_SET_H

#include "base/file.h"
#include "formats/safetensors.h"

typedef struct bml_shard {
    char *path;
    bml_file file; /* {0} when the data is the caller's */
} bml_shard;

struct bml_safetensors {
    bml_shard *shards;
    size_t n_shards;
    bml_tensor *tensors;
    size_t n_tensors;
};

/* Maps the file at PATH and adds its tensors. On failure ST may hold part of them: close it. */
bml_status bml_safetensors_add_file(bml_safetensors *st, const char *path, bml_error *err);

/* Once all files are in (the index does it itself): sorts the tensors by name and refuses a name
 * that is there twice. */
bml_status bml_safetensors_finish(bml_safetensors *st, bml_error *err);

/* Adds all the shards that the index file at PATH names. */
bml_status bml_safetensors_add_index(bml_safetensors *st, const char *path, bml_error *err);

#endif
