/* A loaded model: the checkpoint's weights as the backend holds them. Immutable after loading. */
#ifndef BML_GPT2_MODEL_H
#define BML_GPT2_MODEL_H

#include "backend/backend.h"

/* Vectors are float32 weights of one row; buffer.data is NULL where the checkpoint has none. */
typedef struct bml_norm_weights {
    bml_weight weight, bias; /* [n_embd] */
} bml_norm_weights;

typedef struct bml_linear_weights {
    bml_weight w;
    bml_weight bias; /* [w.n_out] */
} bml_linear_weights;

typedef struct bml_layer_weights {
    bml_norm_weights ln_1;
    bml_linear_weights c_attn, c_proj;
    bml_norm_weights ln_2;
    bml_linear_weights c_fc, mlp_c_proj;
} bml_layer_weights;

struct bml_model {
    bml_model_info info;
    bml_hf_config config;
    const bml_backend *backend;
    bml_device *device;
    bml_weight wte, wpe;
    bml_layer_weights *layers; /* [n_layer] */
    bml_norm_weights ln_f;
    bml_linear_weights lm_head; /* no bias; wte itself when tied */
    bml_checkpoint *checkpoint; /* the mapped files that weights point into */
    bml_tokenizer *tokenizer;   /* NULL if the checkpoint has none */
    char *name, *path;
};

#endif
