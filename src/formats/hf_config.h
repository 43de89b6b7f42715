/* Hugging Face's config.json for GPT-2 (transformers, models/gpt2/configuration_gpt2.py). */
#ifndef BML_FORMATS_HF_CONFIG_H
#define BML_FORMATS_HF_CONFIG_H

#include "bml.h"

/* Activation functions by what they compute; several names in config.json share one. */
typedef enum bml_activation {
    BML_ACT_GELU_TANH, /* gelu_new, gelu_fast, gelu_pytorch_tanh */
    BML_ACT_GELU_ERF,  /* gelu */
    BML_ACT_RELU       /* relu */
} bml_activation;

enum { BML_MOST_EOS = 8 };

/* Every size is positive and small enough that 3 * n_embd and the like fit an int. */
typedef struct bml_hf_config {
    int n_layer, n_head, n_embd, n_inner, n_positions, vocab_size;
    float layer_norm_epsilon; /* finite, > 0 */
    bml_activation activation;
    bool scale_attn_weights;              /* divide scores by sqrt(head size) */
    bool scale_attn_by_inverse_layer_idx; /* and by layer index + 1 */
    bool tie_word_embeddings;
    int bos_token_id, eos_token_id; /* below vocab_size; -1: none; of a list, its first */
    int more_eos[BML_MOST_EOS - 1]; /* the others of a list; unused ones are -1 */
} bml_hf_config;

/* Whether a token ends a text. */
bool bml_is_eos(const bml_hf_config *config, int32_t token);

/*
 * Parses and checks the text of a config.json. ORIGIN (a path) goes into error messages. Missing
 * keys get the defaults of transformers' GPT2Config.
 */
bml_status bml_hf_config_parse(const char *text, size_t length, const char *origin,
                               bml_hf_config *config, bml_error *err);

/* Reads and parses the file at PATH. */
bml_status bml_hf_config_read(const char *path, bml_hf_config *config, bml_error *err);

#endif
