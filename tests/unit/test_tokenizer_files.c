/* Loading a tokenizer: the ways its files may look, and every way they may be wrong. */
#include "testing.h"

#include "tokenizer/tokenizer.h"

#include <sys/stat.h>

#define BYTE_LEVEL "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":true}"

/* A vocabulary of four tokens and the merge that makes the third. */
#define ABC "{\"a\":0,\"b\":1,\"ab\":2,\"c\":3}"

/* ---- helpers ----------------------------------------------------------------------------------*/

static void expect_failure(bml_status status, bml_status wanted, const bml_error *err,
                           const char *const *parts)
{
    if (status != wanted)
        fail_msg("status %d, not %d: %s", (int)status, (int)wanted, err->message);
    assert_int_equal(err->code, wanted);
    assert_null(strchr(err->message, '\n'));
    for (; *parts; parts++)
        if (!strstr(err->message, *parts))
            fail_msg("\"%s\" does not say \"%s\"", err->message, *parts);
}

#define PARTS(...) ((const char *const[]){__VA_ARGS__, NULL})

static void refuse_json(const char *json, bml_status wanted, const char *const *parts)
{
    bml_error err = {0};
    bml_tokenizer *t = NULL;
    bml_status status = bml_tokenizer_parse_json(json, strlen(json), "T.json", &t, &err);
    expect_failure(status, wanted, &err, PARTS("T.json: "));
    expect_failure(status, wanted, &err, parts);
    assert_null(t);
    assert_int_equal(bml_tokenizer_parse_json(json, strlen(json), "T.json", &t, NULL), wanted);
}

static void refuse_files(const char *vocab, const char *merges, bml_status wanted,
                         const char *const *parts)
{
    bml_error err = {0};
    bml_tokenizer *t = NULL;
    bml_status status =
        bml_tokenizer_parse_files(vocab, strlen(vocab), merges, strlen(merges), "D", &t, &err);
    expect_failure(status, wanted, &err, parts);
    assert_null(t);
}

/* TEXT gives the ids in WANT, "1 2 3", and the tokenizer is freed. */
static void expect_text(bml_tokenizer *t, const char *text, bool special, const char *want)
{
    bml_error err = {0};
    int32_t *ids;
    size_t n, used = 0;
    char got[256] = "";
    if (bml_tokenize(t, text, strlen(text), special, &ids, &n, &err))
        fail_msg("%s", err.message);
    for (size_t i = 0; i < n; i++)
        used += (size_t)snprintf(got + used, sizeof got - used, i ? " %d" : "%d", (int)ids[i]);
    assert_string_equal(got, want);
    bml_free(ids);
    bml_tokenizer_free(t);
}

static bml_tokenizer *from_json(const char *json)
{
    bml_error err = {0};
    bml_tokenizer *t = NULL;
    if (bml_tokenizer_parse_json(json, strlen(json), "T.json", &t, &err))
        fail_msg("%s", err.message);
    return t;
}

static bml_tokenizer *from_files(const char *vocab, const char *merges)
{
    bml_error err = {0};
    bml_tokenizer *t = NULL;
    if (bml_tokenizer_parse_files(vocab, strlen(vocab), merges, strlen(merges), "D", &t, &err))
        fail_msg("%s", err.message);
    return t;
}

/* ---- vocab.json and merges.txt ----------------------------------------------------------------*/

static void merges_as_written(void **state)
{
    (void)state;
    static const char *const same[] = {
        "#version: 0.2\na b\n",     "a b\n",       "a b",
        "#version: 0.2\r\na b\r\n", "a b\r\n\r\n", "\n\n#version: 0.2\n\na b\n\n",
        "a b\n#version: 0.2"};
    for (size_t i = 0; i < sizeof same / sizeof *same; i++)
        expect_text(from_files(ABC, same[i]), "abcab", false, "2 3 2");
    expect_text(from_files(ABC, ""), "abcab", false, "0 1 3 0 1");
    expect_text(from_files(ABC, "#version: 0.2\n"), "ab", false, "0 1");
}

