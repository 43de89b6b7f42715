/* The pre-tokeniser against a slow, literal reading of GPT-2's pattern, and its helpers. */
#include "testing.h"

#include "base/utf8.h"
#include "tokenizer/pretokenize.h"
#include "tokenizer/tokenizer.h"
#include "tokenizer/unicode.h"

enum { MAX_CHARS = 64 };

/* ---- the pattern, alternative by alternative, over decoded characters -------------------------*/

typedef struct chars {
    uint32_t code[MAX_CHARS];
    size_t offset[MAX_CHARS + 1]; /* in bytes */
    size_t n;
} chars;

static unsigned class_of(uint32_t c)
{
    return bml_unicode_lookup(c) & BML_UNICODE_CLASS;
}

static size_t run_from(const chars *t, size_t at, unsigned class)
{
    size_t end = at;
    while (end < t->n && class_of(t->code[end]) == class)
        end++;
    return end;
}

/* The end of the match at AT, in characters. */
static size_t match(const chars *t, size_t at)
{
    static const char *const contractions[] = {"'s", "'t", "'re", "'ve", "'m", "'ll", "'d"};
    for (size_t k = 0; k < 7; k++) {
        size_t i = 0;
        while (contractions[k][i] && at + i < t->n &&
               t->code[at + i] == (uint8_t)contractions[k][i])
            i++;
        if (!contractions[k][i])
            return at + i;
    }
    static const unsigned runs[] = {BML_UNICODE_LETTER, BML_UNICODE_NUMBER, BML_UNICODE_OTHER};
    for (size_t k = 0; k < 3; k++)
        for (size_t space = t->code[at] == ' '; space != SIZE_MAX; space--) {
            size_t end = run_from(t, at + space, runs[k]);
            if (end > at + space)
                return end;
        }
    size_t end = run_from(t, at, BML_UNICODE_SPACE);
    if (end < t->n && end - at > 1)
        return end - 1; /* \s+(?!\S), after giving back one */
    return end;         /* the same at the end of the text, or \s+ */
}

static void check(const uint8_t *text, size_t length)
{
    chars t = {.n = 0};
    size_t done = 0;
    while (done < length) {
        assert_true(t.n < MAX_CHARS);
        t.offset[t.n] = done;
        done += bml_utf8_decode(text + done, text + length, &t.code[t.n++]);
    }
    t.offset[t.n] = length;
    size_t at = 0;
    for (done = 0; done < length;) {
        size_t n = bml_pretokenize(text + done, length - done);
        at = match(&t, at);
        assert_true(n >= 1 && n <= length - done);
        assert_int_equal(done + n, t.offset[at]);
        done += n;
    }
    assert_int_equal(at, t.n);
}

static void agrees_with_the_pattern(void **state)
{
    (void)state;
    static const char *const parts[] = {" ",
                                        " ",
                                        "\n",
                                        "\t",
                                        "\xc2\xa0",
                                        "\xe3\x80\x80",
                                        "\xc2\x85",
                                        "a",
                                        "b",
                                        "s",
                                        "t",
                                        "re",
                                        "ve",
                                        "ll",
                                        "m",
                                        "d",
                                        "'",
                                        "'",
                                        "1",
                                        "23",
                                        "\xc2\xbd",
                                        ".",
                                        "!?",
                                        "\xc3\xa9",
                                        "\xe5\xad\x97",
                                        "\xcc\x81",
                                        "\xf0\x9f\x98\x80",
                                        "\xff",
                                        "\x80",
                                        "\xe2\x80",
                                        "\xed\xa0\x80",
                                        "\xc0\xaf",
                                        "\xf4\x90\x80\x80",
                                        "\xf0\x9f",
                                        "\xe2\x80\xa8"};
    uint64_t seed = 1;
    for (int round = 0; round < 200000; round++) {
        uint8_t text[MAX_CHARS];
        size_t length = 0, n = 1 + test_random(&seed) % 12;
        for (size_t i = 0; i < n; i++) {
            const char *part = parts[test_random(&seed) % (sizeof parts / sizeof *parts)];
            memcpy(text + length, part, strlen(part));
            length += strlen(part);
        }
        if (test_random(&seed) % 8 == 0)
            text[test_random(&seed) % length] = 0;
        /* Exactly as much memory as text, so that a sanitizer sees a byte read behind it. */
        uint8_t *exact = malloc(length);
        memcpy(exact, text, length);
        check(exact, length);
        free(exact);
    }
}

static void random_bytes(void **state)
{
    (void)state;
    uint64_t seed = 2;
    for (int round = 0; round < 100000; round++) {
        uint8_t text[24];
        size_t length = 1 + test_random(&seed) % sizeof text;
        for (size_t i = 0; i < length; i++)
            text[i] = (uint8_t)test_random(&seed);
        check(text, length);
    }
}

/* PIECES are what TEXT is cut into, joined by "|". */
static void expect(const char *text, const char *pieces)
{
    char joined[256] = "";
    size_t length = strlen(text), out = 0;
    for (size_t done = 0; done < length;) {
        size_t n = bml_pretokenize((const uint8_t *)text + done, length - done);
        if (done)
            joined[out++] = '|';
        memcpy(joined + out, text + done, n);
        out += n;
        done += n;
    }
    joined[out] = 0;
    assert_string_equal(joined, pieces);
}

