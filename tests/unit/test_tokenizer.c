/* The tokenizer against the goldens of tools/reference/tokenizer_goldens.py, and what no reference
 * can say: invalid UTF-8, single tokens, time. The loaders' errors are in test_tokenizer_files.c.
 */
#include "testing.h"

#include "tokenizer/tokenizer.h"

#include <jansson.h>
#include <time.h>

#define GPT2 SHARED_DIR "/gpt2-tokenizer"
#define STORYTELLER PROJECT_SOURCE "/models/storyteller"
#define VALID SHARED_DIR "/corpus/valid.txt.xz"

/* A second is held to where the optimiser ran, no sanitizer does, and the processor is a real one.
 */
#if defined(__OPTIMIZE__) && !defined(TEST_EMULATED)
#define TIMED (!TEST_SANITIZED)
#else
#define TIMED 0
#endif

static json_t *strings, *added;

static json_t *load_golden(const char *path)
{
    json_error_t error;
    json_t *root = json_load_file(path, JSON_ALLOW_NUL, &error);
    if (!root)
        fail_msg("%s: line %d: %s", path, error.line, error.text);
    return root;
}

static int load_goldens(void **state)
{
    (void)state;
    strings = load_golden(TEST_DATA "/tokenizer/strings.json");
    added = load_golden(TEST_DATA "/tokenizer/added.json");
    return 0;
}

static int free_goldens(void **state)
{
    (void)state;
    json_decref(strings);
    json_decref(added);
    return 0;
}

static bml_tokenizer *load(const char *directory)
{
    bml_error err = {0};
    bml_tokenizer *t = NULL;
    if (bml_tokenizer_load_directory(directory, &t, &err) || !t)
        fail_msg("%s: %s", directory, err.message);
    return t;
}

static int32_t *encode(const bml_tokenizer *t, const char *text, size_t length, bool special,
                       size_t *n)
{
    bml_error err;
    int32_t *ids = NULL;
    if (bml_tokenize(t, text, length, special, &ids, n, &err))
        fail_msg("%s", err.message);
    assert_non_null(ids);
    return ids;
}

/* TEXT gives WANT; where VERBATIM, its ids give it back. */
static void expect_ids(const bml_tokenizer *t, const json_t *text, bool special, const json_t *want,
                       bool verbatim)
{
    const char *bytes = json_string_value(text);
    size_t length = json_string_length(text), n, n_back;
    /* A copy without a NUL behind it, so that a sanitizer sees a byte read too far. */
    char *exact = malloc(length + !length);
    memcpy(exact, bytes, length);
    int32_t *ids = encode(t, exact, length, special, &n);
    free(exact);
    bool same = n == json_array_size(want);
    for (size_t i = 0; i < n && same; i++)
        same = ids[i] == json_integer_value(json_array_get(want, i));
    if (!same) {
        char *shown = json_dumps(text, JSON_ENCODE_ANY | JSON_ENSURE_ASCII);
        char *wanted = json_dumps(want, JSON_COMPACT);
        printf("%s special=%d: got", shown, special);
        for (size_t i = 0; i < n; i++)
            printf(" %d", (int)ids[i]);
        fail_msg("%s: wanted %s", shown, wanted);
    }
    bml_error err;
    char *back;
    assert_int_equal(bml_detokenize(t, ids, n, &back, &n_back, &err), BML_OK);
    if (verbatim) {
        assert_int_equal(n_back, length);
        assert_memory_equal(back, bytes, length);
    }
    assert_int_equal(back[n_back], 0);
    bml_free(back);
    bml_free(ids);
}

/* ---- goldens ----------------------------------------------------------------------------------*/