/* The order of the merges decides, not the ids; a merge given twice has its later rank. */
static void ranks(void **state)
{
    (void)state;
    const char *vocab = "{\"a\":9,\"b\":1,\"ab\":0,\"c\":3,\"bc\":7}";
    expect_text(from_files(vocab, "a b\nb c\n"), "abc", false, "0 3");
    expect_text(from_files(vocab, "b c\na b\n"), "abc", false, "9 7");
    expect_text(from_files(vocab, "a b\nb c\na b\n"), "abc", false, "9 7");
    /* A token of the vocabulary that no merge makes is never used. */
    expect_text(from_files(vocab, "b c\n"), "ab", false, "9 1");
    /* The leftmost of equals first. */
    expect_text(from_files("{\"a\":0,\"aa\":1}", "a a"), "aaaaa", false, "1 1 0");
}

static void gaps_and_end_of_text(void **state)
{
    (void)state;
    const char *vocab =
        "{\"a\":5,\"<|endoftext|>\":9,\"<\":0,\"|\":1,\">\":2,\"e\":3,\"n\":4,\"d\":6,"
        "\"o\":7,\"f\":8,\"t\":10,\"x\":12}";
    bml_tokenizer *t = from_files(vocab, "");
    assert_int_equal(bml_tokenizer_size(t), 13);
    size_t length;
    assert_null(bml_token_bytes(t, 11, &length));
    bml_error err;
    char *text;
    assert_int_equal(bml_detokenize(t, (int32_t[]){11}, 1, &text, &length, &err), BML_ERR_ARGUMENT);
    assert_non_null(strstr(err.message, "id 11 at index 0"));
    expect_text(t, "a<|endoftext|>a", true, "5 9 5");
    expect_text(from_files(vocab, ""), "<|endoftext|>", false, "0 1 3 4 6 7 8 10 3 12 10 1 2");
}

static void bytes_without_tokens(void **state)
{
    (void)state;
    bml_tokenizer *t = from_files(ABC, "a b");
    bml_error err;
    int32_t *ids = NULL;
    size_t n;
    assert_int_equal(bml_tokenize(t, "abz", 3, false, &ids, &n, &err), BML_ERR_UNSUPPORTED);
    assert_non_null(strstr(err.message, "0x7a"));
    assert_null(ids);
    assert_int_equal(bml_tokenize(t, "", 0, false, &ids, &n, &err), BML_OK);
    assert_non_null(ids);
    assert_int_equal(n, 0);
    bml_free(ids);
    bml_tokenizer_free(t);
}

static void bad_vocabulary(void **state)
{
    (void)state;
    static const char *const bad_ids[] = {
        "-1", "1.5", "\"0\"", "null", "4194304", "2000000000", "9223372036854775807"};
    for (size_t i = 0; i < sizeof bad_ids / sizeof *bad_ids; i++) {
        char vocab[64];
        snprintf(vocab, sizeof vocab, "{\"a\":0,\"bad\":%s}", bad_ids[i]);
        refuse_files(vocab, "", BML_ERR_FORMAT, PARTS("D/vocab.json: ", "\"bad\"", "0 to 4194303"));
    }
    refuse_files("", "", BML_ERR_FORMAT, PARTS("D/vocab.json: ", "JSON"));
    refuse_files("[]", "", BML_ERR_FORMAT, PARTS("D/vocab.json: ", "object"));
    refuse_files("7", "", BML_ERR_FORMAT, PARTS("D/vocab.json: ", "object"));
    refuse_files("{}", "", BML_ERR_FORMAT, PARTS("D/vocab.json: ", "empty"));
    refuse_files("{\"a\":0,\n\"b\" 1}", "", BML_ERR_FORMAT, PARTS("D/vocab.json: ", "line 2"));
    refuse_files("{\"a\":0} x", "", BML_ERR_FORMAT, PARTS("D/vocab.json: "));
    refuse_files("{\"a\":0,\"a\":1}", "", BML_ERR_FORMAT, PARTS("D/vocab.json: ", "duplicate"));
    refuse_files("{\"a\":0,\"b\":0}", "", BML_ERR_FORMAT, PARTS("\"b\"", "the id 0 of another"));
    refuse_files("{\"a\":99999999999999999999}", "", BML_ERR_FORMAT, PARTS("D/vocab.json: "));
    refuse_files("{\"\xff\":0}", "", BML_ERR_FORMAT, PARTS("D/vocab.json: "));
    refuse_files("{\"\\ud800\":0}", "", BML_ERR_FORMAT, PARTS("D/vocab.json: "));
}

