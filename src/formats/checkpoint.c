#include "formats/checkpoint.h"

#include "base/dtype.h"
#include "base/error.h"
#include "base/file.h"
#include "base/memory.h"
#include "formats/checkpoint_files.h"
#include "formats/names.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A checkpoint while it is put together. */
typedef struct loader {
    bml_checkpoint *checkpoint;
    bml_tensor_map map;
    const char *origin;
    bool out_in; /* nn.Linear: matrices are stored [out, in] */
    bml_error *err;
} loader;

/* ---- one tensor -----------------------------------------------------------------------------*/

static bml_status read_dtype(const loader *l, const bml_tensor *t, bml_dtype *dtype)
{
    static const char *const names[] = {
        [BML_F32] = "F32", [BML_F16] = "F16", [BML_BF16] = "BF16", [BML_F64] = "F64"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (strcmp(t->dtype, names[i]) == 0) {
            *dtype = (bml_dtype)i;
            return BML_OK;
        }
    }
    return bml_fail(l->err, BML_ERR_UNSUPPORTED,
                    "%s: tensor \"%s\" has dtype %s, which is not supported for weights; supported "
                    "are F32, F16, BF16 and F64",
                    t->file, t->name, t->dtype);
}

/* The error for a shape that is not [ROWS, COLS], or [ROWS] where COLS is 0. */
static bml_status wrong_shape(const loader *l, const bml_tensor *t, int rows, int cols,
                              const char *because)
{
    int64_t right[2] = {rows, cols};
    char found[160], expected[48];
    return bml_fail(l->err, BML_ERR_FORMAT, "%s: tensor \"%s\" has shape %s; expected %s%s",
                    t->file, t->name, bml_shape_text(t->shape, t->n_dims, found, sizeof found),
                    bml_shape_text(right, cols ? 2 : 1, expected, sizeof expected), because);
}

static bool has_shape(const bml_tensor *t, int rows, int cols)
{
    return t->n_dims == 2 && t->shape[0] == rows && t->shape[1] == cols;
}

/* Memory that lives as long as the checkpoint. */
static bml_status new_copy(const loader *l, const bml_tensor *t, size_t count, size_t size,
                           void **copy)
{
    bml_checkpoint *c = l->checkpoint;
    *copy = bml_calloc(count, size);
    if (!*copy)
        return bml_fail(l->err, BML_ERR_MEMORY,
                        "out of memory: could not allocate %zu elements of %zu bytes for a copy of "
                        "tensor \"%s\" of %s",
                        count, size, t->name, t->file);
    c->copies[c->n_copies++] = *copy;
    return BML_OK;
}

static void to_float(const void *data, bml_dtype dtype, size_t count, float *out)
{
    const uint8_t *bytes = data;
    for (size_t i = 0; i < count; i++, bytes += bml_dtype_size(dtype)) {
        /* By memcpy: nothing says that the file aligns its tensors. */
        uint16_t half;
        double wide;
        if (dtype == BML_F64) {
            memcpy(&wide, bytes, sizeof wide);
            out[i] = (float)wide;
        } else if (dtype == BML_F32) {
            memcpy(&out[i], bytes, sizeof *out);
        } else {
            memcpy(&half, bytes, sizeof half);
            out[i] = dtype == BML_F16 ? bml_f16_to_f32(half) : bml_bf16_to_f32(half);
        }
    }
}

static bool is_aligned(const bml_tensor *t, size_t size)
{
    return (uintptr_t)t->data % size == 0;
}

/* Counts a tensor of a checked shape among those used. */
static size_t count_elements(const loader *l, const bml_tensor *t, bml_dtype dtype)
{
    size_t count = t->bytes / bml_dtype_size(dtype);
    l->checkpoint->n_params += count;
    l->checkpoint->file_bytes += t->bytes;
    return count;
}

/* T as a matrix, in place where dtype and alignment allow. Its shape is checked already. */
static bml_status take_matrix(const loader *l, const bml_tensor *t, bml_matrix *m)
{
    bml_dtype dtype = BML_F32;
    bml_status status = read_dtype(l, t, &dtype);
    if (status)
        return status;
    size_t count = count_elements(l, t, dtype);
    *m = (bml_matrix){t->data, dtype, (int)t->shape[0], (int)t->shape[1], t->mapped};
    if (dtype != BML_F64 && is_aligned(t, bml_dtype_size(dtype)))
        return BML_OK;
    if (dtype == BML_F64)
        m->dtype = BML_F32;
    void *copy;
    status = new_copy(l, t, count, bml_dtype_size(m->dtype), &copy);
    if (status)
        return status;
    if (dtype == BML_F64)
        to_float(t->data, dtype, count, copy);
    else
        memcpy(copy, t->data, t->bytes);
    m->data = copy;
    m->mapped = false;
    return BML_OK;
}

