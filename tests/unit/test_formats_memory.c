/* Every allocation of the file formats fails once: an error, no leak, no crash. */
#include <stdlib.h>

/* The library's own allocator, compiled into this program in place of the archive's, so that any
 * one call can be made to fail. */
static long allocations_left = -1; /* -1: none fails */

static int allocation_fails(void)
{
    return allocations_left >= 0 && allocations_left-- == 0;
}

static void *failing_calloc(size_t count, size_t size)
{
    return allocation_fails() ? NULL : calloc(count, size);
}

static void *failing_realloc(void *old, size_t size)
{
    return allocation_fails() ? NULL : realloc(old, size);
}

#define calloc failing_calloc
#define realloc failing_realloc
#include "base/memory.c"
#undef calloc
#undef realloc

#include "containers.h"

#include "formats/checkpoint.h"

static char *model; /* a directory with a checkpoint that needs every kind of copy */

static bml_status open_checkpoint(bml_error *err)
{
    bml_checkpoint *c;
    bml_status status = bml_checkpoint_open(model, &c, err);
    if (!status)
        bml_checkpoint_close(c);
    return status;
}

static bml_status inspect_checkpoint(bml_error *err)
{
    char *text;
    bml_status status = bml_inspect(model, &text, err);
    if (!status)
        free(text);
    return status;
}

static bml_status find_model(bml_error *err)
{
    char *path;
    bml_status status = bml_model_find("org/name", &path, err);
    if (!status)
        free(path);
    return status;
}

static bml_status find_builtin(bml_error *err)
{
    char *path;
    bml_status status = bml_model_find(NULL, &path, err);
    if (!status)
        free(path);
    return status;
}

static bml_status write_synth(bml_error *err)
{
    char path[600];
    snprintf(path, sizeof path, "%s/synth", model);
    return bml_synth("tiny", 1, BML_BF16, path, NULL, NULL, err);
}

/* Lets the first, second, ... allocation fail until the work gets by without. jansson's are left
 * alone: 2.14 writes past its buffer when one of them fails within a string. */
static void fail_each(const char *what, bml_status (*work)(bml_error *err))
{
    for (long n = 0;; n++) {
        bml_error err = {0};
        allocations_left = n;
        bml_status status = work(&err);
        bool reached = allocations_left < 0;
        allocations_left = -1;
        if (!reached) {
            if (status || n < 2)
                fail_msg("%s after %ld allocations: %s", what, n, err.message);
            return;
        }
        if (status != BML_ERR_MEMORY || err.code != status || !*err.message)
            fail_msg("%s, allocation %ld: status %d, \"%s\"", what, n, status, err.message);
    }
}

static void checkpoint(void **state)
{
    (void)state;
    fail_each("open", open_checkpoint);
}

static void inspect(void **state)
{
    (void)state;
    fail_each("inspect", inspect_checkpoint);
}

static void locate(void **state)
{
    (void)state;
    put_text(model, "models--org--name/refs/main", "abc");
    put_text(model, "models--org--name/snapshots/abc/config.json", "{}");
    setenv("HF_HUB_CACHE", model, 1);
    fail_each("find", find_model);
    fail_each("find the built-in model", find_builtin);
}

static void synth(void **state)
{
    (void)state;
    fail_each("synth", write_synth);
}

/* The tensors of one layer, as F64 (matrices are copied) in two shards. */
static int make_model(void **state)
{
    (void)state;
    static const struct {
        const char *name, *shape;
        size_t count;
    } parts[] = {
        {"wte.weight", "[3,2]", 6},
        {"wpe.weight", "[3,2]", 6},
        {"ln_f.weight", "[2]", 2},
        {"h.0.ln_1.weight", "[2]", 2},
        {"h.0.ln_2.weight", "[2]", 2},
        {"h.0.attn.c_attn.weight", "[2,6]", 12},
        {"h.0.attn.c_proj.weight", "[2,2]", 4},
        {"h.0.mlp.c_fc.weight", "[2,8]", 16},
        {"h.0.mlp.c_proj.weight", "[8,2]", 16},
    };
    model = make_temp();
    put_text(model, "config.json",
             "{\"model_type\":\"gpt2\",\"n_layer\":1,\"n_head\":1,\"n_embd\":2,\"n_positions\":3,"
             "\"vocab_size\":3,\"architectures\":[\"GPT2LMHeadModel\"]}");
    bml_bytes index = {0};
    container_builder shards[2] = {{{0}, {0}}, {{0}, {0}}};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        char entry[128];
        int n = snprintf(entry, sizeof entry, "%s\"%s\":\"%zu.safetensors\"",
                         i ? "," : "{\"weight_map\":{", parts[i].name, i % 2);
        assert_true(bml_bytes_append(&index, entry, (size_t)n));
        add_tensor(&shards[i % 2], parts[i].name, "F64", parts[i].shape, 8 * parts[i].count);
    }
    assert_true(bml_bytes_append(&index, "}}", 2));
    put_file(model, "model.safetensors.index.json", index.data, index.length);
    free(index.data);
    for (size_t i = 0; i < 2; i++) {
        bml_bytes file = finish_container(&shards[i], 0);
        put_file(model, i ? "1.safetensors" : "0.safetensors", file.data, file.length);
        free(file.data);
    }
    return 0;
}

static int remove_model(void **state)
{
    (void)state;
    remove_tree(model);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(checkpoint),
        cmocka_unit_test(inspect),
        cmocka_unit_test(locate),
        cmocka_unit_test(synth),
    };
    return cmocka_run_group_tests(tests, make_model, remove_model);
}
