/* tokenizer.json: any bytes load or fail cleanly, and what loads gives back what it encodes. */
#include "tokenizer/tokenizer.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char text[] = "ab <|endoftext|>  don't\n\xe5\xad\x97\xff<x> ab";
    bml_error err;
    bml_tokenizer *t;
    if (bml_tokenizer_parse_json((const char *)data, size, "fuzz", &t, &err)) {
        if (strchr(err.message, '\n') || !err.message[0])
            abort();
        return 0;
    }
    for (int special = 0; special < 2; special++) {
        int32_t *ids;
        size_t n, length;
        char *back;
        if (bml_tokenize(t, text, sizeof text - 1, special, &ids, &n, &err))
            continue; /* a byte without a token */
        if (bml_detokenize(t, ids, n, &back, &length, &err))
            abort();
        bml_free(back);
        bml_free(ids);
    }
    bml_tokenizer_free(t);
    return 0;
}
