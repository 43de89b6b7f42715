/* bml generate: continues a prompt. */
#include "io.h"
#include "json.h"
#include "model.h"
#include "prompt.h"

#include <float.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static int max_tokens = 128;
static bool greedy, ignore_eos, echo, as_json, quiet, temperature_given, seed_given;
static bml_sampling sampling = {
    .temperature = 0.8f, .top_k = 40, .top_p = 1.0f, .min_p = 0.0f, .repetition_penalty = 1.0f};
static cli_texts stops;

static const cli_option options[] = {
    {.kind = CLI_GROUP, .value = bml_cli_prompt_options},
    {.name = "tokens",
     .letter = 'n',
     .kind = CLI_INT,
     .value = &max_tokens,
     .argument = "N",
     .min = -1,
     .max = INT_MAX,
     .show_default = true,
     .help = "most tokens to generate; -1: until the context is full"},
    {.name = "greedy",
     .kind = CLI_FLAG,
     .value = &greedy,
     .help = "always take the most probable token; the same as --temperature 0"},
    {.name = "temperature",
     .kind = CLI_FLOAT,
     .value = &sampling.temperature,
     .given = &temperature_given,
     .argument = "T",
     .min = 0,
     .max = FLT_MAX,
     .show_default = true,
     .help = "flattens the distribution above 1, sharpens it below, 0 is greedy"},
    {.name = "top-k",
     .kind = CLI_INT,
     .value = &sampling.top_k,
     .argument = "K",
     .min = INT_MIN,
     .max = INT_MAX,
     .show_default = true,
     .help = "choose among the K most probable tokens; 0 or less: among all"},
    {.name = "top-p",
     .kind = CLI_FLOAT,
     .value = &sampling.top_p,
     .argument = "P",
     .min = 0,
     .max = 1,
     .show_default = true,
     .help = "choose among the fewest tokens whose probabilities reach P"},
    {.name = "min-p",
     .kind = CLI_FLOAT,
     .value = &sampling.min_p,
     .argument = "P",
     .min = 0,
     .max = 1,
     .show_default = true,
     .help = "drop tokens less probable than P times the best one"},
    {.name = "repetition-penalty",
     .kind = CLI_FLOAT,
     .value = &sampling.repetition_penalty,
     .argument = "R",
     .min = 0,
     .above = true,
     .max = FLT_MAX,
     .show_default = true,
     .help = "divides positive and multiplies negative logits of tokens that have occurred"},
    {.name = "seed",
     .kind = CLI_SEED,
     .value = &sampling.seed,
     .given = &seed_given,
     .argument = "S",
     .help = "the same seed gives the same text (default: a new one each time, told in the "
             "statistics)"},
    {.name = "stop",
     .kind = CLI_TEXTS,
     .value = &stops,
     .argument = "TEXT",
     .help = "end before TEXT; may be given several times"},
    {.name = "ignore-eos",
     .kind = CLI_FLAG,
     .value = &ignore_eos,
     .help = "go on past the end-of-text token"},
    {.name = "echo",
     .kind = CLI_FLAG,
     .value = &echo,
     .help = "put the prompt in front of the continuation"},
    {.name = "json",
     .kind = CLI_FLAG,
     .value = &as_json,
     .help = "print one JSON object instead of text"},
    {.name = "quiet", .letter = 'q', .kind = CLI_FLAG, .value = &quiet, .help = "no statistics"},
    {.kind = CLI_GROUP, .value = bml_cli_model_options},
    {.kind = CLI_GROUP, .value = bml_cli_session_options},
    {0}};

static bool on_text(void *context, const char *text, size_t length)
{
    (void)context;
    if (!as_json && (!bml_cli_write(text, length) || !bml_cli_flush()))
        return false;
    return !bml_cli_interrupted();
}

/* Without any prompt a text begins as all texts begin: after the end of another. */
static int start_token(const bml_model *model, cli_prompt *prompt)
{
    const bml_model_info *info = bml_model_get_info(model);
    int32_t id = info->bos_token_id >= 0 ? info->bos_token_id : info->eos_token_id;
    if (id < 0 && bml_model_get_tokenizer(model))
        return bml_cli_fail("%s: has no end-of-text token to start from; give a prompt with -p",
                            info->name);
    free(prompt->ids);
    prompt->ids = malloc(sizeof *prompt->ids);
    if (!prompt->ids)
        return bml_cli_fail_memory();
    prompt->ids[0] = id < 0 ? 0 : id;
    prompt->n_ids = 1;
    return CLI_OK;
}