/* T as float32 [N]. */
static bml_status take_vector(const loader *l, const bml_tensor *t, int n, const float **vector)
{
    if (t->n_dims != 1 || t->shape[0] != n)
        return wrong_shape(l, t, n, 0, "");
    bml_dtype dtype = BML_F32;
    bml_status status = read_dtype(l, t, &dtype);
    if (status)
        return status;
    size_t count = count_elements(l, t, dtype);
    if (dtype == BML_F32 && is_aligned(t, sizeof(float))) {
        *vector = t->data;
        return BML_OK;
    }
    void *copy;
    status = new_copy(l, t, count, sizeof(float), &copy);
    if (status)
        return status;
    to_float(t->data, dtype, count, copy);
    *vector = copy;
    return BML_OK;
}

/* ---- finding tensors ------------------------------------------------------------------------*/

static bml_status missing(const loader *l, bml_role role, int layer, const char *because)
{
    char in_layer[16] = "";
    if (role >= BML_FIRST_LAYER_ROLE)
        snprintf(in_layer, sizeof in_layer, "h.%d.", layer);
    const char *name = bml_role_name(role);
    return bml_fail(l->err, BML_ERR_FORMAT,
                    "%s: tensor \"%s%s\" is missing; looked for it under that name, as "
                    "\"transformer.%s%s\", and with \"_orig_mod.\", \"module.\" or \"model.\" in "
                    "front%s",
                    l->origin, in_layer, name, in_layer, name, because);
}

static bml_status need_vector(const loader *l, bml_role role, int layer, int n,
                              const float **vector)
{
    const bml_tensor *t = bml_tensor_map_get(&l->map, role, layer);
    return t ? take_vector(l, t, n, vector) : missing(l, role, layer, "");
}

/* A bias, which nanoGPT's models may lack. */
static bml_status take_bias(const loader *l, bml_role role, int layer, int n, const float **vector)
{
    const bml_tensor *t = bml_tensor_map_get(&l->map, role, layer);
    return t ? take_vector(l, t, n, vector) : BML_OK;
}

static bml_status take_norm(const loader *l, bml_role weight, bml_role bias, int layer,
                            bml_norm *norm)
{
    int width = l->checkpoint->config.n_embd;
    bml_status status = need_vector(l, weight, layer, width, &norm->weight);
    return status ? status : take_bias(l, bias, layer, width, &norm->bias);
}

static bml_status take_linear(const loader *l, bml_role weight, bml_role bias, int layer, int in,
                              int out, bml_linear *linear)
{
    const bml_tensor *t = bml_tensor_map_get(&l->map, weight, layer);
    if (!t)
        return missing(l, weight, layer, "");
    int rows = l->out_in ? out : in, cols = l->out_in ? in : out;
    if (!has_shape(t, rows, cols))
        return wrong_shape(l, t, rows, cols,
                           l->out_in ? ", stored [out, in] as h.0.attn.c_attn.weight is"
                                     : ", stored [in, out] as h.0.attn.c_attn.weight is");
    linear->out_in = l->out_in;
    bml_status status = take_matrix(l, t, &linear->w);
    return status ? status : take_bias(l, bias, layer, out, &linear->bias);
}

/* ---- the parts of the model -----------------------------------------------------------------*/

/*
 * Conv1D or nn.Linear? A square c_proj looks the same in both, so that the whole checkpoint goes
 * by the first c_attn, whose sides always differ.
 */
static bml_status find_layout(loader *l)
{
    int width = l->checkpoint->config.n_embd;
    const bml_tensor *t = bml_tensor_map_get(&l->map, BML_ROLE_C_ATTN_WEIGHT, 0);
    if (!t)
        return missing(l, BML_ROLE_C_ATTN_WEIGHT, 0, "");
    l->out_in = has_shape(t, 3 * width, width);
    if (l->out_in || has_shape(t, width, 3 * width))
        return BML_OK;
    return wrong_shape(l, t, width, 3 * width, " (or the transpose), from config.json's n_embd");
}

static bml_status take_layer(const loader *l, int i)
{
    const bml_hf_config *config = &l->checkpoint->config;
    bml_layer *layer = &l->checkpoint->layers[i];
    int width = config->n_embd, inner = config->n_inner;
    bml_status status = take_norm(l, BML_ROLE_LN_1_WEIGHT, BML_ROLE_LN_1_BIAS, i, &layer->ln_1);
    if (!status)
        status = take_linear(l, BML_ROLE_C_ATTN_WEIGHT, BML_ROLE_C_ATTN_BIAS, i, width, 3 * width,
                             &layer->c_attn);
    if (!status)
        status = take_linear(l, BML_ROLE_C_PROJ_WEIGHT, BML_ROLE_C_PROJ_BIAS, i, width, width,
                             &layer->c_proj);
    if (!status)
        status = take_norm(l, BML_ROLE_LN_2_WEIGHT, BML_ROLE_LN_2_BIAS, i, &layer->ln_2);
    if (!status)
        status =
            take_linear(l, BML_ROLE_C_FC_WEIGHT, BML_ROLE_C_FC_BIAS, i, width, inner, &layer->c_fc);
    if (!status)
        status = take_linear(l, BML_ROLE_MLP_C_PROJ_WEIGHT, BML_ROLE_MLP_C_PROJ_BIAS, i, inner,
                             width, &layer->mlp_c_proj);
    return status;
}