static void bad_merges(void **state)
{
    (void)state;
    static const char *const shapes[] = {"a", "a b c", " a b", "a  b", "a b ", " ", "a ", " b"};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        char merges[64];
        snprintf(merges, sizeof merges, "#version: 0.2\na b\n%s\na b\n", shapes[i]);
        refuse_files(ABC, merges, BML_ERR_FORMAT, PARTS("D/merges.txt: line 3: ", "one space"));
    }
    refuse_files(ABC, "x b", BML_ERR_FORMAT, PARTS("D/merges.txt: line 1: ", "\"x\""));
    refuse_files(ABC, "a b\na x", BML_ERR_FORMAT, PARTS("D/merges.txt: line 2: ", "\"x\""));
    refuse_files(ABC, "b c", BML_ERR_FORMAT, PARTS("D/merges.txt: line 1: ", "\"bc\""));
    refuse_files(ABC, "\n\r\nb c", BML_ERR_FORMAT, PARTS("line 3"));
}

static void other_kinds(void **state)
{
    (void)state;
    refuse_files("{\"a\":0,\"b</w>\":1,\"ab</w>\":2}", "", BML_ERR_UNSUPPORTED,
                 PARTS("D/vocab.json: ", "GPT-1"));
    refuse_files("{\"a\":0,\"\\u2581b\":1}", "", BML_ERR_UNSUPPORTED, PARTS("SentencePiece"));
    refuse_files("{\"a\":0,\"##b\":1}", "", BML_ERR_UNSUPPORTED, PARTS("WordPiece"));
    /* GPT-2's own vocabulary has "##" among its tokens, and the space. */
    bml_tokenizer_free(from_files("{\"\\u0120\":0,\"##b\":1}", ""));
}

/* ---- tokenizer.json ---------------------------------------------------------------------------*/

#define JSON(model, rest) "{\"model\":{" model "},\"pre_tokenizer\":" BYTE_LEVEL rest "}"
#define MODEL "\"type\":\"BPE\",\"vocab\":" ABC ",\"merges\":[\"a b\"]"

static void json_as_written(void **state)
{
    (void)state;
    static const char *const same[] = {
        JSON(MODEL, ""),
        JSON("\"vocab\":" ABC ",\"merges\":[[\"a\",\"b\"]]", ""), /* old files have no type */
        JSON("\"dropout\":null,\"unk_token\":\"c\",\"continuing_subword_prefix\":\"\","
             "\"end_of_word_suffix\":null,\"fuse_unk\":true,\"byte_fallback\":false," MODEL,
             ",\"normalizer\":null,\"decoder\":{\"type\":\"ByteLevel\"},\"truncation\":"
             "{\"max_length\":1},\"post_processor\":{\"type\":\"TemplateProcessing\"}"),
        "{\"model\":{\"dropout\":0.0," MODEL "},\"pre_tokenizer\":{\"type\":\"Sequence\","
        "\"pretokenizers\":[" BYTE_LEVEL "]},\"decoder\":{\"type\":\"Sequence\",\"decoders\":["
        "{\"type\":\"ByteLevel\"}]},\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[]}}"};
    for (size_t i = 0; i < sizeof same / sizeof *same; i++)
        expect_text(from_json(same[i]), "abcab", false, "2 3 2");
    expect_text(from_json(JSON(
                    "\"ignore_merges\":true,\"type\":\"BPE\",\"vocab\":" ABC ",\"merges\":[]", "")),
                "ab", false, "2");
}

