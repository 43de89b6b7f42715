/* bml_synth: the shapes, the values, the bytes; and what happens when it cannot write. */
#include "containers.h"

#include "base/dtype.h"
#include "base/file.h"
#include "formats/checkpoint.h"

#include <math.h>
#include <signal.h>
#include <sys/resource.h>

/* FNV-1a of model.safetensors for seed 0. */
#define HASH_F32 0x2d27daaaa5efee60
#define HASH_F16 0xa6367fd9ee9fd9e0
#define HASH_BF16 0x8d373da31da4e68a

static uint64_t hash_file(const char *directory, const char *name)
{
    char *path = bml_format("%s/%s", directory, name);
    bml_file file;
    assert_int_equal(bml_file_map(path, &file, NULL), BML_OK);
    uint64_t hash = 0xcbf29ce484222325;
    for (size_t i = 0; i < file.size; i++)
        hash = (hash ^ file.data[i]) * 0x100000001b3;
    bml_file_close(&file);
    free(path);
    return hash;
}

static uint64_t synth_hash(uint64_t seed, bml_dtype dtype)
{
    char *dir = make_temp();
    bml_error err = {0};
    if (bml_synth("tiny", seed, dtype, dir, NULL, NULL, &err))
        fail_msg("%s", err.message);
    assert_int_equal(count_entries(dir), 2);
    uint64_t hash = hash_file(dir, "model.safetensors");
    remove_tree(dir);
    return hash;
}

static void same_seed_same_bytes(void **state)
{
    (void)state;
    assert_int_equal(synth_hash(7, BML_F32), synth_hash(7, BML_F32));
    assert_int_not_equal(synth_hash(7, BML_F32), synth_hash(8, BML_F32));
    assert_int_equal(synth_hash(7, BML_BF16), synth_hash(7, BML_BF16));
    /* The same on every machine. */
    assert_int_equal(synth_hash(0, BML_F32), HASH_F32);
    assert_int_equal(synth_hash(0, BML_F16), HASH_F16);
    assert_int_equal(synth_hash(0, BML_BF16), HASH_BF16);
}

static void check_values(const char *what, const bml_matrix *m, double std)
{
    size_t n = (size_t)m->rows * (size_t)m->cols;
    double sum = 0, squares = 0, largest = 0;
    for (size_t i = 0; i < n; i++) {
        uint16_t half = ((const uint16_t *)m->data)[m->dtype == BML_F32 ? 0 : i];
        double x = m->dtype == BML_F32    ? (double)((const float *)m->data)[i]
                   : m->dtype == BML_BF16 ? (double)bml_bf16_to_f32(half)
                                          : (double)bml_f16_to_f32(half);
        sum += x;
        squares += x * x;
        largest = fmax(largest, fabs(x));
    }
    double mean = sum / (double)n, deviation = sqrt(squares / (double)n);
    if (fabs(mean) > 5 * std / sqrt((double)n) || fabs(deviation / std - 1) > 0.03 ||
        largest < 2.5 * std || largest > 3.6 * std)
        fail_msg("%s: mean %g, deviation %g, largest %g", what, mean, deviation, largest);
}

static void content(void **state)
{
    (void)state;
    for (bml_dtype dtype = BML_F32; dtype <= BML_BF16; dtype++) {
        char *dir = make_temp();
        bml_checkpoint *c;
        bml_error err = {0};
        assert_int_equal(bml_synth("tiny", 1, dtype, dir, NULL, NULL, &err), BML_OK);
        if (bml_checkpoint_open(dir, &c, &err))
            fail_msg("%s", err.message);
        assert_int_equal(c->config.n_layer, 2);
        assert_int_equal(c->config.n_embd, 64);
        assert_int_equal(c->config.n_positions, 128);
        assert_int_equal(c->config.eos_token_id, c->config.vocab_size - 1);
        assert_int_equal(c->wte.dtype, dtype);
        assert_true(c->tied);
        assert_int_equal(c->n_copies == 0, dtype == BML_F32); /* aligned, so used in place */
        check_values("wte", &c->wte, 0.02);
        check_values("wpe", &c->wpe, 0.01);
        for (int i = 0; i < 2; i++) {
            const bml_layer *l = &c->layers[i];
            check_values("c_attn", &l->c_attn.w, 0.02);
            check_values("c_proj", &l->c_proj.w, 0.02 / 2);
            check_values("c_fc", &l->c_fc.w, 0.02);
            check_values("mlp.c_proj", &l->mlp_c_proj.w, 0.02 / 2);
            assert_non_null(l->mlp_c_proj.bias);
            assert_true(l->mlp_c_proj.bias[0] != 0);
            for (int k = 0; k < 64; k++)
                assert_true(l->ln_1.weight[k] == 1 && l->ln_2.weight[k] == 1);
        }
        /* No two tensors alike. */
        assert_memory_not_equal(c->layers[0].c_fc.w.data, c->layers[1].c_fc.w.data, 64);
        assert_memory_not_equal(c->layers[0].c_fc.w.data, c->layers[0].c_attn.w.data, 64);
        bml_checkpoint_close(c);
        remove_tree(dir);
    }
}