static void known_pieces(void **state)
{
    (void)state;
    expect("Hello world", "Hello| world");
    expect("  two", " | two");
    expect("\n\nx", "\n|\n|x");
    expect("a \n b", "a| \n| b");
    expect("trailing  ", "trailing|  ");
    expect("\tx", "\t|x");
    expect(" \tx", " |\t|x");
    expect("don't DON'T", "don|'t| DON|'|T");
    expect("we'll've", "we|'ll|'ve");
    expect("''s 's", "''|s| '|s");
    expect("'r'v'l", "'|r|'|v|'|l");
    expect("abc123 45", "abc|123| 45");
    expect("x=1;", "x|=|1|;");
    expect("a\xc2\xa0"
           "b",
           "a|\xc2\xa0|b");                                 /* NBSP is white space, not the space */
    expect("e\xcc\x81t", "e|\xcc\x81|t");                   /* a combining mark is no letter */
    expect("\xc2\xbd\xe2\x85\xa3", "\xc2\xbd\xe2\x85\xa3"); /* one half, Roman four: \p{N} */
    expect("a\xff\xfe"
           "b",
           "a|\xff\xfe|b"); /* invalid bytes are neither */
    expect(" \xe2\x80", " \xe2\x80");
}

/* ---- the table and the decoder ----------------------------------------------------------------*/

static void unicode_16(void **state)
{
    (void)state;
    size_t counts[4] = {0}, words = 0;
    for (uint32_t c = 0; c < 0x110000; c++) {
        counts[class_of(c)]++;
        words += (bml_unicode_lookup(c) & BML_UNICODE_WORD) != 0;
    }
    /* As counted in Unicode 16.0.0's own files. */
    assert_int_equal(counts[BML_UNICODE_LETTER], 141028);
    assert_int_equal(counts[BML_UNICODE_NUMBER], 1911);
    assert_int_equal(counts[BML_UNICODE_SPACE], 25);
    assert_int_equal(words, 144667);
    assert_int_equal(class_of(0x1c89), BML_UNICODE_LETTER);  /* new in 16 */
    assert_int_equal(class_of(0x10d40), BML_UNICODE_NUMBER); /* new in 16 */
    assert_int_equal(class_of(0x88f), BML_UNICODE_OTHER);    /* a letter from 17 on */
    assert_int_equal(class_of(0x180e), BML_UNICODE_OTHER);   /* was white space before 6.3 */
    assert_int_equal(class_of(0x200b), BML_UNICODE_OTHER);
    assert_int_equal(class_of(0xd800), BML_UNICODE_OTHER);
    assert_int_equal(class_of(0x10ffff), BML_UNICODE_OTHER);
}

static void decodes_every_code_point(void **state)
{
    (void)state;
    for (uint32_t c = 0; c < 0x110000; c++) {
        uint8_t b[4];
        size_t n = 0;
        if (c < 0x80) {
            b[n++] = (uint8_t)c;
        } else if (c < 0x800) {
            b[n++] = (uint8_t)(0xc0 | c >> 6);
        } else if (c < 0x10000) {
            b[n++] = (uint8_t)(0xe0 | c >> 12);
            b[n++] = (uint8_t)(0x80 | (c >> 6 & 63));
        } else {
            b[n++] = (uint8_t)(0xf0 | c >> 18);
            b[n++] = (uint8_t)(0x80 | (c >> 12 & 63));
            b[n++] = (uint8_t)(0x80 | (c >> 6 & 63));
        }
        if (c >= 0x80)
            b[n++] = (uint8_t)(0x80 | (c & 63));
        uint32_t forward, back;
        size_t n_forward = bml_utf8_decode(b, b + n, &forward);
        size_t n_back = bml_utf8_decode_back(b, b + n, &back);
        bool surrogate = c >= 0xd800 && c < 0xe000;
        assert_int_equal(n_forward, surrogate ? 1 : n);
        assert_int_equal(forward, surrogate ? 0xfffd : c);
        assert_int_equal(n_back, surrogate ? 1 : n);
        assert_int_equal(back, surrogate ? 0xfffd : c);
        for (size_t cut = 1; cut < n; cut++) {
            assert_int_equal(bml_utf8_decode(b, b + cut, &forward), 1);
            assert_int_equal(forward, 0xfffd);
            /* ED A0 is the start of nothing, so a surrogate is finished as it is. */
            assert_int_equal(bml_utf8_complete((char *)b, cut), surrogate && cut > 1 ? cut : 0);
        }
        assert_int_equal(bml_utf8_complete((char *)b, n), n);
    }
}

static void complete_prefixes(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        size_t complete;
    } cases[] = {{"", 0},
                 {"abc", 3},
                 {"a\xc3", 1},
                 {"a\xc3\xa9", 3},
                 {"a\xe2\x82", 1},
                 {"a\xf0\x9f\x98", 1},
                 {"\xf0\x9f\x98\x80", 4},
                 {"\x80", 1},
                 {"a\x80\x80", 3},
                 {"\xc0", 1},     /* never a lead byte */
                 {"\xe0\x80", 2}, /* overlong: no character starts so */
                 {"\xf4\x90", 2}, /* above U+10FFFF */
                 {"\xf5", 1},
                 {"\xe2\x82\xe2", 2}, /* only the last sequence can still be finished */
                 {"\xc3\xa9\xc3", 2}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        assert_int_equal(bml_utf8_complete(cases[i].text, strlen(cases[i].text)),
                         cases[i].complete);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(known_pieces),      cmocka_unit_test(agrees_with_the_pattern),
        cmocka_unit_test(random_bytes),      cmocka_unit_test(unicode_16),
        cmocka_unit_test(complete_prefixes), cmocka_unit_test(decodes_every_code_point),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