static void json_added(void **state)
{
    (void)state;
    /* The ids in the file are not asked: one in the vocabulary has that id, others follow. */
    const char *json = JSON(MODEL, ",\"added_tokens\":[{\"id\":77,\"content\":\"c\"},"
                                   "{\"content\":\"\\u0000!\",\"special\":true},{\"content\":\"\"},"
                                   "{\"id\":4,\"content\":\"<x>\",\"rstrip\":true}]");
    bml_tokenizer *t = from_json(json);
    assert_int_equal(bml_tokenizer_size(t), 6);
    size_t length;
    const char *bytes = bml_token_bytes(t, 4, &length);
    assert_int_equal(length, 2);
    assert_memory_equal(bytes, "\0!", 2);
    expect_text(t, "ab<x>  c", true, "2 5 3");
}

static void json_refused(void **state)
{
    (void)state;
    static const struct {
        const char *json, *part, *and_part;
        bml_status status;
    } cases[] = {
        {"", "JSON", "", BML_ERR_FORMAT},
        {"{", "line 1", "JSON", BML_ERR_FORMAT},
        {"[]", "object", "", BML_ERR_FORMAT},
        {"{}", "\"model\"", "", BML_ERR_FORMAT},
        {"{\"model\":[]}", "\"model\"", "", BML_ERR_FORMAT},
        {"{\"model\":{}}", "model", "byte-level", BML_ERR_UNSUPPORTED},
        {"{\"model\":{\"type\":\"WordPiece\"}}", "WordPiece", "byte-level", BML_ERR_UNSUPPORTED},
        {"{\"model\":{\"type\":\"Unigram\"}}", "Unigram", "byte-level", BML_ERR_UNSUPPORTED},
        {"{\"model\":{\"type\":7}}", "model", "", BML_ERR_UNSUPPORTED},
        {JSON("\"continuing_subword_prefix\":\"##\"," MODEL, ""), "continuing_subword_prefix", "",
         BML_ERR_UNSUPPORTED},
        {JSON("\"end_of_word_suffix\":\"</w>\"," MODEL, ""), "end_of_word_suffix", "",
         BML_ERR_UNSUPPORTED},
        {JSON("\"dropout\":0.1," MODEL, ""), "dropout", "", BML_ERR_UNSUPPORTED},
        {JSON("\"byte_fallback\":true," MODEL, ""), "byte_fallback", "", BML_ERR_UNSUPPORTED},
        {JSON("\"byte_fallback\":1," MODEL, ""), "byte_fallback", "true or false", BML_ERR_FORMAT},
        {JSON("\"ignore_merges\":{}," MODEL, ""), "ignore_merges", "", BML_ERR_FORMAT},
        {"{\"model\":{" MODEL "}}", "pre_tokenizer", "missing", BML_ERR_UNSUPPORTED},
        {"{\"model\":{" MODEL "},\"pre_tokenizer\":null}", "pre_tokenizer", "missing",
         BML_ERR_UNSUPPORTED},
        {"{\"model\":{" MODEL "},\"pre_tokenizer\":{\"type\":\"Metaspace\"}}", "Metaspace", "",
         BML_ERR_UNSUPPORTED},
        {"{\"model\":{" MODEL "},\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":"
         "[{\"type\":\"Digits\"}," BYTE_LEVEL "]}}",
         "Digits", "pre_tokenizer", BML_ERR_UNSUPPORTED},
        {"{\"model\":{" MODEL "},\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":[]}}",
         "pre_tokenizer", "", BML_ERR_UNSUPPORTED},
        {"{\"model\":{" MODEL "},\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":"
         "[" BYTE_LEVEL "," BYTE_LEVEL "]}}",
         "pre_tokenizer", "", BML_ERR_UNSUPPORTED},
        {"{\"model\":{" MODEL "},\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"use_regex\":1}}",
         "use_regex", "true or false", BML_ERR_FORMAT},
        {JSON(MODEL, ",\"normalizer\":{\"type\":\"NFC\"}"), "NFC", "normalizer",
         BML_ERR_UNSUPPORTED},
        {JSON(MODEL, ",\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[{}]}"), "Sequence",
         "normalizer", BML_ERR_UNSUPPORTED},
        {JSON(MODEL, ",\"decoder\":{\"type\":\"WordPiece\"}"), "WordPiece", "decoder",
         BML_ERR_UNSUPPORTED},
        {JSON("\"type\":\"BPE\",\"merges\":[]", ""), "\"vocab\"", "", BML_ERR_FORMAT},
        {JSON("\"type\":\"BPE\",\"vocab\":[],\"merges\":[]", ""), "\"vocab\"", "", BML_ERR_FORMAT},
        {JSON("\"type\":\"BPE\",\"vocab\":{},\"merges\":[]", ""), "empty", "", BML_ERR_FORMAT},
        {JSON("\"type\":\"BPE\",\"vocab\":" ABC, ""), "\"merges\"", "", BML_ERR_FORMAT},
        {JSON("\"type\":\"BPE\",\"vocab\":" ABC ",\"merges\":{}", ""), "\"merges\"", "",
         BML_ERR_FORMAT},
        {JSON("\"type\":\"BPE\",\"vocab\":" ABC ",\"merges\":[\"a b\",\"ab\"]", ""), "merge 1", "",
         BML_ERR_FORMAT},
        {JSON("\"type\":\"BPE\",\"vocab\":" ABC ",\"merges\":[\"a b c\"]", ""), "merge 0", "",
         BML_ERR_FORMAT},
        {JSON("\"type\":\"BPE\",\"vocab\":" ABC ",\"merges\":[[\"a\"]]", ""), "merge 0", "",
         BML_ERR_FORMAT},
        {JSON("\"type\":\"BPE\",\"vocab\":" ABC ",\"merges\":[[\"a\",1]]", ""), "merge 0", "",
         BML_ERR_FORMAT},
        {JSON("\"type\":\"BPE\",\"vocab\":" ABC ",\"merges\":[[\"a\",\"c\"]]", ""), "merge 0",
         "\"ac\"", BML_ERR_FORMAT},
        {JSON("\"type\":\"BPE\",\"vocab\":" ABC ",\"merges\":[null]", ""), "merge 0", "",
         BML_ERR_FORMAT},
        {JSON(MODEL, ",\"added_tokens\":{}"), "added_tokens", "array", BML_ERR_FORMAT},
        {JSON(MODEL, ",\"added_tokens\":[{\"id\":1}]"), "added_tokens", "content", BML_ERR_FORMAT},
        {JSON(MODEL, ",\"added_tokens\":[7]"), "added_tokens", "content", BML_ERR_FORMAT},
        {JSON(MODEL, ",\"added_tokens\":[{\"content\":\"x\",\"lstrip\":\"no\"}]"), "lstrip",
         "true or false", BML_ERR_FORMAT},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        refuse_json(cases[i].json, cases[i].status, PARTS(cases[i].part, cases[i].and_part));
}

