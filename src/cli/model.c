#include "model.h"

#include <limits.h>
#include <string.h>

const char *bml_cli_model_name;

static int backend, weights;
static const char *const backends[] = {"auto", "cpu", "cuda", "metal", NULL};
static const char *const formats[] = {"file", "f32", "bf16", "f16", "q8", "q4", NULL};

const cli_option bml_cli_model_name_option[] = {
    {.name = "model",
     .letter = 'm',
     .kind = CLI_TEXT,
     .value = &bml_cli_model_name,
     .argument = "MODEL",
     .help = "a directory, a .safetensors file, or a Hub id in the local Hugging Face cache "
             "(default: the built-in model)"},
    {0}};

const cli_option bml_cli_model_options[] = {
    {.kind = CLI_GROUP, .value = bml_cli_model_name_option},
    {.name = "backend",
     .kind = CLI_CHOICE,
     .value = &backend,
     .choices = backends,
     .show_default = true,
     .help = "the processor to run on"},
    {.name = "weights",
     .kind = CLI_CHOICE,
     .value = &weights,
     .choices = formats,
     .show_default = true,
     .help = "how to hold the weights; file: as the file does, without a copy"},
    {0}};

cli_session_settings bml_cli_session_settings;

static const char *const kv_names[] = {"auto", "f32", "f16", "bf16", NULL};

const cli_option bml_cli_session_options[] = {
    {.name = "threads",
     .kind = CLI_INT,
     .value = &bml_cli_session_settings.n_threads,
     .argument = "N",
     .min = 0,
     .max = 1024,
     .help = "threads to run; 0: as many processors as this process may use"},
    {.name = "ctx",
     .kind = CLI_INT,
     .value = &bml_cli_session_settings.n_ctx,
     .argument = "N",
     .min = 1,
     .max = INT_MAX,
     .help = "tokens of context to make room for (default: what is needed, at most n_positions)"},
    {.name = "kv",
     .kind = CLI_CHOICE,
     .value = &bml_cli_session_settings.kv,
     .choices = kv_names,
     .show_default = true,
     .help = "precision of the cached keys and values; auto: f32, or 16 bits where that lets a "
             "GPU's matrix units multiply weights that have no more"},
    {.name = "chunk",
     .kind = CLI_INT,
     .value = &bml_cli_session_settings.chunk,
     .argument = "N",
     .min = 0,
     .max = INT_MAX,
     .help = "tokens of a prompt in one pass over the weights; 0: chosen by the program"},
    {0}};

bml_dtype bml_cli_kv(const bml_model_info *info)
{
    int kv = bml_cli_session_settings.kv; /* the names stand in the order of bml_dtype */
    return kv == 0 ? info->kv_dtype : (bml_dtype)(kv - 1);
}

const char *bml_cli_kv_name(const bml_model_info *info)
{
    return kv_names[1 + bml_cli_kv(info)];
}

int bml_cli_open_model(bml_model **model)
{
    /* The names stand in the order of bml_backend_kind and bml_weight_format. */
    bml_model_options options = {.backend = (bml_backend_kind)backend,
                                 .weights = (bml_weight_format)weights};
    bml_error err;
    if (bml_model_load(bml_cli_model_name, &options, model, &err))
        return bml_cli_report(&err);
    return CLI_OK;
}

int bml_cli_open_session(const bml_model *model, int n_slots, int n_ctx, bml_session **session)
{
    const cli_session_settings *settings = &bml_cli_session_settings;
    bml_session_options options = {.n_slots = n_slots,
                                   .n_ctx = settings->n_ctx ? settings->n_ctx : n_ctx,
                                   .kv_dtype = bml_cli_kv(bml_model_get_info(model)),
                                   .n_threads = settings->n_threads,
                                   .chunk = settings->chunk};
    bml_error err;
    if (bml_session_new(model, &options, session, &err))
        return bml_cli_report(&err);
    return CLI_OK;
}

int bml_cli_usable_ids(const bml_model_info *info)
{
    return info->n_tokens > 0 && info->n_tokens < info->vocab_size ? info->n_tokens
                                                                   : info->vocab_size;
}
