#include "options.h"

#include "cli.h"
#include "io.h"

#include <errno.h>
#include <float.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool ends(const cli_option *option)
{
    return !option->name && option->kind != CLI_GROUP;
}

/* By name (of LENGTH bytes) or, where NAME is NULL, by letter. */
static const cli_option *find(const cli_option *table, const char *name, size_t length, char letter)
{
    for (; !ends(table); table++) {
        if (table->kind == CLI_GROUP) {
            const cli_option *found = find(table->value, name, length, letter);
            if (found)
                return found;
        } else if (name ? strlen(table->name) == length && !strncmp(table->name, name, length)
                        : table->letter == letter) {
            return table;
        }
    }
    return NULL;
}

size_t bml_cli_distance(const char *a, const char *b)
{
    enum { LONGEST = 40 };
    size_t n = strlen(b), row[LONGEST + 1];
    if (*a && !strncmp(a, b, strlen(a)))
        return 0;
    if (n > LONGEST || strlen(a) > LONGEST)
        return SIZE_MAX;
    for (size_t j = 0; j <= n; j++)
        row[j] = j;
    for (size_t i = 1; a[i - 1]; i++) {
        size_t diagonal = row[0];
        row[0] = i;
        for (size_t j = 1; j <= n; j++) {
            size_t best = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            if (row[j] + 1 < best)
                best = row[j] + 1;
            if (row[j - 1] + 1 < best)
                best = row[j - 1] + 1;
            row[j] = best;
        }
    }
    return row[n];
}

static void nearest(const cli_option *table, const char *name, const char **best, size_t *distance)
{
    for (; !ends(table); table++) {
        if (table->kind == CLI_GROUP) {
            nearest(table->value, name, best, distance);
            continue;
        }
        size_t d = bml_cli_distance(name, table->name);
        if (d < *distance) {
            *best = table->name;
            *distance = d;
        }
    }
}

static int unknown(const cli_command *command, const char *argument)
{
    char name[64];
    const char *best = "help";
    const char *start = argument + strspn(argument, "-");
    snprintf(name, sizeof name, "%.*s", (int)strcspn(start, "="), start);
    if (argument[1] != '-' && strlen(name) < 3) /* a letter is like any other */
        return bml_cli_misuse(command, "unknown option %s", argument);
    size_t distance = bml_cli_distance(name, best);
    nearest(command->options, name, &best, &distance);
    return bml_cli_misuse(command, "unknown option %s; did you mean --%s?", argument, best);
}

/* "a whole number from 1 to 8", "a number above 0" */
static void describe_range(const cli_option *option, char *text, size_t size)
{
    bool limited = option->max < (option->kind == CLI_INT ? (double)INT_MAX : (double)FLT_MAX);
    const char *what = option->kind == CLI_INT ? "a whole number" : "a number";
    if (option->min <= (double)INT_MIN)
        snprintf(text, size, "%s", what);
    else if (limited && option->above)
        snprintf(text, size, "%s above %.9g, at most %.9g", what, option->min, option->max);
    else if (limited)
        snprintf(text, size, "%s from %.9g to %.9g", what, option->min, option->max);
    else if (option->above)
        snprintf(text, size, "%s above %.9g", what, option->min);
    else
        snprintf(text, size, "%s, at least %.9g", what, option->min);
}

static bool in_range(const cli_option *option, double number)
{
    if (option->above ? !(number > option->min) : !(number >= option->min))
        return false;
    return number <= option->max;
}

static bool is_number_start(char c)
{
    return (c >= '0' && c <= '9') || c == '-' || c == '+' || c == '.';
}

static int set_number(const cli_command *command, const cli_option *option, const char *label,
                      const char *value)
{
    char *end = NULL, range[96];
    errno = 0;
    if (!is_number_start(*value)) {
        /* Leading blanks, "nan" and "inf" end here. */
    } else if (option->kind == CLI_INT) {
        long long number = strtoll(value, &end, 10);
        if (end != value && !*end && !errno && in_range(option, (double)number)) {
            *(int *)option->value = (int)number;
            return CLI_CONTINUE;
        }
    } else {
        /* Underflow is fine: the nearest float is what is wanted. */
        float number = strtof(value, &end);
        if (end != value && !*end && in_range(option, (double)number)) {
            *(float *)option->value = number;
            return CLI_CONTINUE;
        }
    }
    describe_range(option, range, sizeof range);
    return bml_cli_misuse(command, "%s takes %s, not '%s'", label, range, value);
}

