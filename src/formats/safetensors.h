/*
 * The safetensors container (https://github.com/huggingface/safetensors#format): 8 bytes of
 * little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, then the data.
 */
#ifndef BML_FORMATS_SAFETENSORS_H
#define BML_FORMATS_SAFETENSORS_H

#include "bml.h"

enum { BML_MAX_DIMS = 8 };

typedef struct bml_tensor {
    char *name;
    char dtype[16]; /* as in the header: "F32", "BF16", "I64", ...; longer names are cut */
    int n_dims;     /* a scalar has none */
    int64_t shape[BML_MAX_DIMS];
    const void *data; /* into the mapping; as aligned as the file makes it */
    size_t bytes;
    bool mapped;      /* not read into memory */
    const char *file; /* the path of the file that holds it; owned by the container */
} bml_tensor;

typedef struct bml_safetensors bml_safetensors;

/*
 * Opens one .safetensors file, or a sharded checkpoint through its model.safetensors.index.json.
 * Everything is checked: the header's length (100 MB at most) before it is read, each dtype's
 * size times shape against its offsets, overlaps, gaps, and the end of the file. A dtype that the
 * format does not know is let through unchecked: whoever needs that tensor must refuse it.
 */
bml_status bml_safetensors_open(const char *path, bml_safetensors **st, bml_error *err);
void bml_safetensors_close(bml_safetensors *st);

/* The container in memory: for tests and fuzzing. DATA must outlive ST. */
bml_status bml_safetensors_parse(const void *data, size_t size, const char *origin,
                                 bml_safetensors **st, bml_error *err);

/* The tensors, sorted by name. */
size_t bml_safetensors_count(const bml_safetensors *st);
const bml_tensor *bml_safetensors_at(const bml_safetensors *st, size_t index);

/* NULL if there is none of that name. */
const bml_tensor *bml_safetensors_find(const bml_safetensors *st, const char *name);

/* The shape as "[768, 2304]", cut if it does not fit; returns TEXT. */
const char *bml_shape_text(const int64_t *shape, int n_dims, char *text, size_t size);

#endif
