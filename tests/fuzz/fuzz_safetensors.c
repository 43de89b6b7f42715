/* Any bytes as a safetensors file, and what parses as the weights of a small GPT-2. */
#include "formats/checkpoint.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Reads every byte, so that a sanitizer sees one that is not there. */
static void read_all(const void *data, size_t size)
{
    volatile uint8_t sum = 0;
    for (size_t i = 0; i < size; i++)
        sum = (uint8_t)(sum + ((const uint8_t *)data)[i]);
}

static void read_matrix(const bml_matrix *m)
{
    size_t size = m->dtype == BML_F32 ? 4 : 2;
    read_all(m->data, (size_t)m->rows * (size_t)m->cols * size);
}

static void map_checkpoint(bml_safetensors *st, bool tie)
{
    const bml_hf_config config = {.n_layer = 1,
                                  .n_head = 1,
                                  .n_embd = 2,
                                  .n_inner = 2,
                                  .n_positions = 2,
                                  .vocab_size = 3,
                                  .layer_norm_epsilon = 1e-5f,
                                  .tie_word_embeddings = tie,
                                  .bos_token_id = -1,
                                  .eos_token_id = -1};
    bml_checkpoint *c;
    bml_error err;
    if (bml_checkpoint_map(&config, st, "fuzz", &c, &err))
        return;
    read_matrix(&c->wte);
    read_matrix(&c->lm_head);
    read_matrix(&c->wpe);
    read_matrix(&c->layers[0].c_attn.w);
    read_matrix(&c->layers[0].c_proj.w);
    read_matrix(&c->layers[0].c_fc.w);
    read_matrix(&c->layers[0].mlp_c_proj.w);
    read_all(c->ln_f.weight, 2 * sizeof(float));
    if (c->layers[0].c_attn.bias)
        read_all(c->layers[0].c_attn.bias, 6 * sizeof(float));
    bml_checkpoint_close(c);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    bml_safetensors *st;
    bml_error err;
    if (bml_safetensors_parse(data, size, "fuzz", &st, &err))
        return 0;
    for (size_t i = 0; i < bml_safetensors_count(st); i++) {
        const bml_tensor *t = bml_safetensors_at(st, i);
        read_all(t->data, t->bytes);
        if (bml_safetensors_find(st, t->name) != t)
            abort();
    }
    map_checkpoint(st, size % 2);
    return 0;
}