static void check_strings(const char *directory, const char *name)
{
    bml_tokenizer *t = load(directory);
    const json_t *texts = json_object_get(strings, "strings");
    const json_t *golden = json_object_get(strings, name);
    const json_t *plain = json_object_get(golden, "ids");
    assert_true(json_array_size(texts) > 2500);
    assert_int_equal(json_array_size(plain), json_array_size(texts));
    for (size_t i = 0; i < json_array_size(texts); i++) {
        char index[24];
        snprintf(index, sizeof index, "%zu", i);
        const json_t *text = json_array_get(texts, i), *want = json_array_get(plain, i);
        const json_t *special = json_object_get(json_object_get(golden, "special"), index);
        expect_ids(t, text, false, want, true);
        expect_ids(t, text, true, special ? special : want, true);
    }
    bml_tokenizer_free(t);
}

static void strings_gpt2(void **state)
{
    (void)state;
    require_shared(GPT2);
    check_strings(GPT2, "gpt2");
}

static void strings_storyteller(void **state)
{
    (void)state;
    check_strings(STORYTELLER, "storyteller");
}

static uint64_t fnv1a(const int32_t *ids, size_t n)
{
    uint64_t hash = 0xcbf29ce484222325;
    for (size_t i = 0; i < n; i++)
        for (int shift = 0; shift < 32; shift += 8)
            hash = (hash ^ ((uint32_t)ids[i] >> shift & 255)) * 0x100000001b3;
    return hash;
}

static char *read_corpus(size_t *length)
{
    require_shared(VALID);
    size_t capacity = 4 << 20;
    char *text = malloc(capacity);
    assert_non_null(text);
    FILE *pipe = popen("xz -dc '" VALID "'", "r");
    assert_non_null(pipe);
    *length = fread(text, 1, capacity, pipe);
    assert_int_equal(pclose(pipe), 0);
    assert_int_equal(*length, 1028240);
    return text;
}

static void check_corpus(const char *directory, const char *name)
{
    size_t length, n;
    char *text = read_corpus(&length);
    bml_tokenizer *t = load(directory);
    const json_t *golden = json_object_get(json_object_get(strings, name), "corpus");
    for (int special = 0; special < 2; special++) {
        const json_t *want = json_object_get(golden, special ? "special" : "plain");
        int32_t *ids = encode(t, text, length, special, &n);
        char hash[17];
        snprintf(hash, sizeof hash, "%016llx", (unsigned long long)fnv1a(ids, n));
        assert_int_equal(n, json_integer_value(json_object_get(want, "count")));
        assert_string_equal(hash, json_string_value(json_object_get(want, "fnv1a")));
        bml_free(ids);
    }
    bml_tokenizer_free(t);
    free(text);
}

static void corpus_gpt2(void **state)
{
    (void)state;
    require_shared(GPT2);
    check_corpus(GPT2, "gpt2");
}

static void corpus_storyteller(void **state)
{
    (void)state;
    check_corpus(STORYTELLER, "storyteller");
}

static void check_cases(const bml_tokenizer *t, const json_t *cases)
{
    assert_true(json_array_size(cases) > 20);
    for (size_t i = 0; i < json_array_size(cases); i++) {
        const json_t *c = json_array_get(cases, i);
        expect_ids(t, json_array_get(c, 0), false, json_array_get(c, 1), false);
        expect_ids(t, json_array_get(c, 0), true, json_array_get(c, 2), false);
    }
}

/* tokenizer.json with added tokens of all flags, with and without add_prefix_space, use_regex. */
static void added_tokens(void **state)
{
    (void)state;
    const json_t *files = json_object_get(added, "files");
    assert_true(json_array_size(files) > 10);
    for (size_t i = 0; i < json_array_size(files); i++) {
        char *text = json_dumps(json_object_get(json_array_get(files, i), "tokenizer"), 0);
        bml_error err;
        bml_tokenizer *t;
        if (bml_tokenizer_parse_json(text, strlen(text), "golden", &t, &err))
            fail_msg("%s", err.message);
        check_cases(t, json_object_get(json_array_get(files, i), "cases"));
        bml_tokenizer_free(t);
        free(text);
    }
}