typedef struct watch {
    uint64_t done, total, stop_at;
    int calls;
} watch;

static bool progress(void *context, uint64_t done, uint64_t total)
{
    watch *w = context;
    assert_true(done > w->done && done <= total);
    w->done = done;
    w->total = total;
    w->calls++;
    return done < w->stop_at;
}

static void progress_and_stop(void **state)
{
    (void)state;
    char *dir = make_temp(), *out = bml_format("%s/a/b", dir), *model = bml_format("%s/a", dir);
    watch w = {.stop_at = UINT64_MAX};
    bml_error err = {0};
    assert_int_equal(bml_synth("tiny", 1, BML_F32, out, progress, &w, &err), BML_OK);
    assert_int_equal(w.done, w.total);
    assert_true(w.calls > 10);
    uint64_t before = hash_file(out, "model.safetensors");

    /* Stopped over a model that is there: it stays. */
    w = (watch){.stop_at = w.total / 2};
    bml_status status = bml_synth("tiny", 2, BML_F32, out, progress, &w, &err);
    check_error(&err, status, BML_ERR_STOPPED, "model.safetensors: stopped");
    assert_int_equal(count_entries(out), 2);
    assert_int_equal(hash_file(out, "model.safetensors"), before);

    /* Stopped in a new directory: nothing stays. */
    char *fresh = bml_format("%s/fresh", dir);
    w = (watch){.stop_at = w.total / 2};
    assert_int_equal(bml_synth("tiny", 2, BML_F32, fresh, progress, &w, &err), BML_ERR_STOPPED);
    assert_int_not_equal(access(fresh, F_OK), 0);
    free(fresh);
    free(model);
    free(out);
    remove_tree(dir);
}

static void full_disk(void **state)
{
    (void)state;
    char *dir = make_temp();
    /* A limit on the size of files stands in for a full disk. */
    signal(SIGXFSZ, SIG_IGN);
    struct rlimit old, small = {.rlim_cur = 100000};
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    small.rlim_max = old.rlim_max;
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    bml_error err = {0};
    bml_status status = bml_synth("tiny", 1, BML_F32, dir, NULL, NULL, &err);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
    check_error(&err, status, BML_ERR_IO, "model.safetensors: cannot write: ");
    assert_int_equal(count_entries(dir), 0);
    remove_tree(dir);
}

static void refused(void **state)
{
    (void)state;
    char *dir = make_temp(), *file = bml_format("%s/file", dir);
    char *below = bml_format("%s/file/below", dir);
    bml_error err = {0};
    check_error(&err, bml_synth("gpt3", 1, BML_F32, dir, NULL, NULL, &err), BML_ERR_ARGUMENT,
                "\"gpt3\" is not known; known are gpt2,");
    check_error(&err, bml_synth("tiny", 1, BML_F64, dir, NULL, NULL, &err), BML_ERR_ARGUMENT,
                "written as f32, f16 or bf16");
    put_text(dir, "file", "");
    check_error(&err, bml_synth("tiny", 1, BML_F32, file, NULL, NULL, &err), BML_ERR_IO,
                "it is a file");
    check_error(&err, bml_synth("tiny", 1, BML_F32, below, NULL, NULL, &err), BML_ERR_IO,
                "cannot make the directory");
    check_error(&err, bml_synth("tiny", 1, BML_F32, "/proc/none", NULL, NULL, &err), BML_ERR_IO,
                "cannot make the directory");

    /* A model from elsewhere is not overwritten; one made here is. */
    put_text(dir, "model.safetensors", "precious");
    check_error(&err, bml_synth("tiny", 1, BML_F32, dir, NULL, NULL, &err), BML_ERR_ARGUMENT,
                "not made by bml synth");
    put_text(dir, "config.json", "{\"_name_or_path\":\"gpt2\"}");
    check_error(&err, bml_synth("tiny", 1, BML_F32, dir, NULL, NULL, &err), BML_ERR_ARGUMENT,
                "not made by bml synth");
    char *weights = bml_format("%s/model.safetensors", dir);
    unlink(weights);
    check_error(&err, bml_synth("tiny", 1, BML_F32, dir, NULL, NULL, &err), BML_ERR_ARGUMENT,
                "not made by bml synth");
    put_text(dir, "config.json", "{\"_name_or_path\":\"bml-synth/gpt2\"}");
    assert_int_equal(bml_synth("tiny", 1, BML_F32, dir, NULL, NULL, &err), BML_OK);
    assert_int_equal(bml_synth("tiny", 2, BML_F16, dir, NULL, NULL, &err), BML_OK);
    free(weights);
    free(below);
    free(file);
    remove_tree(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(same_seed_same_bytes),
        cmocka_unit_test(content),
        cmocka_unit_test(progress_and_stop),
        cmocka_unit_test(full_disk),
        cmocka_unit_test(refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
