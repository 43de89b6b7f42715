#include "io.h"

#include "cli.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* ---- error lines -----------------------------------------------------------------------------*/

/* What a user typed must not break the one-line rule or the terminal. */
static void print_line(const char *prefix, char *text, const char *suffix)
{
    for (char *c = text; *c; c++)
        if ((unsigned char)*c < 0x20 || *c == 0x7f)
            *c = '?';
    bml_cli_progress_end();
    fprintf(stderr, "%s%s%s\n", prefix, text, suffix);
}

int bml_cli_fail(const char *format, ...)
{
    char text[1200];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    print_line("bml: ", text, "");
    return CLI_FAILED;
}

int bml_cli_report(const bml_error *err)
{
    return bml_cli_fail("%s", err->message);
}

int bml_cli_fail_memory(void)
{
    return bml_cli_fail("out of memory");
}

int bml_cli_misuse(const cli_command *command, const char *format, ...)
{
    char text[1200], prefix[64], suffix[64];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    snprintf(prefix, sizeof prefix, "bml %s: ", command->name);
    snprintf(suffix, sizeof suffix, " (see bml %s --help)", command->name);
    print_line(prefix, text, suffix);
    return CLI_USAGE;
}

/* ---- reading ---------------------------------------------------------------------------------*/

static bool read_from(int fd, const char *name, cli_text *text)
{
    size_t capacity = 0, length = 0;
    char *data = NULL;
    for (;;) {
        if (capacity - length < 2) {
            capacity = capacity ? 2 * capacity : 1 << 16;
            char *grown = capacity > length ? realloc(data, capacity) : NULL;
            if (!grown) {
                bml_cli_fail("%s: out of memory after %zu bytes", name, length);
                break;
            }
            data = grown;
        }
        ssize_t n = read(fd, data + length, capacity - length - 1);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0) {
            bml_cli_fail("%s: cannot read: %s", name, strerror(errno));
            break;
        }
        if (n == 0) {
            data[length] = 0;
            *text = (cli_text){.data = data, .length = length};
            return true;
        }
        length += (size_t)n;
    }
    free(data);
    return false;
}

bool bml_cli_read(const char *path, cli_text *text)
{
    if (!path || !strcmp(path, "-"))
        return read_from(STDIN_FILENO, "standard input", text);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        bml_cli_fail("%s: cannot open: %s", path, strerror(errno));
        return false;
    }
    bool ok = read_from(fd, path, text);
    close(fd);
    return ok;
}

/* ---- writing ---------------------------------------------------------------------------------*/

static int output_error;

bool bml_cli_write(const void *data, size_t length)
{
    if (!output_error && length && fwrite(data, 1, length, stdout) != length)
        output_error = errno ? errno : EIO;
    return !output_error;
}

bool bml_cli_print(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    if (!output_error && vprintf(format, args) < 0)
        output_error = errno ? errno : EIO;
    va_end(args);
    return !output_error;
}

bool bml_cli_flush(void)
{
    if (!output_error && (fflush(stdout) != 0 || ferror(stdout)))
        output_error = errno ? errno : EIO;
    return !output_error;
}

int bml_cli_finish_output(void)
{
    if (bml_cli_flush())
        return CLI_OK;
    if (output_error == EPIPE)
        return CLI_FAILED;
    return bml_cli_fail("cannot write to standard output: %s", strerror(output_error));
}

/* ---- progress --------------------------------------------------------------------------------*/

double bml_cli_seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static bool progress_shown;

void bml_cli_progress(const char *what, uint64_t done, uint64_t total, bool quiet)
{
    static double last;
    if (quiet || !total || !isatty(STDERR_FILENO))
        return;
    double now = bml_cli_seconds();
    if (now - last < 0.1)
        return;
    last = now;
    fprintf(stderr, "\r%s: %3.0f%%", what, 100.0 * (double)done / (double)total);
    progress_shown = true;
}

void bml_cli_progress_end(void)
{
    if (progress_shown)
        fprintf(stderr, "\r\033[K");
    progress_shown = false;
}

/* ---- signals ---------------------------------------------------------------------------------*/

static volatile sig_atomic_t interrupted;

static void on_interrupt(int signal_number)
{
    interrupted = signal_number;
}

void bml_cli_catch_interrupt(void)
{
    /* SA_RESETHAND: if the work does not notice the flag in time, Ctrl-C again ends it. */
    struct sigaction action = {.sa_flags = (int)SA_RESETHAND};
    action.sa_handler = on_interrupt;
    sigemptyset(&action.sa_mask);
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
}

int bml_cli_interrupted(void)
{
    return interrupted ? 128 + interrupted : 0;
}
