#include "io.h"

#include "cli.h"
#include "json.h"

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

/* Control characters (U+0000 to U+001F, U+007F to U+009F), line and paragraph separators. */
static bool disturbs(const char *character)
{
    const unsigned char *c = (const unsigned char *)character;
    return c[0] < 0x20 || c[0] == 0x7f || (c[0] == 0xc2 && c[1] < 0xa0) ||
           (c[0] == 0xe2 && c[1] == 0x80 && (c[2] == 0xa8 || c[2] == 0xa9));
}

/* One line, however long. What a user typed must not break it, the terminal or the UTF-8 of a log.
 */
static void print_line(const char *prefix, const char *suffix, const char *format, va_list args)
{
    char short_text[1200], *text = short_text;
    va_list again;
    va_copy(again, args);
    int length = vsnprintf(short_text, sizeof short_text, format, args);
    if (length >= (int)sizeof short_text) {
        text = malloc((size_t)length + 1);
        if (text)
            vsnprintf(text, (size_t)length + 1, format, again);
        else
            text = short_text;
    }
    va_end(again);
    bool valid;
    size_t step, left = strlen(text);
    for (char *c = text; left; c += step, left -= step) {
        step = bml_cli_utf8_next(c, left, &valid);
        if (!valid || disturbs(c))
            memset(c, '?', step);
    }
    bml_cli_progress_end();
    fprintf(stderr, "%s%s%s\n", prefix, text, suffix);
    if (text != short_text)
        free(text);
}

int bml_cli_fail(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    print_line("bml: ", "", format, args);
    va_end(args);
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
    char prefix[64], suffix[64];
    va_list args;
    snprintf(prefix, sizeof prefix, "bml %s: ", command->name);
    snprintf(suffix, sizeof suffix, " (see bml %s --help)", command->name);
    va_start(args, format);
    print_line(prefix, suffix, format, args);
    va_end(args);
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