static int set_seed(const cli_command *command, const cli_option *option, const char *label,
                    const char *value)
{
    char *end = NULL;
    errno = 0;
    unsigned long long number = strtoull(value, &end, 10);
    if (*value < '0' || *value > '9' || *end || errno || number > UINT64_MAX)
        return bml_cli_misuse(command, "%s takes a whole number from 0 to %llu, not '%s'", label,
                              (unsigned long long)UINT64_MAX, value);
    *(uint64_t *)option->value = number;
    return CLI_CONTINUE;
}

/* "f32|f16|bf16" */
static void join_choices(const cli_option *option, char *text, size_t size)
{
    size_t used = 0;
    text[0] = 0;
    for (int i = 0; option->choices[i] && used < size; i++)
        used +=
            (size_t)snprintf(text + used, size - used, "%s%s", i ? "|" : "", option->choices[i]);
}

static int set_choice(const cli_command *command, const cli_option *option, const char *label,
                      const char *value)
{
    for (int i = 0; option->choices[i]; i++)
        if (!strcmp(option->choices[i], value)) {
            *(int *)option->value = i;
            return CLI_CONTINUE;
        }
    char choices[128];
    join_choices(option, choices, sizeof choices);
    return bml_cli_misuse(command, "%s takes %s, not '%s'", label, choices, value);
}

static int add_text(const cli_option *option, const char *value)
{
    cli_texts *texts = (cli_texts *)option->value;
    const char **items = realloc(texts->items, (texts->count + 1) * sizeof *items);
    if (!items)
        return bml_cli_fail_memory();
    items[texts->count++] = value;
    texts->items = items;
    return CLI_CONTINUE;
}

/* LABEL is how the option was written; VALUE is NULL for a flag. */
static int set(const cli_command *command, const cli_option *option, const char *label,
               const char *value)
{
    if (option->given)
        *option->given = true;
    switch (option->kind) {
    case CLI_FLAG:
        *(bool *)option->value = true;
        return CLI_CONTINUE;
    case CLI_INT:
    case CLI_FLOAT:
        return set_number(command, option, label, value);
    case CLI_SEED:
        return set_seed(command, option, label, value);
    case CLI_CHOICE:
        return set_choice(command, option, label, value);
    case CLI_TEXTS:
        return add_text(option, value);
    case CLI_TEXT:
        *(const char **)option->value = value;
        return CLI_CONTINUE;
    case CLI_GROUP: /* find looks into groups and never returns one */
        break;
    }
    return CLI_CONTINUE;
}

/* --NAME, --NAME=VALUE or --NAME VALUE, at argv[*at]; *at moves to the last argument used. */
static int parse_long(const cli_command *command, int argc, char **argv, int *at)
{
    const char *argument = argv[*at], *name = argument + 2, *equals = strchr(name, '=');
    size_t length = equals ? (size_t)(equals - name) : strlen(name);
    if (length == 4 && !strncmp(name, "help", 4)) {
        bml_cli_help(command);
        return CLI_OK;
    }
    const cli_option *option = find(command->options, name, length, 0);
    if (!option)
        return unknown(command, argument);
    char label[64];
    snprintf(label, sizeof label, "--%s", option->name);
    const char *value = equals ? equals + 1 : NULL;
    if (option->kind == CLI_FLAG && value)
        return bml_cli_misuse(command, "%s takes no value", label);
    if (option->kind != CLI_FLAG && !value) {
        if (*at + 1 == argc)
            return bml_cli_misuse(command, "%s needs a value", label);
        value = argv[++*at];
    }
    return set(command, option, label, value);
}

/* -a, -abc (flags), -nVALUE or -n VALUE, at argv[*at]; *at moves to the last argument used. */
static int parse_short(const cli_command *command, int argc, char **argv, int *at)
{
    const char *argument = argv[*at];
    for (const char *letter = argument + 1; *letter; letter++) {
        if (*letter == 'h') {
            bml_cli_help(command);
            return CLI_OK;
        }
        const cli_option *option = find(command->options, NULL, 0, *letter);
        if (!option)
            return unknown(command, argument);
        char label[] = {'-', *letter, 0};
        const char *value = NULL;
        if (option->kind != CLI_FLAG) {
            if (letter[1])
                value = letter + 1;
            else if (*at + 1 < argc)
                value = argv[++*at];
            else
                return bml_cli_misuse(command, "%s needs a value", label);
        }
        int status = set(command, option, label, value);
        if (status != CLI_CONTINUE || value)
            return status;
    }
    return CLI_CONTINUE;
}

