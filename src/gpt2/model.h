/* A loaded model: the checkpoint's weights as the backend holds them. Immutable after loading. */
#ifndef BML_GPT2_MODEL_H
#define BML_GPT2_MODEL_H

#include "backend/backend.h"

struct bml_model {
    bml_model_info info;
    const bml_backend *backend;
    bml_device *device;
    bml_weights weights;
    bml_checkpoint *checkpoint; /* the mapped files that weights point into */
    bml_tokenizer *tokenizer;   /* NULL if the checkpoint has none */
    char *name, *path;
};

#endif
