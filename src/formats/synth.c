/* bml_synth: a random checkpoint of true GPT-2 shape in Hugging Face's format. */
#include "base/dtype.h"
#include "base/error.h"
#include "base/file.h"
#include "base/memory.h"
#include "formats/json.h"
#include "formats/names.h"
#include "formats/output_file.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define ORIGIN "bml-synth/" /* begins _name_or_path in the config.json of what was made here */

enum { CHUNK = 1 << 20 }; /* elements made and written at a time */

typedef struct preset {
    const char *name;
    int n_layer, n_head, n_embd, vocab_size, n_positions;
} preset;

static const preset presets[] = {
    {"gpt2", 12, 12, 768, 50257, 1024},
    {"gpt2-medium", 24, 16, 1024, 50257, 1024},
    {"gpt2-large", 36, 20, 1280, 50257, 1024},
    {"gpt2-xl", 48, 25, 1600, 50257, 1024},
    {"tiny", 2, 2, 64, 512, 128},
};

/* One checkpoint in the making. */
typedef struct synth {
    const preset *preset;
    uint64_t seed;
    bml_dtype dtype;
    bool (*progress)(void *context, uint64_t done, uint64_t total);
    void *context;
    bml_error *err;
    uint64_t done, total; /* bytes of data */
    float *values;        /* [CHUNK] */
    uint16_t *halves;     /* [CHUNK], for the 16-bit types */
} synth;

/* ---- what there is to write -----------------------------------------------------------------*/

/* rows and cols of a tensor; cols is 0 for a vector. */
static void role_shape(const preset *p, bml_role role, int *rows, int *cols)
{
    int width = p->n_embd;
    *rows = width;
    *cols = 0;
    switch (role) {
    case BML_ROLE_WTE:
        *rows = p->vocab_size;
        *cols = width;
        break;
    case BML_ROLE_WPE:
        *rows = p->n_positions;
        *cols = width;
        break;
    case BML_ROLE_C_ATTN_WEIGHT:
        *cols = 3 * width;
        break;
    case BML_ROLE_C_ATTN_BIAS:
        *rows = 3 * width;
        break;
    case BML_ROLE_C_PROJ_WEIGHT:
        *cols = width;
        break;
    case BML_ROLE_C_FC_WEIGHT:
        *cols = 4 * width;
        break;
    case BML_ROLE_C_FC_BIAS:
        *rows = 4 * width;
        break;
    case BML_ROLE_MLP_C_PROJ_WEIGHT:
        *rows = 4 * width;
        *cols = width;
        break;
    default:
        break;
    }
}

static size_t role_elements(const preset *p, bml_role role)
{
    int rows, cols;
    role_shape(p, role, &rows, &cols);
    return (size_t)rows * (size_t)(cols ? cols : 1);
}

/* Calls VISIT for every tensor, in the order in which they lie in the file. */
static bml_status for_each_tensor(synth *s, void *context,
                                  bml_status (*visit)(synth *s, void *context, bml_role role,
                                                      int layer))
{
    static const bml_role top[] = {BML_ROLE_WTE, BML_ROLE_WPE};
    static const bml_role last[] = {BML_ROLE_LN_F_WEIGHT, BML_ROLE_LN_F_BIAS};
    bml_status status = BML_OK;
    for (int i = 0; !status && i < 2; i++)
        status = visit(s, context, top[i], 0);
    for (int layer = 0; layer < s->preset->n_layer; layer++)
        for (bml_role role = BML_FIRST_LAYER_ROLE; !status && role < BML_N_ROLES; role++)
            status = visit(s, context, role, layer);
    for (int i = 0; !status && i < 2; i++)
        status = visit(s, context, last[i], 0);
    return status;
}

/* ---- random numbers -------------------------------------------------------------------------*/

/* splitmix64's finaliser: COUNTER may be any sequence of distinct numbers. */
static inline uint64_t mix(uint64_t counter)
{
    uint64_t z = counter * 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
}

/*
 * Fills VALUES with nearly normal numbers of mean 0 and the deviation STD. Each is the sum of the
 * four 16-bit parts of one random number, so that all but the last multiplication is exact and
 * every machine gets the same bits.
 */
static void fill_normal(uint64_t key, uint64_t first, size_t n, float std, float *values)
{
    /* The sum's mean is 2 * 65535, its variance 4 * (65536^2 - 1) / 12. */
    float scale = std * (float)(1 / 37837.22);
    for (size_t i = 0; i < n; i++) {
        uint64_t bits = mix(key + first + i);
        int32_t sum = (int32_t)((bits & 0xffff) + (bits >> 16 & 0xffff) + (bits >> 32 & 0xffff) +
                                (bits >> 48));
        values[i] = (float)(sum - 131070) * scale;
    }
}

