/* bml bench: how fast, and how far from what the machine can do. */
#include "io.h"
#include "json.h"
#include "model.h"
#include "profile.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

/* -1: not given, and then made to fit the model's context */
static int n_prompt = -1, n_decode = -1;
static int n_batch = 1, n_repetitions = 5;
static bool as_json, quiet;
static const char *profile_file;

static const cli_option options[] = {
    {.name = "prompt-tokens",
     .letter = 'p',
     .kind = CLI_INT,
     .value = &n_prompt,
     .argument = "N",
     .min = 0,
     .max = INT_MAX,
     .help = "random tokens of prompt in each sequence (default: 512, or half the context if that "
             "is less)"},
    {.name = "tokens",
     .letter = 'n',
     .kind = CLI_INT,
     .value = &n_decode,
     .argument = "N",
     .min = 0,
     .max = INT_MAX,
     .help = "tokens to generate in each sequence (default: 128, or what fits the context)"},
    {.name = "batch",
     .letter = 'b',
     .kind = CLI_INT,
     .value = &n_batch,
     .argument = "N",
     .min = 1,
     .max = 1024,
     .show_default = true,
     .help = "sequences side by side"},
    {.name = "repetitions",
     .letter = 'r',
     .kind = CLI_INT,
     .value = &n_repetitions,
     .argument = "N",
     .min = 1,
     .max = 100000,
     .show_default = true,
     .help = "how often to measure"},
    {.name = "json",
     .kind = CLI_FLAG,
     .value = &as_json,
     .help = "print one JSON object instead of a table"},
    {.name = "profile",
     .kind = CLI_TEXT,
     .value = &profile_file,
     .argument = "FILE",
     .help = "then run a prompt and a step kernel by kernel, print the time of each kernel, and "
             "write a trace for chrome://tracing or ui.perfetto.dev to FILE"},
    {.name = "quiet", .letter = 'q', .kind = CLI_FLAG, .value = &quiet, .help = "no progress"},
    {.kind = CLI_GROUP, .value = bml_cli_model_options},
    {.kind = CLI_GROUP, .value = bml_cli_session_options},
    {0}};

/* Seconds of the repetitions, sorted. */
typedef struct times {
    double *seconds;
    double best, median, worst;
} times;

typedef struct bench {
    const bml_model_info *info;
    bml_session *session;
    bml_batch_token *prompt; /* [n_batch * n_prompt], sequence after sequence */
    bml_batch_token *step;   /* [n_batch] */
    int32_t *next;           /* [n_batch] */
    times prefill, decode;
    double device_seconds; /* of all decode steps, where the backend's device tells */
    bml_limits limits;
} bench;

