/* bml_model_find: paths, the Hugging Face cache, the built-in model. */
#include "containers.h"

/* The environment that decides where the cache is, all unset. */
static void clear_environment(void)
{
    static const char *const names[] = {"HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME",
                                        "XDG_CACHE_HOME", "HOME"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        unsetenv(names[i]);
}

static void expect_found(const char *name, const char *directory, const char *relative)
{
    char *path = NULL, *right = bml_format("%s/%s", directory, relative);
    bml_error err = {0};
    if (bml_model_find(name, &path, &err))
        fail_msg("%s: %s", name, err.message);
    assert_string_equal(path, right);
    free(right);
    bml_free(path);
}

static void expect_error(const char *name, bml_status expected, const char *part)
{
    char *path = NULL;
    bml_error err = {0};
    bml_status status = bml_model_find(name, &path, &err);
    check_error(&err, status, expected, part);
    assert_null(path);
}

static void builtin(void **state)
{
    (void)state;
    char *path;
    assert_int_equal(bml_model_find(NULL, &path, NULL), BML_OK);
    assert_non_null(strstr(path, "models/storyteller"));
    bml_free(path);
}

static void paths(void **state)
{
    (void)state;
    clear_environment();
    char *dir = make_temp();
    put_text(dir, "model/config.json", "{}");
    put_text(dir, "model.safetensors", "");
    char *inside = bml_format("%s/model", dir), *file = bml_format("%s/model.safetensors", dir);
    expect_found(inside, dir, "model");
    expect_found(file, dir, "model.safetensors");
    char *old = realpath(".", NULL);
    assert_int_equal(chdir(dir), 0);
    char *path;
    assert_int_equal(bml_model_find("model", &path, NULL), BML_OK);
    assert_string_equal(path, "model"); /* what exists comes before the cache */
    bml_free(path);
    assert_int_equal(chdir(old), 0);
    free(old);
    free(inside);
    free(file);

    expect_error("", BML_ERR_ARGUMENT, "name is empty");
    static const char *const no_ids[] = {
        "/no/such/path",
        "./nothing",
        "../nothing",
        "a/b/c",
        "a//b",
        "a/",
        "/a",
        "a/..",
        "a/b..c",
        "a--b/c",
        "-a",
        "a.",
        "a b",
        "gpt2@",
        "gpt2@../x",
        "gpt2@/x",
        "gpt2@a/../b",
        "gpt2@.hidden",
        "gpt2@a/.b",
        "gpt2@a b",
        "model\xff",
        "@main",
        "x.safetensors/y/z",
    };
    for (size_t i = 0; i < sizeof no_ids / sizeof *no_ids; i++)
        expect_error(no_ids[i], BML_ERR_IO, "no such file or directory");
    char long_name[3000];
    memset(long_name, 'a', sizeof long_name - 1);
    long_name[sizeof long_name - 1] = 0;
    expect_error(long_name, BML_ERR_IO, "File name too long");
    long_name[200] = 0;
    expect_error(long_name, BML_ERR_IO, "no such file or directory");
    remove_tree(dir);
}

#define COMMIT "0123456789abcdef0123456789abcdef01234567"

static void cache_layout(void **state)
{
    (void)state;
    char *dir = make_temp();
    clear_environment();
    setenv("HF_HUB_CACHE", dir, 1);
    put_text(dir, "models--org--full/refs/main", COMMIT "\n");
    put_text(dir, "models--org--full/refs/refs/pr/1", "aaaa");
    put_text(dir, "models--org--full/snapshots/" COMMIT "/config.json", "{}");
    put_text(dir, "models--org--full/snapshots/aaaa/config.json", "{}");
    put_text(dir, "models--org--noref/snapshots/bbbb/config.json", "{}");
    put_text(dir, "models--org--two/snapshots/bbbb/config.json", "{}");
    put_text(dir, "models--org--two/snapshots/cccc/config.json", "{}");
    put_text(dir, "models--org--stale/refs/main", "gone");
    put_text(dir, "models--org--stale/snapshots/bbbb/config.json", "{}");
    put_text(dir, "models--org--bad/refs/main", "../../../etc");
    put_text(dir, "models--org--bad/snapshots/bbbb/config.json", "{}");
    put_text(dir, "models--openai-community--gpt2/snapshots/dddd/config.json", "{}");
    put_text(dir, "models--gpt2-xl/snapshots/eeee/config.json", "{}");
    put_text(dir, "models--distilbert--distilgpt2/snapshots/ffff/config.json", "{}");

    expect_found("org/full", dir, "models--org--full/snapshots/" COMMIT);
    expect_found("org/full@main", dir, "models--org--full/snapshots/" COMMIT);
    expect_found("org/full@" COMMIT, dir, "models--org--full/snapshots/" COMMIT);
    expect_found("org/full@aaaa", dir, "models--org--full/snapshots/aaaa");
    expect_found("org/full@refs/pr/1", dir, "models--org--full/snapshots/aaaa");
    expect_found("org/noref", dir, "models--org--noref/snapshots/bbbb");
    expect_found("gpt2", dir, "models--openai-community--gpt2/snapshots/dddd");
    expect_found("openai-community/gpt2", dir, "models--openai-community--gpt2/snapshots/dddd");
    expect_found("gpt2-xl", dir, "models--gpt2-xl/snapshots/eeee");
    expect_found("openai-community/gpt2-xl", dir, "models--gpt2-xl/snapshots/eeee");
    expect_found("distilgpt2", dir, "models--distilbert--distilgpt2/snapshots/ffff");

    expect_error("org/two", BML_ERR_IO, "get it with 'hf download org/two'");
    expect_error("org/stale", BML_ERR_IO, "holds no snapshot in models--org--stale");
    expect_error("org/bad", BML_ERR_FORMAT, "refs/main: holds no commit hash");
    expect_error("org/full@v9", BML_ERR_IO, "'hf download org/full --revision v9'");
    expect_error("gpt2-large", BML_ERR_IO,
                 "models--gpt2-large or models--openai-community--gpt2-large; get it with 'hf "
                 "download openai-community/gpt2-large'");
    expect_error("other/gpt2", BML_ERR_IO, "not found");
    expect_error("nothere", BML_ERR_IO, "models--nothere; a Hub id has the form ORGANISATION/NAME");
    remove_tree(dir);
}

static void cache_places(void **state)
{
    (void)state;
    static const struct {
        const char *variable, *below;
    } places[] = {{"HOME", ".cache/huggingface/hub"},
                  {"XDG_CACHE_HOME", "huggingface/hub"},
                  {"HF_HOME", "hub"},
                  {"HUGGINGFACE_HUB_CACHE", ""},
                  {"HF_HUB_CACHE", ""}};
    clear_environment();
    expect_error("gpt2", BML_ERR_IO, "no Hugging Face cache to look in");
    char *dirs[5];
    /* Each place goes before those that are set already. */
    for (size_t i = 0; i < 5; i++) {
        dirs[i] = make_temp();
        setenv(places[i].variable, dirs[i], 1);
        expect_error("gpt2", BML_ERR_IO, dirs[i]);
        const char *below = places[i].below;
        char *relative = bml_format("%s%smodels--gpt2/snapshots/a", below, *below ? "/" : "");
        char *file = bml_format("%s/config.json", relative);
        put_text(dirs[i], file, "{}");
        expect_found("gpt2", dirs[i], relative);
        free(file);
        free(relative);
    }
    setenv("HF_HUB_CACHE", "", 1); /* empty is as good as unset */
    expect_found("gpt2", dirs[3], "models--gpt2/snapshots/a");
    for (size_t i = 0; i < 5; i++)
        remove_tree(dirs[i]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(builtin),
        cmocka_unit_test(paths),
        cmocka_unit_test(cache_layout),
        cmocka_unit_test(cache_places),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
