/* The safetensors container: what it accepts, and each way of being damaged. */
#include "containers.h"

#include "formats/safetensors.h"

typedef struct header_case {
    const char *name, *header;
    size_t data_size;
    const char *error; /* part of the message; NULL: it must be accepted */
} header_case;

#define A4 "\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}"
#define ENTRY(dtype, shape, offsets)                                                               \
    "{\"a\":{\"dtype\":" dtype ",\"shape\":" shape ",\"data_offsets\":" offsets "}}"

static const header_case header_cases[] = {
    {"no tensors", "{}", 0, NULL},
    {"one tensor", "{" A4 "}", 4, NULL},
    {"padding", "{" A4 "}      \n\t ", 4, NULL},
    {"metadata", "{\"__metadata__\":{\"format\":\"pt\"}," A4 "}", 4, NULL},
    {"scalar", ENTRY("\"F32\"", "[]", "[0,4]"), 4, NULL},
    {"no elements", ENTRY("\"F32\"", "[3,0,5]", "[0,0]"), 0, NULL},
    {"eight dimensions", ENTRY("\"U8\"", "[1,1,1,1,1,1,1,2]", "[0,2]"), 2, NULL},
    {"four bits", ENTRY("\"F4\"", "[6]", "[0,3]"), 3, NULL},
    {"unknown dtype", ENTRY("\"Q7\"", "[5]", "[0,3]"), 3, NULL},
    {"empty tensor between",
     "{\"b\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[2,4]},\"c\":{\"dtype\":\"U8\","
     "\"shape\":[0],\"data_offsets\":[2,2]},\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":"
     "[0,2]}}",
     4, NULL},

    {"empty header", "", 0, "invalid JSON"},
    {"not JSON", "{\"a\":", 0, "invalid JSON"},
    {"bytes behind the JSON", "{}x", 0, "invalid JSON"},
    {"NUL in a name", "{\"a\\u0000\":1}", 0, "invalid JSON"},
    {"bad UTF-8", "{\"\xff\":1}", 0, "invalid JSON"},
    {"array", "[]", 0, "is an array, not an object"},
    {"string", "\"x\"", 0, "is a string, not an object"},
    {"null", "null", 0, "is null, not an object"},
    {"metadata no object", "{\"__metadata__\":3}", 0, "__metadata__"},
    {"entry no object", "{\"a\":[]}", 0, "\"a\": its entry in the header is not an object"},
    {"duplicate name", "{" A4 "," A4 "}", 4, "duplicate"},
    {"duplicate key", "{\"a\":{\"dtype\":\"U8\",\"dtype\":\"I8\"}}", 4, "duplicate"},
    {"no dtype", "{\"a\":{\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "\"dtype\" is not a string"},
    {"dtype number", ENTRY("32", "[1]", "[0,4]"), 4, "\"dtype\" is not a string"},
    {"no shape", "{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,4]}}", 4, "\"shape\" is not an"},
    {"shape number", ENTRY("\"F32\"", "1", "[0,4]"), 4, "\"shape\" is not an array"},
    {"negative shape", ENTRY("\"F32\"", "[-1]", "[0,4]"), 4, "\"shape\" holds something else"},
    {"real shape", ENTRY("\"F32\"", "[1.0]", "[0,4]"), 4, "\"shape\" holds something else"},
    {"nine dimensions", ENTRY("\"U8\"", "[1,1,1,1,1,1,1,1,1]", "[0,1]"), 1, "9 dimensions"},
    {"no offsets", "{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}", 4, "\"data_offsets\" is not"},
    {"one offset", ENTRY("\"F32\"", "[1]", "[4]"), 4, "\"data_offsets\" is not"},
    {"three offsets", ENTRY("\"F32\"", "[1]", "[0,4,4]"), 4, "\"data_offsets\" is not"},
    {"offset string", ENTRY("\"F32\"", "[1]", "[0,\"4\"]"), 4, "\"data_offsets\" is not"},
    {"negative offset", ENTRY("\"F32\"", "[1]", "[-4,0]"), 4, "[-4, 0] are not 0 <= begin <= end"},
    {"offsets backwards", ENTRY("\"F32\"", "[1]", "[4,0]"), 4, "[4, 0] are not 0 <= begin <= end"},
    {"offset beyond int64", ENTRY("\"F32\"", "[1]", "[0,9223372036854775808]"), 4, "too big"},
    {"offset at int64", ENTRY("\"U8\"", "[9223372036854775807]", "[0,9223372036854775807]"), 4,
     "has only 4 bytes of data"},
    {"data too short", "{" A4 "}", 3, "ends at byte 4 of the data, but the file has only 3"},
    {"data too long", "{" A4 "}", 5, "goes on for 1 bytes after the end of its last tensor"},
    {"data without tensors", "{}", 5, "goes on for 5 bytes"},
    {"span too small", ENTRY("\"F32\"", "[2]", "[0,4]"), 4,
     "takes 8 bytes, but its data_offsets span 4"},
    {"span too large", ENTRY("\"F16\"", "[1]", "[0,4]"), 4,
     "takes 2 bytes, but its data_offsets span 4"},
    {"half a byte", ENTRY("\"F4\"", "[5]", "[0,2]"), 2, "takes 3 bytes"},
    {"product overflows", ENTRY("\"F32\"", "[4294967296,4294967296]", "[0,4]"), 4,
     "product of its shape [4294967296, 4294967296] overflows"},
    {"product overflows to 0", ENTRY("\"U8\"", "[4611686018427387904,4]", "[0,0]"), 0, "overflows"},
    {"size overflows", ENTRY("\"F64\"", "[2305843009213693952]", "[0,0]"), 0, "overflows"},
    {"overlap", "{" A4 ",\"b\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[2,6]}}", 6,
     "\"a\" and \"b\" overlap at byte 2"},
    {"same place", "{" A4 ",\"b\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4,
     "overlap at byte 0"},
    {"gap", "{" A4 ",\"b\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[5,9]}}", 9,
     "a gap before tensor \"b\": bytes 4 to 5"},
    {"gap at the start", ENTRY("\"F32\"", "[1]", "[1,5]"), 5, "a gap before tensor \"a\""},
};

