/* The model and session options that several commands share, and opening what they ask for. */
#ifndef BML_CLI_MODEL_H
#define BML_CLI_MODEL_H

#include "cli.h"

/* -m */
extern const cli_option bml_cli_model_name_option[];
extern const char *bml_cli_model_name;

/* -m, --backend, --weights */
extern const cli_option bml_cli_model_options[];

/* --threads, --ctx, --kv, --chunk */
extern const cli_option bml_cli_session_options[];

typedef struct cli_session_settings {
    int n_threads, n_ctx, kv, chunk; /* 0: not given, kv: auto */
} cli_session_settings;

extern cli_session_settings bml_cli_session_settings;

/* What --kv comes to for the model, and its name. */
bml_dtype bml_cli_kv(const bml_model_info *info);
const char *bml_cli_kv_name(const bml_model_info *info);

/* Loads the model that the options name. CLI_OK, or an exit status after an error line. */
int bml_cli_open_model(bml_model **model);

/* A session of N_SLOTS slots of N_CTX tokens, or of --ctx where it was given. */
int bml_cli_open_session(const bml_model *model, int n_slots, int n_ctx, bml_session **session);

/* The ids that the model's tokenizer has, or the whole vocabulary where there is no tokenizer. */
int bml_cli_usable_ids(const bml_model_info *info);

#endif
