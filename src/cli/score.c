/* bml score: how well the model predicts a text. */
#include "io.h"
#include "json.h"
#include "model.h"
#include "prompt.h"

#include <limits.h>
#include <math.h>
#include <stdlib.h>

static int stride;
static bool as_json, quiet;

static const cli_option options[] = {
    {.kind = CLI_GROUP, .value = bml_cli_ids_options},
    {.name = "stride",
     .kind = CLI_INT,
     .value = &stride,
     .argument = "N",
     .min = 1,
     .max = INT_MAX,
     .help = "how far each window moves, at most the context; less gives tokens more to go by "
             "and takes longer (default: the context)"},
    {.name = "json",
     .kind = CLI_FLAG,
     .value = &as_json,
     .help = "print one JSON object instead of a table"},
    {.name = "quiet",
     .letter = 'q',
     .kind = CLI_FLAG,
     .value = &quiet,
     .help = "only the totals, no table, no progress"},
    {.kind = CLI_GROUP, .value = bml_cli_model_options},
    {.kind = CLI_GROUP, .value = bml_cli_session_options},
    {0}};

typedef struct totals {
    size_t n_scored, n_bytes;
    double nll, perplexity, bits_per_byte; /* the last is NaN where there is no text */
} totals;

static totals add_up(const bml_tokenizer *tokenizer, const cli_prompt *prompt,
                     const bml_token_score *scores)
{
    totals t = {0};
    for (size_t i = 0; i < prompt->n_ids; i++) {
        size_t length = 0;
        if (!scores[i].scored)
            continue;
        t.n_scored++;
        t.nll -= scores[i].logprob;
        if (tokenizer && bml_token_bytes(tokenizer, prompt->ids[i], &length))
            t.n_bytes += length;
    }
    t.perplexity = exp(t.nll / (double)t.n_scored);
    t.bits_per_byte = t.n_bytes ? t.nll / log(2) / (double)t.n_bytes : NAN;
    return t;
}

/* In quotes; what would disturb a terminal or is not UTF-8 as \n, \t or \xNN. */
static void print_quoted(const char *bytes, size_t length)
{
    bml_cli_print("\"");
    for (size_t i = 0; i < length;) {
        bool valid;
        size_t step = bml_cli_utf8_next(bytes + i, length - i, &valid);
        const unsigned char *c = (const unsigned char *)bytes + i;
        bool control = c[0] < 0x20 || c[0] == 0x7f || (valid && c[0] == 0xc2 && c[1] < 0xa0);
        if (c[0] == '\n')
            bml_cli_print("\\n");
        else if (c[0] == '\t')
            bml_cli_print("\\t");
        else if (c[0] == '"' || c[0] == '\\')
            bml_cli_print("\\%c", c[0]);
        else if (valid && !control)
            bml_cli_print("%.*s", (int)step, bytes + i);
        else
            for (size_t k = 0; k < step; k++)
                bml_cli_print("\\x%02x", c[k]);
        i += step;
    }
    bml_cli_print("\"");
}

static void print_table(const bml_tokenizer *tokenizer, const cli_prompt *prompt,
                        const bml_token_score *scores)
{
    bml_cli_print("%8s %10s %7s %8s  %s\n", "id", "logprob", "rank", "entropy", "text");
    for (size_t i = 0; i < prompt->n_ids; i++) {
        const bml_token_score *s = &scores[i];
        if (s->scored)
            bml_cli_print("%8d %10.4f %7d %8.4f", prompt->ids[i], s->logprob, s->rank, s->entropy);
        else
            bml_cli_print("%8d %10s %7s %8s", prompt->ids[i], "-", "-", "-");
        size_t length = 0;
        const char *bytes = tokenizer ? bml_token_bytes(tokenizer, prompt->ids[i], &length) : NULL;
        if (bytes) {
            bml_cli_print("  ");
            print_quoted(bytes, length);
        }
        if (!bml_cli_print("\n"))
            return;
    }
    bml_cli_print("\n");
}

static void print_totals(const totals *t)
{
    bml_cli_print("tokens scored   %zu\n", t->n_scored);
    bml_cli_print("nats            %.4f, %.6f a token\n", t->nll, t->nll / (double)t->n_scored);
    bml_cli_print("perplexity      %.6g\n", t->perplexity);
    if (t->n_bytes)
        bml_cli_print("bits per byte   %.6f over %zu bytes\n", t->bits_per_byte, t->n_bytes);
}