/* splitmix64: the same prompts on every machine. */
static uint64_t random_bits(uint64_t *state)
{
    uint64_t z = (*state += 0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
}

static void fill_prompts(bench *b)
{
    uint64_t state = 1, n_ids = (uint64_t)bml_cli_usable_ids(b->info);
    for (int s = 0; s < n_batch; s++) {
        for (int i = 0; i < n_prompt; i++)
            b->prompt[(size_t)s * (size_t)n_prompt + (size_t)i] =
                (bml_batch_token){.token = (int32_t)(random_bits(&state) % n_ids),
                                  .slot = s,
                                  .want_logits = i + 1 == n_prompt};
        b->next[s] = (int32_t)(random_bits(&state) % n_ids);
    }
}

static bml_status decode_step(bench *b, bml_error *err)
{
    for (int s = 0; s < n_batch; s++)
        b->step[s] = (bml_batch_token){.token = b->next[s], .slot = s, .want_logits = true};
    return bml_session_eval_argmax(b->session, b->step, (size_t)n_batch, b->next, err);
}

static bml_status empty_slots(bench *b, bml_error *err)
{
    bml_status status = BML_OK;
    for (int s = 0; !status && s < n_batch; s++)
        status = bml_session_truncate(b->session, s, 0, err);
    return status;
}

static bml_status repeat_once(bench *b, int repetition, bml_error *err)
{
    bml_status status = empty_slots(b, err);
    double start = bml_cli_seconds();
    if (!status && n_prompt)
        status = bml_session_eval_argmax(b->session, b->prompt, (size_t)n_batch * (size_t)n_prompt,
                                         b->next, err);
    double middle = bml_cli_seconds(), on_device = bml_session_device_seconds(b->session);
    for (int i = 0; !status && i < n_decode; i++) {
        status = decode_step(b, err);
        bml_cli_progress("measuring", (uint64_t)repetition * (uint64_t)n_decode + (uint64_t)i,
                         (uint64_t)n_repetitions * (uint64_t)n_decode, quiet);
    }
    b->prefill.seconds[repetition] = middle - start;
    b->decode.seconds[repetition] = bml_cli_seconds() - middle;
    b->device_seconds += bml_session_device_seconds(b->session) - on_device;
    return status;
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void sort_times(times *t)
{
    int n = n_repetitions;
    qsort(t->seconds, (size_t)n, sizeof *t->seconds, compare);
    t->best = t->seconds[0];
    t->worst = t->seconds[n - 1];
    t->median = (t->seconds[(n - 1) / 2] + t->seconds[n / 2]) / 2;
}

static void keep_larger(double *kept, double measured)
{
    if (measured > *kept)
        *kept = measured;
}

/* The limits are measured before and after the work, and the larger of each counts: the speed of a
 * shared machine changes while it is used. */
static bml_status measure_limits(bench *b, bml_error *err)
{
    bml_limits now;
    bml_status status = bml_measure_limits(b->session, &now, err);
    if (status)
        return status;
    keep_larger(&b->limits.read_bytes_per_s, now.read_bytes_per_s);
    keep_larger(&b->limits.flops_per_s, now.flops_per_s);
    keep_larger(&b->limits.int8_ops_per_s, now.int8_ops_per_s);
    return BML_OK;
}

static int measure(bench *b)
{
    bml_error err;
    fill_prompts(b);
    bml_status status = measure_limits(b, &err);
    /* Once untimed, so that the first repetition does not pay for reading the file. */
    if (!status)
        status = decode_step(b, &err);
    for (int i = 0; !status && i < n_repetitions; i++)
        status = repeat_once(b, i, &err);
    bml_cli_progress_end();
    if (!status)
        status = measure_limits(b, &err);
    if (status)
        return bml_cli_report(&err);
    sort_times(&b->prefill);
    sort_times(&b->decode);
    return CLI_OK;
}

/* ---- what the work needs at least ------------------------------------------------------------*/

/* What bounds products with these weights: integer dot products for q8 and q4. */
static double peak(const bench *b)
{
    bool integers = b->info->weight_format[0] == 'q';
    return integers ? b->limits.int8_ops_per_s : b->limits.flops_per_s;
}

/* Two operations for every weight of every token, and 4 C for every pair of a token and one that it
 * sees. Logits are wanted of one token: in the last layer, others need keys and values alone. */
static double prefill_flops(const bml_model_info *info)
{
    double c = info->n_embd, t = n_prompt, kv = 4 * c * c, rest = 4 * c * c + 4 * c * info->n_inner;
    double layer = t * (kv + rest) + 2 * c * t * (t + 1);
    double last = t * kv + rest + 4 * c * t;
    return n_batch * ((info->n_layer - 1) * layer + last + 2 * c * info->vocab_size);
}

/* The weights once, and each sequence's keys and values, of which there are more every step. */
static double step_bytes(const bml_model_info *info)
{
    double position = 2.0 * info->n_layer * info->n_embd * (bml_cli_kv(info) == BML_F32 ? 4 : 2);
    return (double)info->step_bytes + n_batch * position * (n_prompt + (n_decode + 1) / 2.0);
}

/* The device's own time for a step, the mean of all; 0 where it does not tell. */
static double device_step(const bench *b)
{
    return b->device_seconds / n_repetitions / n_decode;
}

/* ---- results ---------------------------------------------------------------------------------*/

static json_t *speed_json(const times *t, double tokens)
{
    return json_pack("{s:i, s:f, s:f, s:f}", "tokens", (int)tokens, "tok_s", tokens / t->median,
                     "tok_s_min", tokens / t->worst, "tok_s_max", tokens / t->best);
}

static json_t *prefill_json(const bench *b)
{
    double rate = prefill_flops(b->info) / b->prefill.median;
    json_t *object = speed_json(&b->prefill, (double)n_batch * n_prompt);
    json_t *rest = json_pack("{s:f, s:f, s:f, s:f}", "time_to_first_token_ms",
                             1e3 * b->prefill.median, "flops", prefill_flops(b->info), "gflop_s",
                             1e-9 * rate, "percent_of_peak", 100 * rate / peak(b));
    if (object && rest)
        json_object_update(object, rest);
    json_decref(rest);
    return object;
}

static json_t *decode_json(const bench *b)
{
    double step = b->decode.median / n_decode, rate = step_bytes(b->info) / step;
    json_t *object = speed_json(&b->decode, (double)n_batch * n_decode);
    json_t *rest =
        json_pack("{s:f, s:f, s:f, s:f, s:f}", "ms_per_step", 1e3 * step, "device_ms_per_step",
                  1e3 * device_step(b), "bytes_per_step", step_bytes(b->info), "gb_s", 1e-9 * rate,
                  "percent_of_bandwidth", 100 * rate / b->limits.read_bytes_per_s);
    if (object && rest)
        json_object_update(object, rest);
    json_decref(rest);
    return object;
}

static int print_json(const bench *b)
{
    json_t *object = json_pack(
        "{s:o, s:s, s:s, s:s, s:i, s:i, s:i, s:f, s:{s:f, s:f, s:f}, s:o, s:o}", "model",
        bml_cli_json_text(b->info->name, strlen(b->info->name)), "backend", b->info->backend,
        "weights", b->info->weight_format, "kv", bml_cli_kv_name(b->info), "threads",
        bml_session_threads(b->session), "batch", n_batch, "repetitions", n_repetitions, "load_ms",
        b->info->load_ms, "limits", "read_gb_s", 1e-9 * b->limits.read_bytes_per_s, "gflop_s",
        1e-9 * b->limits.flops_per_s, "int8_gop_s", 1e-9 * b->limits.int8_ops_per_s, "prefill",
        n_prompt ? prefill_json(b) : json_null(), "decode",
        n_decode ? decode_json(b) : json_null());
    return bml_cli_json_write(object) && bml_cli_print("\n") ? CLI_OK : CLI_FAILED;
}

static void print_table(const bench *b)
{
    const bml_model_info *info = b->info;
    bml_cli_print("model     %s: %.1f M parameters, %s weights, %.1f MB read a step\n", info->name,
                  1e-6 * (double)info->n_params, info->weight_format,
                  1e-6 * (double)info->step_bytes);
    bml_cli_print("machine   %s, %d threads: reads %.1f GB/s, float32 %.0f GFLOP/s, int8 %.0f "
                  "GOP/s (measured)\n",
                  info->backend, bml_session_threads(b->session), 1e-9 * b->limits.read_bytes_per_s,
                  1e-9 * b->limits.flops_per_s, 1e-9 * b->limits.int8_ops_per_s);
    bml_cli_print("load      %.1f ms\n", info->load_ms);
    if (n_prompt) {
        double tokens = (double)n_batch * n_prompt, flops = prefill_flops(info);
        bml_cli_print("prefill   %.1f tokens/s (%.1f to %.1f) of %d x %d tokens\n",
                      tokens / b->prefill.median, tokens / b->prefill.worst,
                      tokens / b->prefill.best, n_batch, n_prompt);
        bml_cli_print("          %.1f ms to the first token, %.1f GFLOP at %.1f GFLOP/s: %.0f%% of "
                      "peak\n",
                      1e3 * b->prefill.median, 1e-9 * flops, 1e-9 * flops / b->prefill.median,
                      100 * flops / b->prefill.median / peak(b));
    }
    if (n_decode) {
        double tokens = (double)n_batch * n_decode, step = b->decode.median / n_decode;
        bml_cli_print("decode    %.1f tokens/s (%.1f to %.1f) of %d x %d tokens\n",
                      tokens / b->decode.median, tokens / b->decode.worst, tokens / b->decode.best,
                      n_batch, n_decode);
        bml_cli_print("          %.2f ms a step, %.1f MB at %.1f GB/s: %.0f%% of read bandwidth\n",
                      1e3 * step, 1e-6 * step_bytes(info), 1e-9 * step_bytes(info) / step,
                      100 * step_bytes(info) / step / b->limits.read_bytes_per_s);
        if (device_step(b) > 0)
            bml_cli_print("          of these %.2f ms on the device: %.1f GB/s, %.0f%%\n",
                          1e3 * device_step(b), 1e-9 * step_bytes(info) / device_step(b),
                          100 * step_bytes(info) / device_step(b) / b->limits.read_bytes_per_s);
    }
    bml_cli_print("Median of %d repetitions, and in brackets the slowest and the fastest.\n",
                  n_repetitions);
}

/* ---- setting up ------------------------------------------------------------------------------*/

static int run(int n_operands, char **operands);

const cli_command bml_cli_bench = {
    .name = "bench",
    .operands = "",
    .summary = "measure speed against this machine's limits",
    .description =
        "Measures this machine's read bandwidth and float32 peak, then how fast it reads prompts "
        "(prefill) and generates tokens (decode), and what part of those limits that is. Decode "
        "is bound by bandwidth, prefill by arithmetic.",
    .options = options,
    .max_operands = 0,
    .run = run};

/* Fits what was not given to the context, and refuses what was given and does not fit. */
static int choose_lengths(const bml_model_info *info)
{
    int context =
        bml_cli_session_settings.n_ctx ? bml_cli_session_settings.n_ctx : info->n_positions;
    if (n_prompt < 0)
        n_prompt = context / 2 < 512 ? context / 2 : 512;
    if (n_decode < 0)
        n_decode = context - n_prompt < 128 ? context - n_prompt : 128;
    if (n_decode < 0)
        n_decode = 0;
    if (n_prompt == 0 && n_decode == 0)
        return bml_cli_misuse(&bml_cli_bench, "-p 0 and -n 0 leave nothing to measure");
    if ((int64_t)n_prompt + n_decode > context)
        return bml_cli_fail("-p %d and -n %d make %lld tokens, more than the context of %d",
                            n_prompt, n_decode, (long long)n_prompt + n_decode, context);
    return CLI_OK;
}

/* One prompt and one step, kernel by kernel. */
static int profile(bench *b)
{
    bml_error err;
    cli_profile *prefill = bml_cli_profile_new(), *decode = bml_cli_profile_new();
    bml_status status = empty_slots(b, &err);
    int result = prefill && decode ? CLI_OK : bml_cli_fail_memory();
    if (!status && !result && n_prompt) {
        bml_session_trace(b->session, bml_cli_profile_kernel, prefill);
        status = bml_session_eval_argmax(b->session, b->prompt, (size_t)n_batch * (size_t)n_prompt,
                                         b->next, &err);
    }
    if (!status && !result && n_decode) {
        bml_session_trace(b->session, bml_cli_profile_kernel, decode);
        status = decode_step(b, &err);
    }
    bml_session_trace(b->session, NULL, NULL);
    if (status)
        result = bml_cli_report(&err);
    if (!result && !as_json) {
        bml_cli_profile_print(prefill, "prefill");
        bml_cli_profile_print(decode, "decode");
    }
    if (!result)
        result = bml_cli_profile_write(prefill, decode, profile_file);
    bml_cli_profile_free(prefill);
    bml_cli_profile_free(decode);
    return result;
}

static int bench_model(const bml_model *model)
{
    bench b = {.info = bml_model_get_info(model)};
    int status = choose_lengths(b.info);
    if (!status)
        status = bml_cli_open_session(model, n_batch, n_prompt + n_decode, &b.session);
    if (status)
        return status;
    b.prompt = calloc((size_t)n_batch * (size_t)n_prompt + 1, sizeof *b.prompt);
    b.step = calloc((size_t)n_batch, sizeof *b.step);
    b.next = calloc((size_t)n_batch, sizeof *b.next);
    b.prefill.seconds = calloc((size_t)n_repetitions, sizeof(double));
    b.decode.seconds = calloc((size_t)n_repetitions, sizeof(double));
    if (b.prompt && b.step && b.next && b.prefill.seconds && b.decode.seconds)
        status = measure(&b);
    else
        status = bml_cli_fail_memory();
    if (!status && as_json)
        status = print_json(&b);
    else if (!status)
        print_table(&b);
    if (!status && profile_file)
        status = profile(&b);
    free(b.prompt);
    free(b.step);
    free(b.next);
    free(b.prefill.seconds);
    free(b.decode.seconds);
    bml_session_free(b.session);
    return status;
}

static int run(int n_operands, char **operands)
{
    (void)n_operands;
    (void)operands;
    bml_model *model;
    int status = bml_cli_open_model(&model);
    if (status)
        return status;
    status = bench_model(model);
    bml_model_free(model);
    return status;
}
