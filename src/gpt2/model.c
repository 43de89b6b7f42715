#include "gpt2/model.h"

#include "base/clock.h"
#include "base/dtype.h"
#include "base/error.h"
#include "base/file.h"
#include "base/memory.h"
#include "tokenizer/tokenizer.h"

#include <stdlib.h>
#include <string.h>

/* What preparing weights adds up. */
typedef struct weight_loader {
    bml_model *model;
    bml_weight_format format;
    uint64_t resident_bytes, step_bytes;
    int seen[BML_WEIGHTS_Q4 + 1]; /* the layers' matrices, by format */
    bml_error *err;
} weight_loader;

static bml_status load_matrix(weight_loader *l, const bml_matrix *matrix, bool out_in,
                              bml_weight_format format, bml_weight *weight)
{
    const bml_model *m = l->model;
    bml_status status = m->backend->weight_new(m->device, matrix, out_in, format, weight, l->err);
    if (!status)
        l->resident_bytes += weight->buffer.bytes;
    return status;
}

static bml_status load_vector(weight_loader *l, const float *data, int n, bml_weight *weight)
{
    if (!data)
        return BML_OK;
    bml_matrix matrix = {.data = data, .dtype = BML_F32, .rows = 1, .cols = n};
    bml_status status = l->model->backend->weight_new(l->model->device, &matrix, true,
                                                      BML_WEIGHTS_FILE, weight, l->err);
    if (!status) {
        l->resident_bytes += weight->buffer.bytes;
        l->step_bytes += weight->buffer.bytes;
    }
    return status;
}

static bml_status load_norm(weight_loader *l, const bml_norm *norm, bml_norm_weights *weights)
{
    bml_status status =
        load_vector(l, norm->weight, l->model->weights.config.n_embd, &weights->weight);
    if (!status)
        status = load_vector(l, norm->bias, l->model->weights.config.n_embd, &weights->bias);
    return status;
}

static bml_status load_linear(weight_loader *l, const bml_linear *linear,
                              bml_linear_weights *weights)
{
    bml_status status = load_matrix(l, &linear->w, linear->out_in, l->format, &weights->w);
    if (status)
        return status;
    l->step_bytes += weights->w.buffer.bytes;
    l->seen[weights->w.format]++;
    return load_vector(l, linear->bias, weights->w.n_out, &weights->bias);
}

static bml_status load_layer(weight_loader *l, const bml_layer *layer, bml_layer_weights *weights)
{
    bml_status status = load_norm(l, &layer->ln_1, &weights->ln_1);
    if (!status)
        status = load_linear(l, &layer->c_attn, &weights->c_attn);
    if (!status)
        status = load_linear(l, &layer->c_proj, &weights->c_proj);
    if (!status)
        status = load_norm(l, &layer->ln_2, &weights->ln_2);
    if (!status)
        status = load_linear(l, &layer->c_fc, &weights->c_fc);
    if (!status)
        status = load_linear(l, &layer->mlp_c_proj, &weights->mlp_c_proj);
    return status;
}

static bml_status load_weights(weight_loader *l)
{
    bml_model *model = l->model;
    const bml_checkpoint *c = model->checkpoint;
    model->weights.layers = bml_calloc((size_t)c->config.n_layer, sizeof *model->weights.layers);
    if (!model->weights.layers)
        return bml_fail_memory(l->err, (size_t)c->config.n_layer * sizeof *model->weights.layers,
                               "the layers");
    /* Embeddings and head suffer most from few bits, and positions are too few to matter. */
    bml_weight_format wte = l->format == BML_WEIGHTS_Q4 ? BML_WEIGHTS_Q8 : l->format;
    bml_weight_format wpe = wte == BML_WEIGHTS_Q8 ? BML_WEIGHTS_FILE : wte;
    bml_status status = load_matrix(l, &c->wte, true, wte, &model->weights.wte);
    if (!status)
        status = load_matrix(l, &c->wpe, true, wpe, &model->weights.wpe);
    for (int i = 0; i < c->config.n_layer && !status; i++)
        status = load_layer(l, &c->layers[i], &model->weights.layers[i]);
    if (!status)
        status = load_norm(l, &c->ln_f, &model->weights.ln_f);
    if (status)
        return status;
    if (!c->tied) {
        status = load_matrix(l, &c->lm_head, true, wte, &model->weights.lm_head.w);
        l->step_bytes += model->weights.lm_head.w.buffer.bytes;
        return status;
    }
    model->weights.lm_head.w = model->weights.wte;
    model->weights.lm_head.w.owned = false;
    l->step_bytes += model->weights.wte.buffer.bytes;
    return BML_OK;
}

/* The one format of the layers' matrices, or "mixed". */
static const char *format_name(const int *seen)
{
    static const char *const names[] = {"file", "f32", "bf16", "f16", "q8", "q4"};
    const char *name = NULL;
    for (int format = 0; format <= BML_WEIGHTS_Q4; format++)
        if (seen[format])
            name = name ? "mixed" : names[format];
    return name;
}

/* What bml_model_info says of kv_dtype. */
static bml_dtype cache_dtype(const bml_model *model, const int *seen)
{
    const bml_hf_config *c = &model->weights.config;
    bml_weight_format head = model->weights.lm_head.w.format;
    bool f32 = seen[BML_WEIGHTS_F32] || head == BML_WEIGHTS_F32;
    bool f16 = seen[BML_WEIGHTS_F16] || head == BML_WEIGHTS_F16;
    bool bf16 = seen[BML_WEIGHTS_BF16] || head == BML_WEIGHTS_BF16;
    if (c->n_embd / c->n_head > model->backend->max_head_dim16 || f32 || (f16 && bf16))
        return BML_F32;
    return f16 ? BML_F16 : BML_BF16;
}