/* The room to make for this prompt and its continuation. A prompt that is too long gets no more
 * than the model has: the library then says how long each is. */
static int context_needed(const bml_model *model, const cli_prompt *prompt)
{
    int most = bml_model_get_info(model)->n_positions;
    if (max_tokens < 0 || prompt->n_ids >= (size_t)most || max_tokens >= most - (int)prompt->n_ids)
        return most;
    return (int)prompt->n_ids + max_tokens;
}

static bool print_ids(const int32_t *ids, size_t n, bool more)
{
    bool ok = true;
    for (size_t i = 0; ok && i < n; i++)
        ok = bml_cli_print("%d%s", ids[i], i + 1 < n || more ? " " : "");
    return ok;
}

/* The text of an --ids prompt, for --echo. */
static int echo_text(const bml_model *model, cli_prompt *prompt)
{
    const bml_tokenizer *tokenizer = bml_model_get_tokenizer(model);
    if (!echo || !tokenizer || prompt->is_text || !prompt->given)
        return CLI_OK;
    bml_error err;
    char *text;
    size_t length;
    if (bml_detokenize(tokenizer, prompt->ids, prompt->n_ids, &text, &length, &err))
        return bml_cli_report(&err);
    prompt->text = (cli_text){.data = malloc(length + 1), .length = length};
    if (prompt->text.data)
        memcpy(prompt->text.data, text, length + 1);
    bml_free(text);
    return prompt->text.data ? CLI_OK : bml_cli_fail_memory();
}

static double per_second(size_t tokens, double ms)
{
    return ms > 0 ? 1e3 * (double)tokens / ms : 0;
}

static json_t *text_json(const bml_model *model, const cli_prompt *prompt,
                         const bml_generation *made)
{
    if (!bml_model_get_tokenizer(model))
        return json_null();
    size_t before = echo ? prompt->text.length : 0;
    char *text = malloc(before + made->text_length + 1);
    if (!text)
        return NULL;
    if (before)
        memcpy(text, prompt->text.data, before);
    if (made->text_length)
        memcpy(text + before, made->text, made->text_length);
    json_t *value = bml_cli_json_text(text, before + made->text_length);
    free(text);
    return value;
}

static bool print_json(const bml_model *model, const cli_prompt *prompt, const bml_generation *made)
{
    const bml_model_info *info = bml_model_get_info(model);
    json_t *object = json_pack(
        "{s:o, s:s, s:s, s:o, s:o, s:o, s:s, s:{s:f, s:I, s:f, s:I, s:f}}", "model",
        bml_cli_json_text(info->name, strlen(info->name)), "backend", info->backend, "weights",
        info->weight_format, "prompt_ids", bml_cli_json_ids(prompt->ids, prompt->n_ids), "ids",
        bml_cli_json_ids(made->ids, made->n_ids), "text", text_json(model, prompt, made),
        "finish_reason", made->finish_reason == BML_FINISH_LENGTH ? "length" : "stop", "stats",
        "load_ms", info->load_ms, "prefill_tokens", (json_int_t)made->prefill_tokens,
        "prefill_tok_s", per_second(made->prefill_tokens, made->prefill_ms), "decode_tokens",
        (json_int_t)made->decode_tokens, "decode_tok_s",
        per_second(made->decode_tokens, made->decode_ms));
    return bml_cli_json_write(object) && bml_cli_print("\n");
}

static void print_statistics(const bml_model *model, const bml_session *session,
                             const bml_generation *made)
{
    const bml_model_info *info = bml_model_get_info(model);
    const char *ended = bml_cli_interrupted()                      ? "interrupted"
                        : made->finish_reason == BML_FINISH_LENGTH ? "length"
                                                                   : "stop";
    fprintf(stderr, "\n%s: %s weights, %s with %d threads, loaded in %.0f ms\n", info->name,
            info->weight_format, info->backend, bml_session_threads(session), info->load_ms);
    fprintf(
        stderr,
        "prompt: %zu tokens at %.1f tokens/s, %.1f ms to the first token; generated: %zu tokens "
        "at %.1f tokens/s\n",
        made->prefill_tokens, per_second(made->prefill_tokens, made->prefill_ms), made->prefill_ms,
        made->n_ids, per_second(made->decode_tokens, made->decode_ms));
    if (sampling.temperature > 0)
        fprintf(stderr, "ended by: %s; seed %llu\n", ended, (unsigned long long)sampling.seed);
    else
        fprintf(stderr, "ended by: %s\n", ended);
}