static void write_text(const char *directory, const char *name, const char *text)
{
    char path[512];
    snprintf(path, sizeof path, "%s/%s", directory, name);
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(text, 1, strlen(text), f), strlen(text));
    fclose(f);
}

/* vocab.json, merges.txt and what may lie beside them, as AutoTokenizer reads them. */
static void directories(void **state)
{
    (void)state;
    const json_t *golden = json_object_get(added, "directories");
    assert_true(json_array_size(golden) >= 5);
    for (size_t i = 0; i < json_array_size(golden); i++) {
        const char *base = getenv("TMPDIR");
        char directory[256];
        snprintf(directory, sizeof directory, "%s/bml-test-XXXXXX", base ? base : "/tmp");
        assert_non_null(mkdtemp(directory));
        char *vocab = json_dumps(json_object_get(added, "vocab"), 0);
        write_text(directory, "vocab.json", vocab);
        free(vocab);
        write_text(directory, "merges.txt", json_string_value(json_object_get(added, "merges")));
        json_t *files = json_object_get(json_array_get(golden, i), "files"), *content;
        const char *name;
        json_object_foreach(files, name, content)
        {
            char *text = json_dumps(content, 0);
            write_text(directory, name, text);
            free(text);
        }
        bml_tokenizer *t = load(directory);
        check_cases(t, json_object_get(json_array_get(golden, i), "cases"));
        bml_tokenizer_free(t);
        char path[512];
        json_object_foreach(files, name, content)
        {
            snprintf(path, sizeof path, "%s/%s", directory, name);
            unlink(path);
        }
        snprintf(path, sizeof path, "%s/vocab.json", directory);
        unlink(path);
        snprintf(path, sizeof path, "%s/merges.txt", directory);
        unlink(path);
        assert_int_equal(rmdir(directory), 0);
    }
}

/* ---- bytes ------------------------------------------------------------------------------------*/

/* Any bytes come back as they were, and each id's bytes are what bml_token_bytes says. */
static void any_bytes_round_trip(void **state)
{
    (void)state;
    bml_tokenizer *t = load(STORYTELLER);
    uint64_t seed = 3;
    bml_error err;
    for (int round = 0; round < 20000; round++) {
        char text[200], *back;
        size_t length = test_random(&seed) % sizeof text, n, n_back, done = 0;
        for (size_t i = 0; i < length; i++) {
            uint64_t r = test_random(&seed);
            text[i] = (char)(r & 1 ? "ab '\n\xe2\x80\xf0"[r >> 8 & 7] : (int)(r >> 8 & 255));
        }
        int32_t *ids = encode(t, text, length, round & 1, &n);
        assert_int_equal(bml_detokenize(t, ids, n, &back, &n_back, &err), BML_OK);
        assert_int_equal(n_back, length);
        assert_memory_equal(back, text, length);
        for (size_t i = 0; i < n; i++) {
            size_t n_token;
            const char *bytes = bml_token_bytes(t, ids[i], &n_token);
            assert_non_null(bytes);
            assert_memory_equal(bytes, text + done, n_token);
            done += n_token;
        }
        assert_int_equal(done, length);
        bml_free(back);
        bml_free(ids);
    }
    bml_tokenizer_free(t);
}