/* One token at a time: a whole corpus as JSON values would take gigabytes. */
static bool print_json(const bml_tokenizer *tokenizer, const cli_prompt *prompt,
                       const bml_token_score *scores, const totals *t)
{
    bool ok = bml_cli_print("{\"tokens\": [");
    for (size_t i = 0; ok && i < prompt->n_ids; i++) {
        const bml_token_score *s = &scores[i];
        size_t length = 0;
        const char *bytes = tokenizer ? bml_token_bytes(tokenizer, prompt->ids[i], &length) : NULL;
        json_t *token = json_pack("{s:i, s:o, s:o, s:o, s:o}", "id", (int)prompt->ids[i], "text",
                                  bytes ? bml_cli_json_text(bytes, length) : json_null(), "logprob",
                                  s->scored ? bml_cli_json_number(s->logprob) : json_null(), "rank",
                                  s->scored ? json_integer(s->rank) : json_null(), "entropy",
                                  s->scored ? bml_cli_json_number(s->entropy) : json_null());
        ok = (i == 0 || bml_cli_print(", ")) && bml_cli_json_write(token);
    }
    ok = ok && bml_cli_print("], \"nll\": ") && bml_cli_json_write(bml_cli_json_number(t->nll)) &&
         bml_cli_print(", \"perplexity\": ") &&
         bml_cli_json_write(bml_cli_json_number(t->perplexity)) &&
         bml_cli_print(", \"bits_per_byte\": ") &&
         bml_cli_json_write(bml_cli_json_number(t->bits_per_byte)) && bml_cli_print("}\n");
    return ok;
}

static bool on_progress(void *context, size_t done, size_t total)
{
    (void)context;
    bml_cli_progress("scoring", done, total, quiet);
    return !bml_cli_interrupted();
}

static int run(int n_operands, char **operands);

const cli_command bml_cli_score = {
    .name = "score",
    .operands = "[FILE|-]",
    .summary = "log-probabilities and perplexity of a text",
    .description =
        "Tells how well the model predicts a text from a file or standard input: for each token "
        "its log-probability (nats), its rank among all tokens and the entropy of the "
        "distribution; then the total negative log-likelihood, the perplexity of a token, and "
        "bits per byte over the bytes of the tokens scored. Texts longer than the context are "
        "scored in windows that move by --stride. A token that nothing in its window precedes is "
        "not scored: the very first, and where windows do not overlap the first of each. In "
        "--json, bytes that are not valid UTF-8 appear as U+FFFD.",
    .options = options,
    .max_operands = 1,
    .run = run};

static int score(const bml_model *model, const cli_prompt *prompt, bml_token_score *scores)
{
    const bml_tokenizer *tokenizer = bml_model_get_tokenizer(model);
    bml_session *session;
    int status = bml_cli_open_session(model, 1, 0, &session);
    if (status)
        return status;
    if (stride > bml_session_capacity(session)) {
        status = bml_cli_misuse(&bml_cli_score, "--stride takes 1 to %d, the context, not %d",
                                bml_session_capacity(session), stride);
        bml_session_free(session);
        return status;
    }
    bml_error err;
    bml_cli_catch_interrupt();
    bml_status result =
        bml_score(session, prompt->ids, prompt->n_ids, stride, scores, on_progress, NULL, &err);
    bml_session_free(session);
    bml_cli_progress_end();
    if (result == BML_ERR_STOPPED)
        return bml_cli_interrupted();
    if (result)
        return bml_cli_report(&err);
    totals t = add_up(tokenizer, prompt, scores);
    if (t.n_scored == 0)
        return bml_cli_fail(
            "a context of 1 leaves nothing to predict a token from; give a --ctx of "
            "at least 2");
    if (as_json)
        return print_json(tokenizer, prompt, scores, &t) ? CLI_OK : CLI_FAILED;
    if (!quiet)
        print_table(tokenizer, prompt, scores);
    print_totals(&t);
    return CLI_OK;
}

static int run(int n_operands, char **operands)
{
    cli_prompt prompt;
    bml_model *model = NULL;
    bml_token_score *scores = NULL;
    int status = bml_cli_prompt_read(&bml_cli_score, n_operands ? operands[0] : NULL, &prompt);
    if (!status && !prompt.given) {
        prompt.is_text = true;
        status = bml_cli_read(NULL, &prompt.text) ? CLI_OK : CLI_FAILED;
    }
    if (!status)
        status = bml_cli_open_model(&model);
    if (!status)
        status = bml_cli_prompt_tokenize(model, &prompt);
    if (!status && prompt.n_ids < 2)
        status = bml_cli_fail("the text has %zu tokens; to score one there must be one before it, "
                              "so at least 2",
                              prompt.n_ids);
    if (!status) {
        scores = calloc(prompt.n_ids, sizeof *scores);
        status = scores ? score(model, &prompt, scores) : bml_cli_fail_memory();
    }
    free(scores);
    bml_cli_prompt_free(&prompt);
    bml_model_free(model);
    return status;
}
