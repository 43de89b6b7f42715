/* bml logits: raw logits into a NumPy file. */
#include "io.h"
#include "model.h"
#include "prompt.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char *out_path;
static bool last, quiet;

static const cli_option options[] = {
    {.kind = CLI_GROUP, .value = bml_cli_prompt_options},
    {.name = "out",
     .letter = 'o',
     .kind = CLI_TEXT,
     .value = &out_path,
     .argument = "FILE",
     .help = "the .npy file to write"},
    {.name = "last", .kind = CLI_FLAG, .value = &last, .help = "only the last token's row"},
    {.name = "quiet", .letter = 'q', .kind = CLI_FLAG, .value = &quiet, .help = "no progress"},
    {.kind = CLI_GROUP, .value = bml_cli_model_options},
    {.kind = CLI_GROUP, .value = bml_cli_session_options},
    {0}};

/* ---- the file: written beside its final name and moved there when it is whole -----------------*/

typedef struct output {
    FILE *file;
    char *temporary; /* NULL when the path is written to directly: a pipe, a link, /dev/null */
} output;

static int fail_output(const char *what)
{
    return bml_cli_fail("%s: %s: %s", out_path, what, strerror(errno));
}

static int open_temporary(output *out)
{
    static const char suffix[] = ".XXXXXX";
    size_t length = strlen(out_path);
    out->temporary = malloc(length + sizeof suffix);
    if (!out->temporary)
        return bml_cli_fail_memory();
    memcpy(out->temporary, out_path, length);
    memcpy(out->temporary + length, suffix, sizeof suffix);
    int fd = mkstemp(out->temporary);
    if (fd < 0) {
        free(out->temporary);
        out->temporary = NULL;
        return fail_output("cannot create");
    }
    /* mkstemp makes files private; this one is to be like any other. */
    mode_t mask = umask(0);
    umask(mask);
    fchmod(fd, 0666 & ~mask);
    out->file = fdopen(fd, "wb");
    if (!out->file)
        close(fd);
    return out->file ? CLI_OK : fail_output("cannot open");
}

static int open_output(output *out)
{
    struct stat st;
    *out = (output){0};
    /* Not through a link: the file that it leads to is to be written, as for /dev/stdout, and the
     * link to stay. */
    if (lstat(out_path, &st) != 0 || S_ISREG(st.st_mode))
        return open_temporary(out);
    if (stat(out_path, &st) == 0 && S_ISDIR(st.st_mode))
        return bml_cli_fail("%s: is a directory; --out takes the name of a file", out_path);
    out->file = fopen(out_path, "wb");
    return out->file ? CLI_OK : fail_output("cannot open");
}

/* Gives the finished file its name, or removes it if STATUS says that the work failed. */
static int close_output(output *out, int status)
{
    if (out->file && fclose(out->file) != 0 && !status)
        status = fail_output("cannot write");
    if (out->temporary && !status && rename(out->temporary, out_path) != 0)
        status = fail_output("cannot rename the finished file");
    if (out->temporary && status)
        unlink(out->temporary);
    free(out->temporary);
    return status;
}

/* NumPy's format 1.0: magic, length, a Python dictionary padded so that the data is aligned. */
static int write_header(output *out, size_t rows, int columns)
{
    enum { SIZE = 128 };
    char header[SIZE + 1];
    const char *dtype = __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ ? "<f4" : ">f4";
    memcpy(header, "\x93NUMPY\x01\x00", 8);
    header[8] = SIZE - 10;
    header[9] = 0;
    int n = snprintf(header + 10, SIZE - 10,
                     "{'descr': '%s', 'fortran_order': False, 'shape': (%zu, %d), }", dtype, rows,
                     columns);
    memset(header + 10 + n, ' ', (size_t)(SIZE - 10 - n));
    header[SIZE - 1] = '\n';
    return fwrite(header, 1, SIZE, out->file) == SIZE ? CLI_OK : fail_output("cannot write");
}

/* ---- the work --------------------------------------------------------------------------------*/