static void fill_info(bml_model *model, const weight_loader *l)
{
    const bml_checkpoint *c = model->checkpoint;
    int n_tokens = model->tokenizer ? bml_tokenizer_size(model->tokenizer) : c->config.vocab_size;
    model->info = (bml_model_info){
        .n_layer = c->config.n_layer,
        .n_head = c->config.n_head,
        .n_embd = c->config.n_embd,
        .n_inner = c->config.n_inner,
        .n_positions = c->config.n_positions,
        .vocab_size = c->config.vocab_size,
        .n_tokens = n_tokens < c->config.vocab_size ? n_tokens : c->config.vocab_size,
        .eos_token_id = c->config.eos_token_id,
        .bos_token_id = c->config.bos_token_id,
        .n_params = c->n_params,
        .file_bytes = c->file_bytes,
        .resident_bytes = l->resident_bytes,
        .step_bytes = l->step_bytes,
        .name = model->name,
        .path = model->path,
        .backend = model->backend->name,
        .weight_format = format_name(l->seen),
        .kv_dtype = cache_dtype(model, l->seen),
    };
}

static void free_norm(bml_model *m, bml_norm_weights *norm)
{
    m->backend->weight_free(m->device, &norm->weight);
    m->backend->weight_free(m->device, &norm->bias);
}

static void free_linear(bml_model *m, bml_linear_weights *linear)
{
    m->backend->weight_free(m->device, &linear->w);
    m->backend->weight_free(m->device, &linear->bias);
}

/* Gives back what load_on() has made, whole or in part. */
static void unload(bml_model *model)
{
    bml_weights *w = &model->weights;
    if (!model->backend)
        return;
    for (int i = 0; w->layers && i < w->config.n_layer; i++) {
        bml_layer_weights *layer = &w->layers[i];
        free_norm(model, &layer->ln_1);
        free_linear(model, &layer->c_attn);
        free_linear(model, &layer->c_proj);
        free_norm(model, &layer->ln_2);
        free_linear(model, &layer->c_fc);
        free_linear(model, &layer->mlp_c_proj);
    }
    free_norm(model, &w->ln_f);
    free_linear(model, &w->lm_head);
    model->backend->weight_free(model->device, &w->wte);
    model->backend->weight_free(model->device, &w->wpe);
    model->backend->close(model->device);
    free(w->layers);
    *w = (bml_weights){0};
    model->backend = NULL;
    model->device = NULL;
}

static bml_status load_on(const bml_backend *backend, bml_model *model, bml_weight_format format,
                          bml_error *err)
{
    model->backend = backend;
    model->weights.config = model->checkpoint->config;
    bml_status status = backend->open(&model->device, err);
    weight_loader loader = {.model = model, .format = format, .err = err};
    if (!status)
        status = load_weights(&loader);
    if (!status)
        fill_info(model, &loader);
    return status;
}

static bml_status load(bml_model *model, bml_backend_kind kind, bml_weight_format format,
                       bml_error *err)
{
    bml_status status = bml_checkpoint_open(model->path, &model->checkpoint, err);
    if (status)
        return status;
    char *directory = bml_path_directory(model->path);
    if (!directory)
        return bml_fail_memory(err, strlen(model->path), "a path");
    status = bml_tokenizer_load_directory(directory, &model->tokenizer, err);
    free(directory);
    if (status)
        return status;
    const bml_backend *list[3];
    int n = 0;
    status = bml_backend_list(kind, list, &n, err);
    bml_error attempt; /* a device may be missing, or too small for the model */
    for (int i = 0; i < n; i++) {
        status = load_on(list[i], model, format, &attempt);
        if (!status)
            return BML_OK;
        unload(model);
    }
    if (n && err)
        *err = attempt;
    return status;
}

bml_status bml_model_load(const char *name, const bml_model_options *options, bml_model **out,
                          bml_error *err)
{
    static const bml_model_options defaults = {0};
    double start = bml_now();
    if (!options)
        options = &defaults;
    if (options->weights < BML_WEIGHTS_FILE || options->weights > BML_WEIGHTS_Q4)
        return bml_fail(err, BML_ERR_ARGUMENT, "no weight format %d", (int)options->weights);
    bml_model *model = bml_calloc(1, sizeof *model);
    if (!model)
        return bml_fail_memory(err, sizeof *model, "a model");
    bml_status status = bml_model_find(name, &model->path, err);
    if (!status) {
        const char *shown = name ? name : "storyteller";
        model->name = bml_strndup(shown, strlen(shown));
        status = model->name ? load(model, options->backend, options->weights, err)
                             : bml_fail_memory(err, strlen(shown), "a name");
    }
    if (status) {
        bml_model_free(model);
        return status;
    }
    model->info.load_ms = 1e3 * (bml_now() - start);
    *out = model;
    return BML_OK;
}

void bml_model_free(bml_model *model)
{
    if (!model)
        return;
    unload(model);
    bml_checkpoint_close(model->checkpoint);
    bml_tokenizer_free(model->tokenizer);
    free(model->name);
    bml_free(model->path);
    free(model);
}

const bml_model_info *bml_model_get_info(const bml_model *model)
{
    return &model->info;
}

const bml_tokenizer *bml_model_get_tokenizer(const bml_model *model)
{
    return model->tokenizer;
}