/* The deviation as in GPT-2's own initialisation; 0 for layer norms' weights, which are 1. */
static float role_std(const preset *p, bml_role role)
{
    switch (role) {
    case BML_ROLE_LN_1_WEIGHT:
    case BML_ROLE_LN_2_WEIGHT:
    case BML_ROLE_LN_F_WEIGHT:
        return 0;
    case BML_ROLE_C_PROJ_WEIGHT:
    case BML_ROLE_MLP_C_PROJ_WEIGHT:
        return 0.02f / sqrtf(2.0f * (float)p->n_layer);
    case BML_ROLE_WPE:
        return 0.01f;
    default:
        return 0.02f;
    }
}

/* ---- the data -------------------------------------------------------------------------------*/

static bml_status write_values(synth *s, bml_output_file *out, size_t n)
{
    const void *data = s->values;
    if (s->dtype == BML_F16)
        for (size_t i = 0; i < n; i++)
            s->halves[i] = bml_f32_to_f16(s->values[i]);
    else if (s->dtype == BML_BF16)
        for (size_t i = 0; i < n; i++)
            s->halves[i] = bml_f32_to_bf16(s->values[i]);
    if (s->dtype != BML_F32)
        data = s->halves;
    size_t bytes = n * bml_dtype_size(s->dtype);
    bml_status status = bml_output_write(out, data, bytes, s->err);
    s->done += bytes;
    if (!status && s->progress && !s->progress(s->context, s->done, s->total))
        status = bml_fail(s->err, BML_ERR_STOPPED, "%s: stopped before it was complete", out->path);
    return status;
}

static bml_status write_tensor(synth *s, void *out, bml_role role, int layer)
{
    size_t n = role_elements(s->preset, role);
    float std = role_std(s->preset, role);
    /* Every tensor draws from 2^40 counters of its own. */
    uint64_t key = mix(mix(s->seed) + (uint64_t)role) + ((uint64_t)layer << 40);
    bml_status status = BML_OK;
    for (size_t first = 0; !status && first < n; first += CHUNK) {
        size_t part = n - first < CHUNK ? n - first : CHUNK;
        if (std > 0)
            fill_normal(key, first, part, std, s->values);
        else
            for (size_t i = 0; i < part; i++)
                s->values[i] = 1;
        status = write_values(s, out, part);
    }
    return status;
}

/* ---- the header -----------------------------------------------------------------------------*/

static const char *dtype_name(bml_dtype dtype)
{
    return dtype == BML_F32 ? "F32" : dtype == BML_F16 ? "F16" : "BF16";
}

/* Appends the entry of one tensor to CONTEXT, a bml_bytes, and counts its bytes. */
static bml_status add_entry(synth *s, void *context, bml_role role, int layer)
{
    char in_layer[16] = "", text[256];
    if (role >= BML_FIRST_LAYER_ROLE)
        snprintf(in_layer, sizeof in_layer, "h.%d.", layer);
    int rows, cols;
    role_shape(s->preset, role, &rows, &cols);
    int64_t shape[2] = {rows, cols};
    char shape_text[48];
    uint64_t end = s->total + role_elements(s->preset, role) * bml_dtype_size(s->dtype);
    int length =
        snprintf(text, sizeof text,
                 ",\"transformer.%s%s\":{\"dtype\":\"%s\",\"shape\":%s,\"data_offsets\":"
                 "[%" PRIu64 ",%" PRIu64 "]}",
                 in_layer, bml_role_name(role), dtype_name(s->dtype),
                 bml_shape_text(shape, cols ? 2 : 1, shape_text, sizeof shape_text), s->total, end);
    s->total = end;
    if (!bml_bytes_append(context, text, (size_t)length))
        return bml_fail_memory(s->err, (size_t)length, "the header");
    return BML_OK;
}

static bml_status write_header(synth *s, bml_output_file *out)
{
    static const char start[] = "{\"__metadata__\":{\"format\":\"pt\"}", end[] = "}       ";
    bml_bytes header = {0};
    bml_status status = BML_OK;
    if (!bml_bytes_append(&header, start, sizeof start - 1))
        status = bml_fail_memory(s->err, sizeof start, "the header");
    if (!status)
        status = for_each_tensor(s, &header, add_entry);
    /* The closing brace, and spaces that align the data to 8 bytes. */
    if (!status && !bml_bytes_append(&header, end, 1 + (8 - (header.length + 1) % 8) % 8))
        status = bml_fail_memory(s->err, sizeof end, "the header");
    uint64_t length = header.length;
    if (!status)
        status = bml_output_write(out, &length, sizeof length, s->err);
    if (!status)
        status = bml_output_write(out, header.data, header.length, s->err);
    free(header.data);
    return status;
}

/* ---- the files ------------------------------------------------------------------------------*/