/* Runs N tokens and writes the rows of those that want logits. */
static int run_rows(bml_session *session, output *out, const bml_batch_token *batch, size_t n,
                    float *rows, size_t n_values)
{
    bml_error err;
    if (bml_session_eval(session, batch, n, rows, &err))
        return bml_cli_report(&err);
    if (fwrite(rows, sizeof *rows, n_values, out->file) != n_values)
        return fail_output("cannot write");
    return bml_cli_interrupted();
}

/* All rows at once could be 200 MB: a whole GPT-2 context. They go out a part at a time instead. */
static int write_rows(bml_session *session, output *out, const cli_prompt *prompt, int vocab_size)
{
    size_t n = prompt->n_ids, part = 64, width = (size_t)vocab_size;
    if (last)
        part = n;
    else if (bml_cli_session_settings.chunk)
        part = (size_t)bml_cli_session_settings.chunk;
    if (part > n)
        part = n;
    bml_batch_token *batch = calloc(n, sizeof *batch);
    float *rows = calloc(last ? 1 : part, width * sizeof *rows);
    int status = batch && rows ? CLI_OK : bml_cli_fail_memory();
    for (size_t i = 0; !status && i < n; i++)
        batch[i] = (bml_batch_token){.token = prompt->ids[i], .want_logits = !last || i + 1 == n};
    for (size_t i = 0; !status && i < n; i += part) {
        size_t count = n - i < part ? n - i : part;
        status = run_rows(session, out, batch + i, count, rows, (last ? 1 : count) * width);
        bml_cli_progress("computing", i + count, n, quiet);
    }
    free(rows);
    free(batch);
    return status;
}

static int logits(const bml_model *model, output *out, const cli_prompt *prompt)
{
    const bml_model_info *info = bml_model_get_info(model);
    bml_session *session;
    if (prompt->n_ids == 0)
        return bml_cli_fail("the prompt is empty; there are no logits without a token");
    if (prompt->n_ids > (size_t)info->n_positions)
        return bml_cli_fail("%s: the prompt has %zu tokens, more than the model's %d positions",
                            info->name, prompt->n_ids, info->n_positions);
    int status = bml_cli_open_session(model, 1, (int)prompt->n_ids, &session);
    if (status)
        return status;
    bml_cli_catch_interrupt();
    status = write_header(out, last ? 1 : prompt->n_ids, info->vocab_size);
    if (!status)
        status = write_rows(session, out, prompt, info->vocab_size);
    bml_session_free(session);
    return status;
}

static int run(int n_operands, char **operands);

const cli_command bml_cli_logits = {
    .name = "logits",
    .operands = "[-]",
    .summary = "raw logits of a prompt into a NumPy file",
    .description =
        "Writes the model's raw logits after each token of a prompt (-p, -f, --ids, or - for "
        "standard input) as a NumPy array of float32, shape [tokens, vocabulary], or with --last "
        "[1, vocabulary]. The bytes do not depend on --threads or --chunk.",
    .options = options,
    .max_operands = 1,
    .run = run};

static int run(int n_operands, char **operands)
{
    if (n_operands && strcmp(operands[0], "-"))
        return bml_cli_misuse(&bml_cli_logits, "unexpected argument '%s'; a prompt goes after -p",
                              operands[0]);
    if (!out_path || !*out_path)
        return bml_cli_misuse(&bml_cli_logits, "name the file to write with --out");
    cli_prompt prompt;
    output out;
    bml_model *model = NULL;
    int status = bml_cli_prompt_read(&bml_cli_logits, n_operands ? operands[0] : NULL, &prompt);
    if (!status && !prompt.given)
        status = bml_cli_misuse(&bml_cli_logits, "give a prompt: -p, -f, --ids, or -");
    if (status) {
        bml_cli_prompt_free(&prompt);
        return status;
    }
    status = open_output(&out);
    if (!status)
        status = bml_cli_open_model(&model);
    if (!status)
        status = bml_cli_prompt_tokenize(model, &prompt);
    if (!status)
        status = logits(model, &out, &prompt);
    status = close_output(&out, status);
    bml_cli_prompt_free(&prompt);
    bml_model_free(model);
    return status;
}