/* What stands before the continuation, and what follows it. */
static void print_before(const bml_model *model, const cli_prompt *prompt)
{
    if (as_json || !echo)
        return;
    if (bml_model_get_tokenizer(model))
        bml_cli_write(prompt->text.data, prompt->text.length);
    else
        print_ids(prompt->ids, prompt->n_ids, true);
    bml_cli_flush();
}

static bool print_after(const bml_model *model, const cli_prompt *prompt,
                        const bml_generation *made)
{
    bool ok = true;
    if (as_json) {
        ok = print_json(model, prompt, made);
    } else if (!bml_model_get_tokenizer(model)) {
        if (print_ids(made->ids, made->n_ids, false))
            bml_cli_print("\n");
    } else if (isatty(STDOUT_FILENO)) {
        bml_cli_print("\n");
    }
    return bml_cli_flush() && ok;
}

static int generate(const bml_model *model, const cli_prompt *prompt)
{
    bml_session *session;
    int status = bml_cli_open_session(model, 1, context_needed(model, prompt), &session);
    if (status)
        return status;
    bool has_text = bml_model_get_tokenizer(model) != NULL;
    bml_generate_options how = {.sampling = sampling,
                                .max_tokens = max_tokens,
                                .ignore_eos = ignore_eos,
                                .stop = stops.items,
                                .n_stop = stops.count,
                                .on_text = on_text};
    bml_generation made = {0};
    bml_error err;
    print_before(model, prompt);
    /* Where there is no text there is no callback to see the flag: Ctrl-C then ends the program. */
    if (has_text)
        bml_cli_catch_interrupt();
    bml_status result = bml_generate(session, 0, prompt->ids, prompt->n_ids, &how, &made, &err);
    if (result == BML_OK || result == BML_ERR_STOPPED) {
        if (!print_after(model, prompt, &made))
            status = CLI_FAILED;
        /* What stopped it is a signal or a failed write, which main reports. */
        if (result == BML_ERR_STOPPED)
            status = bml_cli_interrupted() ? bml_cli_interrupted() : CLI_FAILED;
        if (!quiet && status != CLI_FAILED)
            print_statistics(model, session, &made);
    } else {
        status = bml_cli_report(&err);
    }
    bml_generation_clear(&made);
    bml_session_free(session);
    return status;
}

/* Different from run to run, and short enough to type again. */
static uint64_t new_seed(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    uint64_t seed = (uint64_t)now.tv_nsec ^ (uint64_t)now.tv_sec << 20 ^ (uint64_t)getpid() << 8;
    return (seed * 0x9e3779b97f4a7c15) >> 32;
}

static int run(int n_operands, char **operands);

const cli_command bml_cli_generate = {
    .name = "generate",
    .operands = "[-]",
    .summary = "continue a text",
    .description =
        "Continues a prompt and streams the continuation to standard output, nothing else; "
        "statistics go to standard error. The prompt comes from -p, -f, --ids or, for -, from "
        "standard input, byte for byte. Without one (or with an empty one) the model starts a "
        "text of its own, after its end-of-text token. In --json, bytes that are not valid UTF-8 "
        "appear as U+FFFD. A model without a tokenizer takes and prints ids.",
    .options = options,
    .max_operands = 1,
    .run = run};

static int run(int n_operands, char **operands)
{
    if (n_operands && strcmp(operands[0], "-"))
        return bml_cli_misuse(&bml_cli_generate, "unexpected argument '%s'; a prompt goes after -p",
                              operands[0]);
    if (greedy && temperature_given && sampling.temperature > 0)
        return bml_cli_misuse(&bml_cli_generate,
                              "--greedy and --temperature contradict each other");
    if (greedy)
        sampling.temperature = 0;
    if (!seed_given)
        sampling.seed = new_seed();
    for (size_t i = 0; i < stops.count; i++)
        if (!*stops.items[i])
            return bml_cli_misuse(&bml_cli_generate, "--stop takes a text that is not empty");
    cli_prompt prompt;
    bml_model *model = NULL;
    int status = bml_cli_prompt_read(&bml_cli_generate, n_operands ? operands[0] : NULL, &prompt);
    if (!status)
        status = bml_cli_open_model(&model);
    if (!status)
        status = bml_cli_prompt_tokenize(model, &prompt);
    if (!status)
        status = echo_text(model, &prompt);
    if (!status && prompt.n_ids == 0)
        status = start_token(model, &prompt);
    if (!status)
        status = generate(model, &prompt);
    bml_cli_prompt_free(&prompt);
    bml_model_free(model);
    free(stops.items);
    return status;
}
