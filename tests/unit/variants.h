/* The tiny models under data/variants: every way a checkpoint may look, each with the logits of a
 * prompt and a greedy continuation by transformers (tools/reference/make_variants.py). */
#ifndef TESTS_VARIANTS_H
#define TESTS_VARIANTS_H

#include "golden.h"

#include <dirent.h>

enum { MAX_VARIANTS = 256, MIN_VARIANTS = 40 };

typedef struct variant {
    char name[64];
    char directory[1024];
} variant;

/* What one directory says, and the model in it. */
typedef struct loaded {
    bml_model *model;
    const bml_model_info *info;
    json_t *golden;
    int32_t *prompt, *greedy;
    size_t n_prompt, n_greedy;
    float *logits; /* [n_prompt, vocab_size] */
    size_t n_logits;
} loaded;

static inline loaded variant_load(const variant *v, bml_backend_kind backend)
{
    loaded l = {0};
    bml_model_options options = {.backend = backend};
    bml_error err;
    char path[1100];

    snprintf(path, sizeof path, "%s/golden.json", v->directory);
    l.golden = golden_json(path);
    l.prompt = golden_ids(l.golden, "prompt_ids", &l.n_prompt);
    l.greedy = golden_ids(l.golden, "greedy", &l.n_greedy);

    expect_ok(bml_model_load(v->directory, &options, &l.model, &err), &err);
    l.info = bml_model_get_info(l.model);
    l.n_logits = l.n_prompt * (size_t)l.info->vocab_size;
    l.logits = malloc((l.n_logits + 1) * sizeof *l.logits);
    assert_non_null(l.logits);
    snprintf(path, sizeof path, "%s/golden.bin", v->directory);
    FILE *file = fopen(path, "rb");
    assert_non_null(file);
    /* One more than there should be: a wrong vocab_size is noticed here. */
    assert_int_equal(fread(l.logits, sizeof *l.logits, l.n_logits + 1, file), l.n_logits);
    fclose(file);
    return l;
}

static inline void variant_free(loaded *l)
{
    bml_model_free(l->model);
    json_decref(l->golden);
    free(l->prompt);
    free(l->greedy);
    free(l->logits);
}

static inline int compare_variants(const void *a, const void *b)
{
    return strcmp(((const variant *)a)->name, ((const variant *)b)->name);
}

/* The directories under data/variants, by name; their number. */
static inline size_t find_variants(variant *variants)
{
    DIR *directory = opendir(TEST_DATA "/variants");
    size_t n = 0;
    if (!directory)
        return 0;
    for (struct dirent *entry; n < MAX_VARIANTS && (entry = readdir(directory));) {
        variant *v = &variants[n];
        int length = snprintf(v->name, sizeof v->name, "%s", entry->d_name);
        if (entry->d_name[0] == '.' || length < 0 || (size_t)length >= sizeof v->name)
            continue;
        snprintf(v->directory, sizeof v->directory, TEST_DATA "/variants/%s", v->name);
        n++;
    }
    closedir(directory);
    qsort(variants, n, sizeof *variants, compare_variants);
    return n;
}

/* A batch of LENGTHS[slot] random tokens for each slot, all rows wanted; returns how many. */
static inline size_t random_batch(bml_batch_token *batch, const int *lengths, int n_slots,
                                  size_t vocab, uint64_t *seed)
{
    size_t n = 0;
    for (int slot = 0; slot < n_slots; slot++)
        for (int t = 0; t < lengths[slot]; t++)
            batch[n++] = (bml_batch_token){(int32_t)(test_random(seed) % vocab), slot, true};
    return n;
}

#endif