static void headers(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof header_cases / sizeof *header_cases; i++) {
        const header_case *c = &header_cases[i];
        bml_bytes file = container_of(c->header, c->data_size);
        bml_safetensors *st = NULL;
        bml_error err = {0};
        bml_status status = bml_safetensors_parse(file.data, file.length, "x.st", &st, &err);
        bool right = c->error ? status && err.code == status && strstr(err.message, c->error) &&
                                    strstr(err.message, "x.st") && !st
                              : !status && st;
        if (!right)
            fail_msg("%s: status %d, \"%s\"", c->name, status, err.message);
        /* A caller may not want the message. */
        if (c->error)
            assert_int_equal(bml_safetensors_parse(file.data, file.length, "x.st", &st, NULL),
                             status);
        bml_safetensors_close(st);
        free(file.data);
    }
}

static void truncated_everywhere(void **state)
{
    (void)state;
    bml_bytes file = container_of("{" A4 "}", 4);
    for (size_t size = 0; size < file.length; size++) {
        /* Exactly SIZE bytes of memory, so that a sanitizer sees a read behind them. */
        char *copy = malloc(size ? size : 1);
        memcpy(copy, file.data, size);
        bml_safetensors *st = NULL;
        bml_error err = {0};
        bml_status status = bml_safetensors_parse(copy, size, "short", &st, &err);
        check_error(&err, status, BML_ERR_FORMAT, "short");
        free(copy);
    }
    free(file.data);
}