static void too_many_added(void **state)
{
    (void)state;
    size_t capacity = 1 << 20, used;
    char *json = malloc(capacity);
    used = (size_t)snprintf(json, capacity,
                            "{\"model\":{" MODEL "},\"pre_tokenizer\":" BYTE_LEVEL
                            ",\"added_tokens\":[\"x\"");
    for (int i = 0; i <= 16384; i++)
        used += (size_t)snprintf(json + used, capacity - used, ",\"<%d>\"", i);
    snprintf(json + used, capacity - used, "]}");
    refuse_json(json, BML_ERR_UNSUPPORTED, PARTS("16384"));
    free(json);
}

/* ---- directories ------------------------------------------------------------------------------*/

typedef struct directory {
    char path[256];
} directory;

static directory make_directory(void)
{
    directory d;
    const char *base = getenv("TMPDIR");
    snprintf(d.path, sizeof d.path, "%s/bml-test-XXXXXX", base ? base : "/tmp");
    assert_non_null(mkdtemp(d.path));
    return d;
}

static void put(const directory *d, const char *name, const char *text)
{
    char path[512];
    snprintf(path, sizeof path, "%s/%s", d->path, name);
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    fputs(text, f);
    fclose(f);
}

static void remove_directory(const directory *d)
{
    static const char *const names[] = {"tokenizer.json",
                                        "vocab.json",
                                        "merges.txt",
                                        "added_tokens.json",
                                        "special_tokens_map.json",
                                        "tokenizer_config.json",
                                        "spiece.model",
                                        "vocab.txt",
                                        "model.safetensors"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char path[512];
        snprintf(path, sizeof path, "%s/%s", d->path, names[i]);
        remove(path);
    }
    assert_int_equal(rmdir(d->path), 0);
}