static bml_status take_embedding(const loader *l, const bml_tensor *t, int rows, const char *key,
                                 bml_matrix *matrix)
{
    int width = l->checkpoint->config.n_embd;
    if (has_shape(t, rows, width))
        return take_matrix(l, t, matrix);
    char because[64];
    snprintf(because, sizeof because, ", from config.json's %s and n_embd", key);
    return wrong_shape(l, t, rows, width, because);
}

static bool same_content(const bml_tensor *a, const bml_tensor *b)
{
    return strcmp(a->dtype, b->dtype) == 0 && a->bytes == b->bytes &&
           memcmp(a->data, b->data, a->bytes) == 0;
}

/* wte and the output head: one matrix or two. */
static bml_status take_vocabulary(const loader *l)
{
    bml_checkpoint *c = l->checkpoint;
    const bml_tensor *wte = bml_tensor_map_get(&l->map, BML_ROLE_WTE, 0);
    const bml_tensor *head = bml_tensor_map_get(&l->map, BML_ROLE_LM_HEAD, 0);
    if (!wte && c->config.tie_word_embeddings)
        wte = head;
    if (!wte)
        return missing(l, BML_ROLE_WTE, 0,
                       c->config.tie_word_embeddings
                           ? "; nor is there an \"lm_head.weight\" to take its place"
                           : "");
    if (!head && !c->config.tie_word_embeddings)
        return missing(l, BML_ROLE_LM_HEAD, 0,
                       "; it is needed because config.json has \"tie_word_embeddings\": false");
    int rows = c->config.vocab_size;
    bml_status status = take_embedding(l, wte, rows, "vocab_size", &c->wte);
    if (status)
        return status;
    c->tied = !head || head == wte || same_content(wte, head);
    if (!c->tied)
        return take_embedding(l, head, rows, "vocab_size", &c->lm_head);
    c->lm_head = c->wte;
    return BML_OK;
}

static bml_status take_all(loader *l)
{
    bml_checkpoint *c = l->checkpoint;
    bml_status status = take_vocabulary(l);
    const bml_tensor *wpe = bml_tensor_map_get(&l->map, BML_ROLE_WPE, 0);
    if (!status)
        status = wpe ? take_embedding(l, wpe, c->config.n_positions, "n_positions", &c->wpe)
                     : missing(l, BML_ROLE_WPE, 0, "");
    if (!status)
        status = find_layout(l);
    for (int i = 0; !status && i < c->config.n_layer; i++)
        status = take_layer(l, i);
    if (!status)
        status = take_norm(l, BML_ROLE_LN_F_WEIGHT, BML_ROLE_LN_F_BIAS, 0, &c->ln_f);
    return status;
}

bml_status bml_checkpoint_map(const bml_hf_config *config, bml_safetensors *files,
                              const char *origin, bml_checkpoint **checkpoint, bml_error *err)
{
    bml_checkpoint *c = bml_calloc(1, sizeof *c);
    if (!c) {
        bml_safetensors_close(files);
        return bml_fail_memory(err, sizeof *c, "a checkpoint");
    }
    c->config = *config;
    c->files = files;
    c->layers = bml_calloc((size_t)config->n_layer, sizeof *c->layers);
    /* At most one copy of each tensor. */
    c->copies = bml_calloc(bml_safetensors_count(files), sizeof *c->copies);
    loader l = {.checkpoint = c, .origin = origin, .err = err};
    bml_status status;
    if (!c->layers || !c->copies)
        status = bml_fail_memory(err, (size_t)config->n_layer * sizeof *c->layers, "the layers");
    else
        status = bml_tensor_map_init(&l.map, files, config->n_layer, err);
    if (!status)
        status = take_all(&l);
    bml_tensor_map_clear(&l.map);
    if (status)
        bml_checkpoint_close(c);
    else
        *checkpoint = c;
    return status;
}

bml_status bml_checkpoint_open(const char *path, bml_checkpoint **checkpoint, bml_error *err)
{
    bml_checkpoint_files files;
    bml_status status = bml_checkpoint_files_find(path, &files, err);
    if (status)
        return status;
    bml_hf_config config;
    bml_safetensors *st = NULL;
    /* A file that was named comes first in errors; of a directory, what its config says. */
    bool directory = bml_path_is_directory(path);
    if (!directory)
        status = bml_safetensors_open(files.weights, &st, err);
    if (!status)
        status = bml_hf_config_read(files.config, &config, err);
    if (!status && directory)
        status = files.weights ? bml_safetensors_open(files.weights, &st, err)
                               : bml_checkpoint_no_weights(path, err);
    if (!status)
        status = bml_checkpoint_map(&config, st, files.weights, checkpoint, err);
    else
        bml_safetensors_close(st);
    bml_checkpoint_files_clear(&files);
    return status;
}

void bml_checkpoint_close(bml_checkpoint *checkpoint)
{
    if (!checkpoint)
        return;
    for (size_t i = 0; i < checkpoint->n_copies; i++)
        free(checkpoint->copies[i]);
    free(checkpoint->copies);
    free(checkpoint->layers);
    bml_safetensors_close(checkpoint->files);
    free(checkpoint);
}
