/* Checkpoints with random weights, for shapes that no model here has. */
#ifndef TESTS_RANDOM_MODEL_H
#define TESTS_RANDOM_MODEL_H

#include "containers.h"

#include <math.h>

typedef struct random_shape {
    int n_embd, n_head, n_inner;
    double scale; /* of x, and so of what is added to it; 0: 1 */
} random_shape;

enum { RANDOM_LAYERS = 2, RANDOM_POSITIONS = 192, RANDOM_VOCAB = 515 };

/* ROWS times COLS values, evenly from MEAN - SPREAD to MEAN + SPREAD. */
static inline void add_random(container_builder *b, uint64_t *seed, const char *name, int rows,
                              int cols, double mean, double spread)
{
    char shape[64];
    size_t n = (size_t)rows * (size_t)cols;
    if (rows == 1)
        snprintf(shape, sizeof shape, "[%d]", cols);
    else
        snprintf(shape, sizeof shape, "[%d,%d]", rows, cols);
    char *data = add_tensor(b, name, "F32", shape, 4 * n);
    for (size_t i = 0; i < n; i++) {
        float v = (float)(mean + spread * ((double)(test_random(seed) >> 11) * 0x1p-52 - 1));
        memcpy(data + 4 * i, &v, 4);
    }
}

/* A norm: its weight, and its bias. */
static inline void add_random_norm(container_builder *b, uint64_t *seed, const char *name, int n)
{
    char full[128];
    snprintf(full, sizeof full, "%s.weight", name);
    add_random(b, seed, full, 1, n, 1, 0.3);
    snprintf(full, sizeof full, "%s.bias", name);
    add_random(b, seed, full, 1, n, 0, 0.3);
}

/* A product whose outputs are about SCALE times as large as its inputs: with 1 none is drowned out
 * by what the others add to x. */
static inline void add_random_linear(container_builder *b, uint64_t *seed, int layer,
                                     const char *name, int n_in, int n_out, double scale)
{
    char full[128];
    snprintf(full, sizeof full, "h.%d.%s.weight", layer, name);
    add_random(b, seed, full, n_in, n_out, 0, scale * 2 / sqrt(n_in));
    snprintf(full, sizeof full, "h.%d.%s.bias", layer, name);
    add_random(b, seed, full, 1, n_out, 0, scale * 0.3);
}

/* The directory of a new model; remove_tree() removes it. */
static inline char *make_random_model(const random_shape *s, uint64_t seed)
{
    char name[64], *directory = make_temp();
    container_builder b = {0};
    int e = s->n_embd;
    double scale = s->scale > 0 ? s->scale : 1;
    add_random(&b, &seed, "wte.weight", RANDOM_VOCAB, e, 0, scale);
    add_random(&b, &seed, "wpe.weight", RANDOM_POSITIONS, e, 0, scale);
    for (int i = 0; i < RANDOM_LAYERS; i++) {
        snprintf(name, sizeof name, "h.%d.ln_1", i);
        add_random_norm(&b, &seed, name, e);
        add_random_linear(&b, &seed, i, "attn.c_attn", e, 3 * e, 1);
        add_random_linear(&b, &seed, i, "attn.c_proj", e, e, scale);
        snprintf(name, sizeof name, "h.%d.ln_2", i);
        add_random_norm(&b, &seed, name, e);
        add_random_linear(&b, &seed, i, "mlp.c_fc", e, s->n_inner, 1);
        add_random_linear(&b, &seed, i, "mlp.c_proj", s->n_inner, e, scale);
    }
    add_random_norm(&b, &seed, "ln_f", e);
    add_random(&b, &seed, "lm_head.weight", RANDOM_VOCAB, e, 0, 1);
    bml_bytes file = finish_container(&b, 0);
    put_file(directory, "model.safetensors", file.data, file.length);
    free(file.data);
    char *config = bml_format(
        "{\"model_type\": \"gpt2\", \"n_embd\": %d, \"n_head\": %d, \"n_inner\": %d, "
        "\"n_layer\": %d, \"n_positions\": %d, \"vocab_size\": %d, \"tie_word_embeddings\": false}",
        e, s->n_head, s->n_inner, RANDOM_LAYERS, RANDOM_POSITIONS, RANDOM_VOCAB);
    assert_non_null(config);
    put_text(directory, "config.json", config);
    free(config);
    return directory;
}

#endif
