/*
 * Text to ids to text: every text comes back byte for byte. The tokenizer is a small one with all
 * 256 bytes, so that the target needs no file; its merges make pieces of every length, and the
 * bytes 0xfe and 0xff, with their neighbours, exercise invalid UTF-8.
 */
#include "tokenizer/tokenizer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* What the name of a token writes for a byte: GPT-2's alphabet, as JSON. */
static size_t put_byte(char *out, int byte)
{
    static int others;
    bool printable = (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte != 0xad);
    int c = printable ? byte : 0x100 + others++;
    return (size_t)sprintf(out, "\"\\u%04x\":%d,", (unsigned)c, byte);
}

static bml_tokenizer *make_tokenizer(void)
{
    static char vocab[8192];
    size_t used = 1;
    vocab[0] = '{';
    for (int byte = 0; byte < 256; byte++)
        used += put_byte(vocab + used, byte);
    snprintf(vocab + used, sizeof vocab - used,
             "\"aa\":256,\"aaaa\":257,\"th\":258,\"the\":259,\"\\u0120the\":260,"
             "\"\\u0120\\u0120\":261,\"in\":262,\"ing\":263,\"11\":264,\"ab\":265,\"aba\":266,"
             "\"\\u00e5\\u0143\":267,\"\\u010a\\u010a\":268,\"<|endoftext|>\":269}");
    static const char merges[] =
        "a a\naa aa\nt h\nth e\n\xc4\xa0 the\n\xc4\xa0 \xc4\xa0\ni n\nin g\n1 1\na b\nab a\n"
        "\xc3\xa5 \xc5\x83\n\xc4\x8a \xc4\x8a\n";
    bml_error err;
    bml_tokenizer *t;
    if (bml_tokenizer_parse_files(vocab, strlen(vocab), merges, sizeof merges - 1, "fuzz", &t,
                                  &err)) {
        fprintf(stderr, "%s\n", err.message);
        abort();
    }
    return t;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static bml_tokenizer *t; /* lives as long as the process */
    if (!t)
        t = make_tokenizer();
    for (int special = 0; special < 2; special++) {
        int32_t *ids;
        size_t n, length;
        char *back;
        bml_error err;
        if (bml_tokenize(t, (const char *)data, size, special, &ids, &n, &err) ||
            bml_detokenize(t, ids, n, &back, &length, &err))
            abort();
        if (length != size || (size && memcmp(back, data, size) != 0))
            abort();
        if (bml_utf8_complete(back, length) > length ||
            length - bml_utf8_complete(back, length) > 3)
            abort();
        bml_free(back);
        bml_free(ids);
    }
    return 0;
}