static void ids_outside(void **state)
{
    (void)state;
    bml_tokenizer *t = load(STORYTELLER);
    assert_int_equal(bml_tokenizer_size(t), 8192);
    static const int32_t bad[] = {8192, -1, INT32_MAX, INT32_MIN};
    for (size_t i = 0; i < 4; i++) {
        bml_error err;
        char *text, wanted[40];
        size_t length;
        int32_t ids[] = {0, 1, bad[i]};
        assert_int_equal(bml_detokenize(t, ids, 3, &text, &length, &err), BML_ERR_ARGUMENT);
        snprintf(wanted, sizeof wanted, "id %d at index 2 ", (int)bad[i]);
        assert_non_null(strstr(err.message, wanted));
        assert_non_null(strstr(err.message, "8191"));
        assert_null(bml_token_bytes(t, bad[i], &length));
        assert_int_equal(bml_detokenize(t, ids, 3, &text, &length, NULL), BML_ERR_ARGUMENT);
    }
    size_t length;
    assert_non_null(bml_token_bytes(t, 8191, NULL));
    const char *end = bml_token_bytes(t, 8191, &length);
    assert_int_equal(length, 13);
    assert_memory_equal(end, "<|endoftext|>", 13);
    bml_error err;
    char *text = NULL;
    assert_int_equal(bml_detokenize(t, NULL, 0, &text, &length, &err), BML_OK);
    assert_int_equal(length, 0);
    assert_string_equal(text, "");
    bml_free(text);
    bml_tokenizer_free(t);
    bml_tokenizer_free(NULL);
}

/* ---- time -------------------------------------------------------------------------------------*/

/* Of this process: other work on the machine does not count. */
static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Of TEXT, which must come back from its ids: the processor time that encoding takes. */
static double round_trip(const bml_tokenizer *t, const char *text, size_t size)
{
    double start = seconds();
    size_t n, length;
    int32_t *ids = encode(t, text, size, true, &n);
    double took = seconds() - start;
    bml_error err;
    char *back;
    assert_int_equal(bml_detokenize(t, ids, n, &back, &length, &err), BML_OK);
    assert_int_equal(length, size);
    assert_memory_equal(back, text, size);
    bml_free(back);
    bml_free(ids);
    return took;
}

/* A megabyte without a word boundary, or all boundaries: no input is slow, nor does its time grow
 * faster than its length, which emulated processors and sanitized builds can tell too. */
static void million(const char *directory)
{
    static const struct {
        const char *unit;
        size_t length;
    } units[] = {{"a", 1},        {"^", 1},        {" ", 1},       {"ab", 2},           {"-", 1},
                 {"\n", 1},       {"1", 1},        {"'", 1},       {"\0\xff", 2},       {" a", 2},
                 {"\xc2\xa0", 2}, {"\xf0\x9f", 2}, {"he said", 7}, {"\xe5\xad\x97", 3}, {NULL, 26},
                 {NULL, 256}};
    enum { SIZE = 1000000, PART = SIZE / 10 };
    bml_tokenizer *t = load(directory);
    char *text = malloc(SIZE);
    assert_non_null(text);
    uint64_t seed = 4;
    for (size_t k = 0; k < sizeof units / sizeof *units; k++) {
        for (size_t i = 0; i < SIZE; i++) {
            uint64_t r = test_random(&seed) % units[k].length;
            text[i] = units[k].unit ? units[k].unit[i % units[k].length]
                                    : (char)(units[k].length == 26 ? 'a' + r : r);
        }
        double whole = round_trip(t, text, SIZE), part = round_trip(t, text, PART);
        /* 10 if time is linear, 100 if it is quadratic; and what any disturbance may take. */
        if ((TIMED && whole > 1) || whole > 30 * part + 0.2)
            fail_msg("a million bytes of case %zu took %.2f s, the first tenth %.4f", k, whole,
                     part);
    }
    free(text);
    bml_tokenizer_free(t);
}

static void million_gpt2(void **state)
{
    (void)state;
    require_shared(GPT2);
    million(GPT2);
}

static void million_storyteller(void **state)
{
    (void)state;
    million(STORYTELLER);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(strings_gpt2),         cmocka_unit_test(strings_storyteller),
        cmocka_unit_test(corpus_gpt2),          cmocka_unit_test(corpus_storyteller),
        cmocka_unit_test(added_tokens),         cmocka_unit_test(directories),
        cmocka_unit_test(any_bytes_round_trip), cmocka_unit_test(ids_outside),
        cmocka_unit_test(million_gpt2),         cmocka_unit_test(million_storyteller),
    };
    return cmocka_run_group_tests(tests, load_goldens, free_goldens);
}