static bml_status write_config(const synth *s, bml_output_file *out)
{
    const preset *p = s->preset;
    static const char *const dtypes[] = {
        [BML_F32] = "float32", [BML_F16] = "float16", [BML_BF16] = "bfloat16"};
    char text[1024];
    int length = snprintf(
        text, sizeof text,
        "{\n  \"_name_or_path\": \"" ORIGIN "%s\",\n  \"activation_function\": \"gelu_new\",\n"
        "  \"architectures\": [\n    \"GPT2LMHeadModel\"\n  ],\n  \"bos_token_id\": %d,\n"
        "  \"eos_token_id\": %d,\n  \"initializer_range\": 0.02,\n"
        "  \"layer_norm_epsilon\": 1e-05,\n  \"model_type\": \"gpt2\",\n  \"n_ctx\": %d,\n"
        "  \"n_embd\": %d,\n  \"n_head\": %d,\n  \"n_inner\": null,\n  \"n_layer\": %d,\n"
        "  \"n_positions\": %d,\n  \"scale_attn_weights\": true,\n"
        "  \"tie_word_embeddings\": true,\n  \"torch_dtype\": \"%s\",\n  \"vocab_size\": %d\n}\n",
        p->name, p->vocab_size - 1, p->vocab_size - 1, p->n_positions, p->n_embd, p->n_head,
        p->n_layer, p->n_positions, dtypes[s->dtype], p->vocab_size);
    return bml_output_write(out, text, (size_t)length, s->err);
}

/* Refuses a directory with a model that was not made here: random weights must not replace it. */
static bml_status check_foreign(const char *directory, const char *config, const char *weights,
                                bml_error *err)
{
    bool ours = false;
    bml_file file;
    if (!bml_path_exists(config) && !bml_path_exists(weights))
        return BML_OK;
    if (!bml_file_read(config, 1 << 20, &file, NULL)) {
        json_t *json = json_loadb((const char *)file.data, file.size, 0, NULL);
        const char *origin = json_string_value(json_object_get(json, "_name_or_path"));
        ours = origin && strncmp(origin, ORIGIN, strlen(ORIGIN)) == 0;
        json_decref(json);
        bml_file_close(&file);
    }
    if (ours)
        return BML_OK;
    return bml_fail(err, BML_ERR_ARGUMENT,
                    "%s: already holds a model that was not made by bml synth, and will not be "
                    "overwritten; choose another directory",
                    directory);
}

/* Writes both files under temporary names, and renames them once both are complete. */
static bml_status write_files(synth *s, const char *config, const char *weights)
{
    bml_output_file config_file = {0}, weights_file = {0};
    bml_status status = bml_output_open(&weights_file, weights, s->err);
    if (!status)
        status = write_header(s, &weights_file);
    if (!status)
        status = for_each_tensor(s, &weights_file, write_tensor);
    if (!status)
        status = bml_output_open(&config_file, config, s->err);
    if (!status)
        status = write_config(s, &config_file);
    if (!status)
        status = bml_output_commit(&weights_file, s->err);
    if (!status)
        status = bml_output_commit(&config_file, s->err);
    bml_output_abandon(&weights_file);
    bml_output_abandon(&config_file);
    return status;
}

static bml_status write_directory(synth *s, const char *directory)
{
    char *config = bml_path_join(directory, "config.json");
    char *weights = bml_path_join(directory, "model.safetensors");
    s->values = bml_calloc(CHUNK, sizeof *s->values);
    s->halves = s->dtype == BML_F32 ? NULL : bml_calloc(CHUNK, sizeof *s->halves);
    bml_status status;
    if (!config || !weights || !s->values || (s->dtype != BML_F32 && !s->halves))
        status = bml_fail_memory(s->err, CHUNK * sizeof *s->values, "a buffer");
    else
        status = check_foreign(directory, config, weights, s->err);
    if (!status)
        status = write_files(s, config, weights);
    free(s->values);
    free(s->halves);
    free(config);
    free(weights);
    return status;
}

bml_status bml_synth(const char *preset_name, uint64_t seed, bml_dtype dtype, const char *out,
                     bool (*progress)(void *context, uint64_t done, uint64_t total), void *context,
                     bml_error *err)
{
    const preset *found = NULL;
    for (size_t i = 0; i < sizeof presets / sizeof *presets; i++)
        if (strcmp(presets[i].name, preset_name) == 0)
            found = &presets[i];
    if (!found)
        return bml_fail(err, BML_ERR_ARGUMENT,
                        "preset \"%s\" is not known; known are gpt2, gpt2-medium, gpt2-large, "
                        "gpt2-xl and tiny",
                        preset_name);
    if (dtype != BML_F32 && dtype != BML_F16 && dtype != BML_BF16)
        return bml_fail(err, BML_ERR_ARGUMENT,
                        "a random checkpoint is written as f32, f16 or bf16, not as another dtype");
    bool made;
    bml_status status = bml_make_directory(out, &made, err);
    if (status)
        return status;
    synth s = {.preset = found,
               .seed = seed,
               .dtype = dtype,
               .progress = progress,
               .context = context,
               .err = err};
    status = write_directory(&s, out);
    if (status && made)
        rmdir(out);
    return status;
}
