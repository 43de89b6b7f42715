/* bml inspect: what a checkpoint holds. */
#include "io.h"
#include "json.h"
#include "model.h"

#include <stdlib.h>
#include <string.h>

static bool as_json;

static const cli_option options[] = {{.name = "json",
                                      .kind = CLI_FLAG,
                                      .value = &as_json,
                                      .help = "print everything as one JSON object"},
                                     {.kind = CLI_GROUP, .value = bml_cli_model_name_option},
                                     {0}};

/* "1.2 GB"; exact below a thousand. */
static void print_bytes(json_int_t bytes)
{
    static const char *const units[] = {"kB", "MB", "GB", "TB"};
    double value = (double)bytes / 1e3;
    int unit = 0;
    for (; value >= 1e3 && unit < 3; unit++)
        value /= 1e3;
    if (bytes < 1000)
        bml_cli_print("%lld B", (long long)bytes);
    else
        bml_cli_print("%.1f %s", value, units[unit]);
}

static bool ends_with(const char *text, const char *end)
{
    size_t n = strlen(text), m = strlen(end);
    return n >= m && !strcmp(text + n - m, end);
}

/* Control characters in a string of the file must not reach the terminal. */
static void print_plain(const char *text)
{
    for (; *text; text++)
        bml_cli_print("%c", (unsigned char)*text < 0x20 || *text == 0x7f ? '?' : *text);
}

static void print_value(const char *key, const json_t *value)
{
    if (json_is_string(value)) {
        print_plain(json_string_value(value));
    } else if (json_is_integer(value) && ends_with(key, "bytes")) {
        print_bytes(json_integer_value(value));
    } else if (json_is_real(value)) {
        bml_cli_print("%.7g", json_real_value(value));
    } else {
        char *text = json_dumps(value, JSON_ENCODE_ANY);
        bml_cli_print("%s", text ? text : "?");
        free(text);
    }
}

static void print_members(json_t *object, int indent)
{
    const char *key;
    json_t *value;
    json_object_foreach(object, key, value)
    {
        bml_cli_print("%*s%-*s ", indent, "", 32 - indent, key);
        print_value(key, value);
        bml_cli_print("\n");
    }
}

/* "768 x 2304"; a scalar has no dimensions. */
static void print_shape(const json_t *shape)
{
    char text[96] = "scalar";
    size_t used = 0;
    for (size_t i = 0; i < json_array_size(shape) && used < sizeof text; i++)
        used += (size_t)snprintf(text + used, sizeof text - used, "%s%lld", i ? " x " : "",
                                 (long long)json_integer_value(json_array_get(shape, i)));
    bml_cli_print("%-16s ", text);
}

static void print_tensors(const json_t *tensors)
{
    size_t n_ignored = 0;
    for (size_t i = 0; i < json_array_size(tensors); i++) {
        const json_t *tensor = json_array_get(tensors, i);
        const char *name = json_string_value(json_object_get(tensor, "name"));
        const char *dtype = json_string_value(json_object_get(tensor, "dtype"));
        const char *use = json_string_value(json_object_get(tensor, "use"));
        const char *ignored = json_string_value(json_object_get(tensor, "ignored"));
        char column[48];
        snprintf(column, sizeof column, "%s", name ? name : "?");
        bml_cli_print("  ");
        print_plain(strlen(name ? name : "?") < sizeof column ? column : name);
        bml_cli_print("%*s %-5s ",
                      (int)(38 - (int)strlen(column)) > 0 ? 38 - (int)strlen(column) : 0, "",
                      dtype ? dtype : "?");
        print_shape(json_object_get(tensor, "shape"));
        print_bytes(json_integer_value(json_object_get(tensor, "bytes")));
        bml_cli_print("  %s", ignored ? "ignored: " : "");
        print_plain(ignored ? ignored : use ? use : "");
        bml_cli_print("\n");
        n_ignored += ignored != NULL;
    }
    bml_cli_print("  %zu tensors, %zu of them ignored\n", json_array_size(tensors), n_ignored);
}

static void print_report(json_t *report)
{
    const char *key;
    json_t *value;
    json_object_foreach(report, key, value)
    {
        if (json_is_object(value)) {
            bml_cli_print("%s\n", key);
            print_members(value, 2);
        } else if (!strcmp(key, "tensors")) {
            bml_cli_print("%s\n", key);
            print_tensors(value);
        } else if (!json_is_null(value)) {
            bml_cli_print("%-32s ", key);
            print_value(key, value);
            bml_cli_print("\n");
        }
    }
}

/* A report can be made of what cannot be run, but that is a failure to be told as such. */
static int problem_status(const json_t *report)
{
    const char *problem = json_string_value(json_object_get(report, "problem"));
    return problem ? bml_cli_fail("%s", problem) : CLI_OK;
}

static int run(int n_operands, char **operands);

const cli_command bml_cli_inspect = {
    .name = "inspect",
    .operands = "[MODEL]",
    .summary = "what a checkpoint holds, and what is ignored and why",
    .description = "Shows a checkpoint's configuration, its tensors with their types, shapes and "
                   "sizes, what each is used for or why it is ignored, and its tokenizer. The "
                   "weights are not loaded. MODEL is as for -m. For one that cannot be run "
                   "the exit status is 1 and standard error says why.",
    .options = options,
    .max_operands = 1,
    .run = run};

static int run(int n_operands, char **operands)
{
    if (n_operands && bml_cli_model_name)
        return bml_cli_misuse(&bml_cli_inspect, "name one model, not two");
    char *text;
    bml_error err;
    if (bml_inspect(n_operands ? operands[0] : bml_cli_model_name, &text, &err))
        return bml_cli_report(&err);
    json_t *report = json_loads(text, JSON_ALLOW_NUL, NULL);
    if (as_json)
        bml_cli_print("%s\n", text);
    else if (report)
        print_report(report);
    int status = report ? problem_status(report) : bml_cli_fail_memory();
    json_decref(report);
    bml_free(text);
    return status;
}
