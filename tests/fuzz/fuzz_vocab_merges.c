/* vocab.json and merges.txt in one input, separated by a NUL. */
#include "tokenizer/tokenizer.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const char *vocab = (const char *)data;
    const char *split = size ? memchr(data, 0, size) : NULL;
    if (!split)
        return 0;
    size_t vocab_length = (size_t)(split - vocab);
    bml_error err;
    bml_tokenizer *t;
    if (bml_tokenizer_parse_files(vocab, vocab_length, split + 1, size - vocab_length - 1, "fuzz",
                                  &t, &err)) {
        if (strchr(err.message, '\n') || !err.message[0])
            abort();
        return 0;
    }
    int32_t *ids;
    size_t n, length;
    char *back;
    /* Without added tokens what is encoded comes back, whatever the merges. */
    if (!bml_tokenize(t, vocab, vocab_length, false, &ids, &n, &err)) {
        if (bml_detokenize(t, ids, n, &back, &length, &err) || length != vocab_length ||
            memcmp(back, vocab, length) != 0)
            abort();
        bml_free(back);
        bml_free(ids);
    }
    bml_tokenizer_free(t);
    return 0;
}
