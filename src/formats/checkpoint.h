/*
 * A GPT-2 checkpoint on disk as one set of weights, whatever its names, layout and dtype.
 * Matrices point into the mapped files unless their dtype (F64) or alignment forces a copy.
 */
#ifndef BML_FORMATS_CHECKPOINT_H
#define BML_FORMATS_CHECKPOINT_H

#include "formats/hf_config.h"
#include "formats/safetensors.h"

/* A row-major matrix as the file stores it; dtype is F32, F16 or BF16, data aligned for it. */
typedef struct bml_matrix {
    const void *data;
    bml_dtype dtype;
    int rows, cols;
    bool mapped; /* data lies in a mapped file, whose whole pages a device may share */
} bml_matrix;

/* y = x W + b. Conv1D stores W as [in, out], nn.Linear as [out, in]. */
typedef struct bml_linear {
    bml_matrix w;
    bool out_in;       /* true: w.rows is out, w.cols is in */
    const float *bias; /* float32 [out]; NULL if the checkpoint has none */
} bml_linear;

/* Layer normalisation's parameters, float32 [n_embd]. */
typedef struct bml_norm {
    const float *weight;
    const float *bias; /* NULL if the checkpoint has none */
} bml_norm;

/* Named as Hugging Face names them: h.N.ln_1, h.N.attn.c_attn, ... */
typedef struct bml_layer {
    bml_norm ln_1;
    bml_linear c_attn; /* n_embd -> 3 n_embd: Q, K, V side by side */
    bml_linear c_proj; /* n_embd -> n_embd */
    bml_norm ln_2;
    bml_linear c_fc;       /* n_embd -> n_inner */
    bml_linear mlp_c_proj; /* n_inner -> n_embd */
} bml_layer;

typedef struct bml_checkpoint {
    bml_hf_config config;
    bml_matrix wte;     /* [vocab_size, n_embd] */
    bml_matrix wpe;     /* [n_positions, n_embd] */
    bml_matrix lm_head; /* [vocab_size, n_embd]; the same data as wte when tied */
    bool tied;
    bml_layer *layers; /* n_layer of them */
    bml_norm ln_f;
    uint64_t n_params;      /* elements of the tensors used */
    uint64_t file_bytes;    /* their bytes as stored */
    bml_safetensors *files; /* owned, as is what follows */
    void **copies;          /* memory for what could not be used in place */
    size_t n_copies;
} bml_checkpoint;

/*
 * PATH is a directory or a .safetensors file (its config.json lies beside it). Which output head
 * there is goes as in transformers 5: with tie_word_embeddings a file's own lm_head.weight counts
 * only where it differs from wte.weight, and either may stand for both; without, both must be
 * there.
 */
bml_status bml_checkpoint_open(const char *path, bml_checkpoint **checkpoint, bml_error *err);

/*
 * The same from a container that is already open, which the checkpoint takes over (on failure it
 * is closed). ORIGIN names it in errors.
 */
bml_status bml_checkpoint_map(const bml_hf_config *config, bml_safetensors *files,
                              const char *origin, bml_checkpoint **checkpoint, bml_error *err);

/* NULL is fine. */
void bml_checkpoint_close(bml_checkpoint *checkpoint);

#endif
