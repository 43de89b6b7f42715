/* Error messages: one line, valid UTF-8, where and why even around a name without end. */
#include "base/error.h"
#include "base/utf8.h"
#include "testing.h"

#include <stdlib.h>
#include <string.h>

static void clean_text_stays(void **state)
{
    (void)state;
    bml_error err;
    const char *text = "\xc3\xa9t\xc3\xa9 \xe6\x97\xa5 \xf0\x9f\x99\x82 \xef\xbf\xbd \xc2\xa0 \\";
    assert_int_equal(bml_fail(&err, BML_ERR_IO, "%s", text), BML_ERR_IO);
    assert_string_equal(err.message, text);
    assert_int_equal(err.code, BML_ERR_IO);
    assert_int_equal(bml_fail(NULL, BML_ERR_FORMAT, "%s", text), BML_ERR_FORMAT);
}

static void one_line_whatever_a_name_holds(void **state)
{
    (void)state;
    static const struct {
        const char *name, *shown;
    } cases[] = {
        {"a\nb\r\tc", "a?b??c"},
        {"\x1b[31m\x7f", "?[31m?"},
        {"\xc2\x85 NEL, \xc2\x9b CSI", "?? NEL, ?? CSI"},
        {"line\xe2\x80\xa8paragraph\xe2\x80\xa9", "line???paragraph???"},
        {"\xff\xfe, \xc3, \xed\xa0\x80, \xc0\x80", "??, ?, ???, ??"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        bml_error err;
        bml_fail(&err, BML_ERR_FORMAT, "%s", cases[i].name);
        assert_string_equal(err.message, cases[i].shown);
    }
}

/* N copies of CHARACTER. */
static char *repeated(const char *character, size_t n)
{
    size_t length = strlen(character);
    char *text = malloc(n * length + 1);
    assert_non_null(text);
    for (size_t i = 0; i < n; i++)
        memcpy(text + i * length, character, length);
    text[n * length] = 0;
    return text;
}

static void a_long_name_hides_neither_file_nor_cause(void **state)
{
    (void)state;
    const size_t lengths[] = {1, 300, 330, 480, 500, 505, 510, 520, 1000, 1024, 5000, 1000000};
    const char *const characters[] = {"x", "\xc3\xa9", "\xe6\x97\xa5", "\xf0\x9f\x99\x82"};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        for (size_t k = 0; k < sizeof characters / sizeof *characters; k++) {
            bml_error err;
            char *name = repeated(characters[k], lengths[i]);
            bml_fail(&err, BML_ERR_FORMAT, "m.safetensors: tensor \"%s\" is missing", name);
            size_t length = strlen(err.message);
            assert_true(length < sizeof err.message);
            assert_non_null(strstr(err.message, "m.safetensors: tensor \""));
            assert_string_equal(err.message + length - 12, "\" is missing");
            bml_error_prefix(&err, "index.json");
            assert_memory_equal(err.message, "index.json: m.safetensors", 25);
            length = strlen(err.message);
            assert_string_equal(err.message + length - 12, "\" is missing");
            for (const uint8_t *p = (uint8_t *)err.message, *end = p + length; p < end;) {
                uint32_t c;
                size_t n = bml_utf8_decode(p, end, &c);
                assert_false(c == 0xfffd);
                p += n;
            }
            free(name);
        }
    }
}

static void what_just_fits_is_whole(void **state)
{
    (void)state;
    for (size_t n = 1015; n <= 1030; n++) {
        bml_error err;
        char *name = repeated("x", n);
        bml_fail(&err, BML_ERR_IO, "%s", name);
        if (n < sizeof err.message)
            assert_string_equal(err.message, name);
        else
            assert_int_equal(strlen(err.message), sizeof err.message - 1);
        free(name);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(clean_text_stays),
        cmocka_unit_test(one_line_whatever_a_name_holds),
        cmocka_unit_test(a_long_name_hides_neither_file_nor_cause),
        cmocka_unit_test(what_just_fits_is_whole),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
