/* bml synth: a random checkpoint of GPT-2's shape. */
#include "cli.h"
#include "io.h"

static uint64_t seed;
static int preset = -1, dtype;
static bool quiet;
static const char *const presets[] = {"tiny", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", NULL};
static const char *const dtype_names[] = {"f32", "bf16", "f16", NULL};

static const cli_option options[] = {
    {.name = "preset",
     .kind = CLI_CHOICE,
     .value = &preset,
     .choices = presets,
     .help = "the shape of the model"},
    {.name = "seed",
     .kind = CLI_SEED,
     .value = &seed,
     .argument = "S",
     .show_default = true,
     .help = "the same seed gives the same bytes"},
    {.name = "dtype",
     .kind = CLI_CHOICE,
     .value = &dtype,
     .choices = dtype_names,
     .show_default = true,
     .help = "the type of the weights in the file"},
    {.name = "quiet", .letter = 'q', .kind = CLI_FLAG, .value = &quiet, .help = "no progress"},
    {0}};

static bool on_progress(void *context, uint64_t done, uint64_t total)
{
    (void)context;
    bml_cli_progress("writing", done, total, quiet);
    return !bml_cli_interrupted();
}

static int run(int n_operands, char **operands);

const cli_command bml_cli_synth = {
    .name = "synth",
    .operands = "OUT",
    .summary = "write a random checkpoint, for tests and benchmarks",
    .description = "Writes a checkpoint of random weights with the true shapes of a GPT-2 model, "
                   "in Hugging Face's own format, into the directory OUT (made if missing). It "
                   "has no tokenizer: bml generate starts from ids and prints ids.",
    .options = options,
    .max_operands = 1,
    .run = run};

static int run(int n_operands, char **operands)
{
    static const bml_dtype dtypes[] = {BML_F32, BML_BF16, BML_F16};
    if (preset < 0)
        return bml_cli_misuse(&bml_cli_synth, "give a --preset: gpt2, gpt2-medium, gpt2-large, "
                                              "gpt2-xl or tiny");
    if (!n_operands)
        return bml_cli_misuse(&bml_cli_synth, "name the directory to write to");
    bml_error err;
    bml_cli_catch_interrupt();
    bml_status result =
        bml_synth(presets[preset], seed, dtypes[dtype], operands[0], on_progress, NULL, &err);
    bml_cli_progress_end();
    if (result == BML_ERR_STOPPED)
        return bml_cli_interrupted();
    return result ? bml_cli_report(&err) : CLI_OK;
}
