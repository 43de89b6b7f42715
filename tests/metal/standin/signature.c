/* Kernels' signatures, read from the program's text as Metal's compiler would. */
#include "simulator.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct {
    const char *attribute;
    metal_parameter_kind kind;
} attributes[] = {
    {"buffer(", METAL_BUFFER},
    {"threadgroup(", METAL_THREADGROUP},
    {"threadgroup_position_in_grid", METAL_GROUP_IN_GRID},
    {"threadgroups_per_grid", METAL_GROUPS_PER_GRID},
    {"thread_position_in_grid", METAL_THREAD_IN_GRID},
    {"thread_index_in_threadgroup", METAL_THREAD_IN_GROUP},
    {"threads_per_threadgroup", METAL_THREADS_PER_GROUP},
    {"simdgroup_index_in_threadgroup", METAL_SIMDGROUP_IN_GROUP},
    {"simdgroups_per_threadgroup", METAL_SIMDGROUPS_PER_GROUP},
    {"thread_index_in_simdgroup", METAL_THREAD_IN_SIMDGROUP},
};

/* Where the parameters of "kernel void NAME(" begin, or NULL. */
static const char *find_kernel(const char *source, const char *name)
{
    static const char before[] = "kernel void";
    size_t n = strlen(name);
    while ((source = strstr(source, before))) {
        source += sizeof before - 1;
        source += strspn(source, " \n");
        if (strncmp(source, name, n) == 0 && source[n] == '(')
            return source + n + 1;
    }
    return NULL;
}

/* Past the end of the parameter that begins at TEXT: its comma or the signature's last bracket. */
static const char *parameter_end(const char *text)
{
    int depth = 0;
    while (*text && !(depth == 0 && (*text == ',' || *text == ')'))) {
        depth += (*text == '(' || *text == '[') - (*text == ')' || *text == ']');
        text++;
    }
    return text;
}

static bool has_word(const char *text, const char *word)
{
    size_t n = strlen(word);
    for (const char *at = text; (at = strstr(at, word)); at += n)
        if ((at == text || !(isalnum((unsigned char)at[-1]) || at[-1] == '_')) &&
            !(isalnum((unsigned char)at[n]) || at[n] == '_'))
            return true;
    return false;
}

static bool parse_parameter(metal_parameter *p, const char *text)
{
    const char *attribute = strstr(text, "[[");
    if (!attribute)
        return false;
    attribute += 2;
    for (size_t i = 0; i < sizeof attributes / sizeof *attributes; i++) {
        size_t n = strlen(attributes[i].attribute);
        if (strncmp(attribute, attributes[i].attribute, n) != 0)
            continue;
        bool numbered = attribute[n - 1] == '(';
        p->kind = attributes[i].kind;
        p->index = numbered ? (uint32_t)strtoul(attribute + n, NULL, 10) : 0;
        p->writable =
            p->kind == METAL_BUFFER && !has_word(text, "const") && !has_word(text, "constant");
        return p->index < METAL_MAX_BUFFERS;
    }
    return false;
}

bool metal_function_find(metal_function *function, const metal_compiled *const *compiled,
                         const char *source, const char *name, char *message, size_t size)
{
    memset(function, 0, sizeof *function);
    while (*compiled && strcmp((*compiled)->name, name) != 0)
        compiled++;
    const char *text = find_kernel(source, name);
    if (!*compiled || !text) {
        snprintf(message, size, "there is no kernel %s", name);
        return false;
    }
    function->compiled = *compiled;
    for (const char *end; *text; text = end + 1) {
        char parameter[256];
        end = parameter_end(text);
        snprintf(parameter, sizeof parameter, "%.*s", (int)(end - text), text);
        if (function->n_parameters == METAL_MAX_BUFFERS ||
            !parse_parameter(&function->parameters[function->n_parameters], parameter)) {
            snprintf(message, size, "%s: the stand-in does not know the parameter \"%s\"", name,
                     parameter);
            return false;
        }
        function->n_parameters++;
        if (*end == ')')
            break;
    }
    if (function->n_parameters != (*compiled)->n_parameters) {
        snprintf(message, size, "%s: the program's text is not what was compiled", name);
        return false;
    }
    for (size_t i = 0; i < function->n_parameters; i++)
        function->parameters[i].bytes = (*compiled)->sizes[i];
    return true;
}