static void header_lengths(void **state)
{
    (void)state;
    static const struct {
        uint64_t length;
        const char *error;
    } cases[] = {
        {1000, "header length in bytes 0 to 7 is 1000, but only 8 bytes follow"},
        {9, "is 9, but only 8 bytes follow"},
        {100000000, "is 100000000, but only 8 bytes follow"},
        {100000001, "is 100000001, more than the 100000000 allowed"},
        {(uint64_t)1 << 63, "is 9223372036854775808, more than the 100000000 allowed"},
        {UINT64_MAX, "is 18446744073709551615, more than"},
        {UINT64_MAX - 7, "more than"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char file[16] = {0};
        memcpy(file, &cases[i].length, 8);
        memset(file + 8, ' ', 8);
        file[8] = '{';
        bml_safetensors *st;
        bml_error err;
        check_error(&err, bml_safetensors_parse(file, 16, "f", &st, &err), BML_ERR_FORMAT,
                    cases[i].error);
    }
}

static void foreign_files(void **state)
{
    (void)state;
    static const struct {
        const char *data;
        size_t size;
        bml_status status;
        const char *error;
    } cases[] = {
        {"", 0, BML_ERR_FORMAT, "is empty"},
        {"1234567", 7, BML_ERR_FORMAT, "is 7 bytes long"},
        {"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", 56, BML_ERR_FORMAT,
         "git-LFS pointer"},
        {"PK\003\004\0\0\010\010\0\0\0\0", 12, BML_ERR_UNSUPPORTED, "PyTorch zip checkpoint"},
        {"PK\003\004", 4, BML_ERR_UNSUPPORTED, "save_pretrained"},
        {"\x80\002\x8a\nl\xfc\x9c\x46\xf9 j\xa8P", 13, BML_ERR_UNSUPPORTED,
         "PyTorch pickle checkpoint"},
        {"GGUF\003\0\0\0\0\0\0\0", 12, BML_ERR_UNSUPPORTED, "GGUF"},
        {"\x89HDF\r\n\x1a\n\0\0", 10, BML_ERR_UNSUPPORTED, "HDF5"},
        {"<!DOCTYPE html><html>", 21, BML_ERR_FORMAT, "HTML"},
        {"\n <HTML>", 8, BML_ERR_FORMAT, "HTML"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        bml_safetensors *st;
        bml_error err;
        check_error(&err, bml_safetensors_parse(cases[i].data, cases[i].size, "f.st", &st, &err),
                    cases[i].status, cases[i].error);
    }
    /* A header of 640 bytes begins like a pickle, and is none. */
    char header[641];
    memset(header, ' ', 640);
    memcpy(header, "{}", 2);
    header[640] = 0;
    bml_bytes file = container_of(header, 0);
    assert_int_equal((unsigned char)file.data[0], 0x80);
    assert_int_equal(file.data[1], 2);
    bml_safetensors *st;
    assert_int_equal(bml_safetensors_parse(file.data, file.length, "f", &st, NULL), BML_OK);
    bml_safetensors_close(st);
    free(file.data);
}

static void content(void **state)
{
    (void)state;
    container_builder b = {0};
    memcpy(add_tensor(&b, "z", "I16", "[2,1]", 4), "abcd", 4);
    memcpy(add_tensor(&b, "m.weight", "F64", "[1]", 8), "12345678", 8);
    memcpy(add_tensor(&b, "a", "a dtype with a long name", "[]", 3), "xyz", 3);
    bml_bytes file = finish_container(&b, 0);
    bml_safetensors *st;
    assert_int_equal(bml_safetensors_parse(file.data, file.length, "origin", &st, NULL), BML_OK);
    assert_int_equal(bml_safetensors_count(st), 3);
    assert_string_equal(bml_safetensors_at(st, 0)->name, "a");
    assert_string_equal(bml_safetensors_at(st, 2)->name, "z");
    const bml_tensor *t = bml_safetensors_find(st, "z");
    assert_non_null(t);
    assert_string_equal(t->dtype, "I16");
    assert_string_equal(t->file, "origin");
    assert_int_equal(t->n_dims, 2);
    assert_int_equal(t->shape[0], 2);
    assert_int_equal(t->shape[1], 1);
    assert_int_equal(t->bytes, 4);
    assert_memory_equal(t->data, "abcd", 4);
    assert_memory_equal(bml_safetensors_find(st, "m.weight")->data, "12345678", 8);
    assert_string_equal(bml_safetensors_find(st, "a")->dtype, "a dtype with a ");
    assert_null(bml_safetensors_find(st, "m"));
    assert_null(bml_safetensors_find(st, ""));
    bml_safetensors_close(st);
    bml_safetensors_close(NULL);
    free(file.data);
}

static void shape_text(void **state)
{
    (void)state;
    int64_t shape[BML_MAX_DIMS] = {1, INT64_MAX, 3, 4, 5, 6, 7, INT64_MAX};
    char text[200];
    assert_string_equal(bml_shape_text(shape, 0, text, sizeof text), "[]");
    assert_string_equal(bml_shape_text(shape, 1, text, sizeof text), "[1]");
    assert_string_equal(bml_shape_text(shape, 2, text, sizeof text), "[1, 9223372036854775807]");
    for (size_t size = 1; size < 60; size++) {
        char *small = malloc(size);
        assert_true(strlen(bml_shape_text(shape, 8, small, size)) < size);
        free(small);
    }
}

/* ---- files and shards ------------------------------------------------------------------------*/

static bml_status open_at(const char *directory, const char *name, bml_safetensors **st,
                          bml_error *err)
{
    char *path = bml_format("%s/%s", directory, name);
    bml_status status = bml_safetensors_open(path, st, err);
    free(path);
    return status;
}

static void put_one(const char *directory, const char *file, const char *tensor, char content_byte)
{
    container_builder b = {0};
    *add_tensor(&b, tensor, "U8", "[1]", 1) = content_byte;
    bml_bytes bytes = finish_container(&b, 0);
    put_file(directory, file, bytes.data, bytes.length);
    free(bytes.data);
}

static void files(void **state)
{
    (void)state;
    char *dir = make_temp();
    bml_safetensors *st;
    bml_error err;
    check_error(&err, open_at(dir, "none.safetensors", &st, &err), BML_ERR_IO,
                "none.safetensors: cannot open");
    check_error(&err, bml_safetensors_open(dir, &st, &err), BML_ERR_IO, "not a regular file");
    put_text(dir, "empty.safetensors", "");
    check_error(&err, open_at(dir, "empty.safetensors", &st, &err), BML_ERR_FORMAT, "is empty");
    put_one(dir, "one.safetensors", "t", 'x');
    assert_int_equal(open_at(dir, "one.safetensors", &st, NULL), BML_OK);
    assert_memory_equal(bml_safetensors_find(st, "t")->data, "x", 1);
    bml_safetensors_close(st);
    remove_tree(dir);
}

static void shards(void **state)
{
    (void)state;
    char *dir = make_temp();
    put_one(dir, "s1.safetensors", "a", '1');
    put_one(dir, "s2.safetensors", "b", '2');
    put_one(dir, "s3.safetensors", "a", '3');
    put_text(dir, "s4.safetensors", "1234567");
    static const struct {
        const char *index;
        bml_status status;
        const char *error;
    } cases[] = {
        {"{\"metadata\":{},\"weight_map\":{\"a\":\"s1.safetensors\",\"b\":\"s2.safetensors\"}}",
         BML_OK, ""},
        {"", BML_ERR_FORMAT, "invalid JSON"},
        {"[]", BML_ERR_FORMAT, "is an array, not an object"},
        {"{}", BML_ERR_FORMAT, "no \"weight_map\""},
        {"{\"weight_map\":[]}", BML_ERR_FORMAT, "no \"weight_map\""},
        {"{\"weight_map\":{}}", BML_ERR_FORMAT, "no \"weight_map\""},
        {"{\"weight_map\":{\"a\":1}}", BML_ERR_FORMAT, "file of tensor \"a\" is not a string"},
        {"{\"weight_map\":{\"a\":\"s1.safetensors\",\"a\":\"s1.safetensors\"}}", BML_ERR_FORMAT,
         "duplicate"},
        {"{\"weight_map\":{\"a\":\"../x\"}}", BML_ERR_FORMAT, "\"../x\", which is not the plain"},
        {"{\"weight_map\":{\"a\":\"/etc/passwd\"}}", BML_ERR_FORMAT, "not the plain name"},
        {"{\"weight_map\":{\"a\":\"sub/x\"}}", BML_ERR_FORMAT, "not the plain name"},
        {"{\"weight_map\":{\"a\":\"..\"}}", BML_ERR_FORMAT, "not the plain name"},
        {"{\"weight_map\":{\"a\":\".\"}}", BML_ERR_FORMAT, "not the plain name"},
        {"{\"weight_map\":{\"a\":\"\"}}", BML_ERR_FORMAT, "not the plain name"},
        {"{\"weight_map\":{\"a\":\"s9.safetensors\"}}", BML_ERR_IO,
         "index.json names the shard \"s9.safetensors\": "},
        {"{\"weight_map\":{\"a\":\"s4.safetensors\"}}", BML_ERR_FORMAT, "is 7 bytes long"},
        {"{\"weight_map\":{\"a\":\"s1.safetensors\",\"c\":\"s2.safetensors\"}}", BML_ERR_FORMAT,
         "tensor \"c\" is not in its shard \"s2.safetensors\""},
        {"{\"weight_map\":{\"a\":\"s2.safetensors\",\"b\":\"s1.safetensors\"}}", BML_ERR_FORMAT,
         "is not in its shard"},
        {"{\"weight_map\":{\"a\":\"s1.safetensors\",\"b\":\"s3.safetensors\"}}", BML_ERR_FORMAT,
         "tensor \"a\" is in two files"},
        {"version https://git-lfs.github.com/spec/v1", BML_ERR_FORMAT, "git-LFS pointer"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        put_text(dir, "model.safetensors.index.json", cases[i].index);
        bml_safetensors *st = NULL;
        bml_error err = {0};
        bml_status status = open_at(dir, "model.safetensors.index.json", &st, &err);
        if (cases[i].status) {
            check_error(&err, status, cases[i].status, cases[i].error);
            assert_null(st);
            continue;
        }
        assert_int_equal(status, BML_OK);
        assert_int_equal(bml_safetensors_count(st), 2);
        assert_memory_equal(bml_safetensors_find(st, "b")->data, "2", 1);
        assert_non_null(strstr(bml_safetensors_find(st, "b")->file, "s2.safetensors"));
        bml_safetensors_close(st);
    }
    remove_tree(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(headers),        cmocka_unit_test(truncated_everywhere),
        cmocka_unit_test(header_lengths), cmocka_unit_test(foreign_files),
        cmocka_unit_test(content),        cmocka_unit_test(shape_text),
        cmocka_unit_test(files),          cmocka_unit_test(shards),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