int bml_cli_parse(const cli_command *command, int argc, char **argv, int *n_operands)
{
    bool options_over = false;
    int n = 0;
    for (int i = 0; i < argc; i++) {
        int status = CLI_CONTINUE;
        if (options_over || argv[i][0] != '-' || !argv[i][1])
            argv[n++] = argv[i];
        else if (!strcmp(argv[i], "--"))
            options_over = true;
        else if (argv[i][1] == '-')
            status = parse_long(command, argc, argv, &i);
        else
            status = parse_short(command, argc, argv, &i);
        if (status != CLI_CONTINUE)
            return status;
    }
    if (command->max_operands >= 0 && n > command->max_operands)
        return bml_cli_misuse(command, "unexpected argument '%s'", argv[command->max_operands]);
    *n_operands = n;
    return CLI_CONTINUE;
}

/* ---- help ------------------------------------------------------------------------------------*/

/* Words of TEXT from column COLUMN on, broken before column 80 and continued at INDENT. Returns the
 * column after the last one. */
static int print_words(const char *text, int column, int indent)
{
    while (*text) {
        int blank = *text == ' ';
        int length = (int)strcspn(text + blank, " ");
        if (column + blank + length > 80 && column > indent) {
            bml_cli_print("\n%*s%.*s", indent, "", length, text + blank);
            column = indent + length;
        } else {
            bml_cli_print("%.*s", blank + length, text);
            column += blank + length;
        }
        text += blank + length;
    }
    return column;
}

/* " (a number from 0 to 1; default 0.8)" */
static void print_notes(const cli_option *option, int column, int indent)
{
    char range[96] = "", value[64] = "", notes[192];
    bool bounded = option->kind == CLI_INT || option->kind == CLI_FLOAT;
    if (bounded)
        describe_range(option, range, sizeof range);
    if (option->show_default && option->kind == CLI_INT)
        snprintf(value, sizeof value, "default %d", *(const int *)option->value);
    else if (option->show_default && option->kind == CLI_FLOAT)
        snprintf(value, sizeof value, "default %.6g", (double)*(const float *)option->value);
    else if (option->show_default && option->kind == CLI_SEED)
        snprintf(value, sizeof value, "default %llu",
                 (unsigned long long)*(const uint64_t *)option->value);
    else if (option->show_default && option->kind == CLI_CHOICE)
        snprintf(value, sizeof value, "default %s", option->choices[*(const int *)option->value]);
    if (!*range && !*value)
        return;
    snprintf(notes, sizeof notes, " (%s%s%s)", range, *range && *value ? "; " : "", value);
    print_words(notes, column, indent);
}

static void print_options(const cli_option *table)
{
    enum { INDENT = 29 };
    for (; !ends(table); table++) {
        if (table->kind == CLI_GROUP) {
            print_options(table->value);
            continue;
        }
        char left[96], choices[64] = "";
        if (table->kind == CLI_CHOICE)
            join_choices(table, choices, sizeof choices);
        char letter[] = {table->letter ? '-' : ' ', table->letter ? table->letter : ' ',
                         table->letter ? ',' : ' ', 0};
        snprintf(left, sizeof left, "  %s --%s %s", letter, table->name,
                 table->kind == CLI_FLAG     ? ""
                 : table->kind == CLI_CHOICE ? choices
                                             : table->argument);
        bml_cli_print("%s", left);
        int column = (int)strlen(left);
        if (column >= INDENT) {
            bml_cli_print("\n");
            column = 0;
        }
        bml_cli_print("%*s", INDENT - column, "");
        print_notes(table, print_words(table->help, INDENT, INDENT), INDENT);
        bml_cli_print("\n");
    }
}

void bml_cli_help(const cli_command *command)
{
    bml_cli_print("usage: bml %s [OPTION]...%s%s\n\n", command->name, *command->operands ? " " : "",
                  command->operands);
    print_words(command->description, 0, 0);
    bml_cli_print("\n\n");
    print_options(command->options);
    bml_cli_print("  -h, --help                 show this\n");
}