static bml_tokenizer *load(const directory *d)
{
    bml_error err = {0};
    bml_tokenizer *t = NULL;
    if (bml_tokenizer_load_directory(d->path, &t, &err) || !t)
        fail_msg("%s", err.message);
    return t;
}

static void refuse(const directory *d, bml_status wanted, const char *const *parts)
{
    bml_error err = {0};
    bml_tokenizer *t = NULL;
    expect_failure(bml_tokenizer_load_directory(d->path, &t, &err), wanted, &err, parts);
    expect_failure(err.code, wanted, &err, PARTS(d->path));
    assert_null(t);
}

static void no_tokenizer(void **state)
{
    (void)state;
    directory d = make_directory();
    put(&d, "model.safetensors", "");
    bml_tokenizer *t = (bml_tokenizer *)1;
    bml_error err = {0};
    assert_int_equal(bml_tokenizer_load_directory(d.path, &t, &err), BML_OK);
    assert_null(t);
    expect_failure(bml_tokenizer_load(d.path, &t, &err), BML_ERR_IO, &err,
                   PARTS(d.path, "tokenizer.json", "vocab.json", "merges.txt"));
    remove_directory(&d);
    assert_int_not_equal(bml_tokenizer_load("/nonexistent/model", &t, &err), BML_OK);
}

static void half_a_tokenizer(void **state)
{
    (void)state;
    directory d = make_directory();
    put(&d, "vocab.json", ABC);
    refuse(&d, BML_ERR_IO, PARTS("merges.txt: is missing"));
    remove_directory(&d);
    d = make_directory();
    put(&d, "merges.txt", "a b");
    refuse(&d, BML_ERR_IO, PARTS("vocab.json: is missing"));
    remove_directory(&d);
}

static void foreign_files(void **state)
{
    (void)state;
    static const char *const names[][2] = {{"spiece.model", "SentencePiece"},
                                           {"vocab.txt", "WordPiece"}};
    for (size_t i = 0; i < 2; i++) {
        directory d = make_directory();
        put(&d, names[i][0], "x");
        refuse(&d, BML_ERR_UNSUPPORTED, PARTS(names[i][0], names[i][1], "byte-level"));
        put(&d, "tokenizer.json", JSON(MODEL, "")); /* beside a usable one it does not matter */
        expect_text(load(&d), "ab", false, "2");
        remove_directory(&d);
    }
}

static void tokenizer_json_first(void **state)
{
    (void)state;
    directory d = make_directory();
    put(&d, "tokenizer.json", JSON(MODEL, ""));
    put(&d, "vocab.json", "{\"a\":7,\"b\":8}");
    put(&d, "merges.txt", "");
    expect_text(load(&d), "ab", false, "2");
    /* tokenizer_config.json adds tokens, and overrides add_prefix_space for GPT2Tokenizer. */
    put(&d, "tokenizer.json",
        "{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"\xc4\xa0\":1},\"merges\":[]},"
        "\"pre_tokenizer\":" BYTE_LEVEL "}");
    put(&d, "tokenizer_config.json",
        "{\"add_prefix_space\":true,\"added_tokens_decoder\":{\"2\":{\"content\":\"<x>\","
        "\"special\":true}}}");
    expect_text(load(&d), "a<x>a", true, "1 0 2 1 0");
    put(&d, "tokenizer_config.json",
        "{\"add_prefix_space\":true,\"tokenizer_class\":\"PreTrainedTokenizerFast\"}");
    expect_text(load(&d), "a", true, "0");
    /* As transformers writes it where the length is unknown: int(1e30). */
    put(&d, "tokenizer_config.json",
        "{\"add_prefix_space\":false,\"add_prefix_space\":true,"
        "\"model_max_length\":1000000000000000019884624838656}");
    expect_text(load(&d), "a", true, "1 0");
    put(&d, "tokenizer_config.json", "{\"added_tokens_decoder\":[]}");
    refuse(&d, BML_ERR_FORMAT, PARTS("tokenizer_config.json", "added_tokens_decoder"));
    put(&d, "tokenizer_config.json", "{\"added_tokens_decoder\":{\"1\":{}}}");
    refuse(&d, BML_ERR_FORMAT, PARTS("tokenizer_config.json", "content"));
    put(&d, "tokenizer_config.json", "nonsense");
    refuse(&d, BML_ERR_FORMAT, PARTS("tokenizer_config.json", "JSON"));
    remove_directory(&d);
}

