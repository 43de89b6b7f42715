/* Which files on disk make up a checkpoint. */
#ifndef BML_FORMATS_CHECKPOINT_FILES_H
#define BML_FORMATS_CHECKPOINT_FILES_H

#include "bml.h"

/* Paths, each a string of its own. That they exist is certain only of WEIGHTS. */
typedef struct bml_checkpoint_files {
    char *directory; /* where config.json and the tokenizer lie */
    char *config;    /* DIRECTORY/config.json */
    char *weights;   /* a .safetensors file or a .safetensors.index.json; NULL without any */
} bml_checkpoint_files;

/*
 * PATH is a directory or a weights file. In a directory the weights are model.safetensors, else
 * model.safetensors.index.json, else the only *.safetensors there is. A directory without any is
 * no error here (WEIGHTS is NULL); bml_checkpoint_no_weights tells why.
 */
bml_status bml_checkpoint_files_find(const char *path, bml_checkpoint_files *files, bml_error *err);
void bml_checkpoint_files_clear(bml_checkpoint_files *files);

/* The error for a directory without safetensors weights: says what is there instead. */
bml_status bml_checkpoint_no_weights(const char *directory, bml_error *err);

#endif
