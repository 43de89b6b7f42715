/* Files that are often found where a model file should be. */
#ifndef BML_FORMATS_FOREIGN_H
#define BML_FORMATS_FOREIGN_H

#include "bml.h"

/* What to do with a PyTorch checkpoint, for errors. */
#define BML_CONVERT_HINT                                                                           \
    "load it in transformers and write it with save_pretrained(DIR), which makes "                 \
    "model.safetensors"

/*
 * Fails with the file's true nature and what to do when DATA begins as a known foreign format
 * does (git-LFS pointer, PyTorch pickle or zip, GGUF, HDF5, HTML); BML_OK if it does not.
 */
bml_status bml_refuse_foreign(const void *data, size_t size, const char *origin, bml_error *err);

#endif