/* Beside vocab.json and merges.txt; what they mean is in the goldens. */
static void bad_companions(void **state)
{
    (void)state;
    static const struct {
        const char *name, *text, *part;
    } cases[] = {{"added_tokens.json", "{\"x\":\"4\"}", "\"x\""},
                 {"added_tokens.json", "[1]", "object"},
                 {"special_tokens_map.json", "{\"pad_token\":3}", "pad_token"},
                 {"special_tokens_map.json", "{\"additional_special_tokens\":[null]}",
                  "additional_special_tokens"},
                 {"special_tokens_map.json", "", "JSON"},
                 {"tokenizer_config.json", "{\"eos_token\":{\"content\":1}}", "eos_token"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        directory d = make_directory();
        put(&d, "vocab.json", ABC);
        put(&d, "merges.txt", "a b");
        expect_text(load(&d), "ab", false, "2");
        put(&d, cases[i].name, cases[i].text);
        refuse(&d, BML_ERR_FORMAT, PARTS(cases[i].name, cases[i].part));
        remove_directory(&d);
    }
}

static void unreadable(void **state)
{
    (void)state;
    directory d = make_directory();
    char path[512];
    snprintf(path, sizeof path, "%s/tokenizer.json", d.path);
    assert_int_equal(mkdir(path, 0700), 0);
    refuse(&d, BML_ERR_IO, PARTS("tokenizer.json"));
    assert_int_equal(rmdir(path), 0);
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fseek(f, 64 << 20, SEEK_SET), 0);
    fputs("x", f); /* a sparse file, one byte over the limit */
    fclose(f);
    refuse(&d, BML_ERR_FORMAT, PARTS("tokenizer.json", "67108864"));
    remove_directory(&d);
}

/* By the name of a model: a directory, a file in it, the built-in one. */
static void by_name(void **state)
{
    (void)state;
    directory d = make_directory();
    put(&d, "vocab.json", ABC);
    put(&d, "merges.txt", "a b");
    put(&d, "model.safetensors", "");
    bml_error err = {0};
    bml_tokenizer *t = NULL;
    char path[512];
    snprintf(path, sizeof path, "%s/model.safetensors", d.path);
    assert_int_equal(bml_tokenizer_load(d.path, &t, &err), BML_OK);
    expect_text(t, "abc", false, "2 3");
    if (bml_tokenizer_load(path, &t, &err))
        fail_msg("%s", err.message);
    expect_text(t, "abc", false, "2 3");
    remove_directory(&d);
    if (bml_tokenizer_load(PROJECT_SOURCE "/models/storyteller", &t, &err))
        fail_msg("%s", err.message);
    expect_text(t, "<|endoftext|>", true, "8191");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(merges_as_written),    cmocka_unit_test(ranks),
        cmocka_unit_test(gaps_and_end_of_text), cmocka_unit_test(bytes_without_tokens),
        cmocka_unit_test(bad_vocabulary),       cmocka_unit_test(bad_merges),
        cmocka_unit_test(other_kinds),          cmocka_unit_test(json_as_written),
        cmocka_unit_test(json_added),           cmocka_unit_test(json_refused),
        cmocka_unit_test(too_many_added),       cmocka_unit_test(no_tokenizer),
        cmocka_unit_test(half_a_tokenizer),     cmocka_unit_test(foreign_files),
        cmocka_unit_test(tokenizer_json_first), cmocka_unit_test(bad_companions),
        cmocka_unit_test(unreadable),           cmocka_unit_test(by_name),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
