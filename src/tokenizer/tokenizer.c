#include "tokenizer/tokenizer.h"

#include "base/error.h"
#include "base/file.h"
#include "tokenizer/builder.h"
#include "tokenizer/pretokenize.h"

#include <stdlib.h>
#include <string.h>

/* ---- loading ----------------------------------------------------------------------------------*/

bml_status bml_tokenizer_load(const char *name, bml_tokenizer **tokenizer, bml_error *err)
{
    char *path;
    bml_status status = bml_model_find(name, &path, err);
    if (status)
        return status;
    if (!bml_path_is_directory(path)) { /* a checkpoint: the tokenizer lies beside it */
        char *directory = bml_path_directory(path);
        free(path);
        if (!directory)
            return bml_fail_memory(err, 1, "a path");
        path = directory;
    }
    bml_tokenizer *loaded = NULL;
    status = bml_tokenizer_load_directory(path, &loaded, err);
    if (!status && !loaded)
        status = bml_fail(err, BML_ERR_IO,
                          "%s: has no tokenizer: neither tokenizer.json nor vocab.json and "
                          "merges.txt are there",
                          path);
    if (!status)
        *tokenizer = loaded;
    free(path);
    return status;
}

void bml_tokenizer_free(bml_tokenizer *tokenizer)
{
    if (!tokenizer)
        return;
    for (size_t i = 0; i < tokenizer->n_added; i++)
        free(tokenizer->added[i].content);
    free(tokenizer->added);
    bml_added_set_clear(&tokenizer->first);
    bml_added_set_clear(&tokenizer->second);
    bml_bpe_clear(&tokenizer->bpe);
    free(tokenizer);
}

/* ---- text to ids ------------------------------------------------------------------------------*/

typedef struct encoder {
    const bml_tokenizer *tokenizer;
    bool parse_special;
    int32_t *ids;
    size_t n_ids, capacity;
    bml_bpe_work work;
    bml_error *err;
} encoder;

static bml_status reserve(encoder *e, size_t more)
{
    size_t needed, capacity;
    if (!bml_add_size(e->n_ids, more, &needed) || !bml_mul_size(needed, 2, &capacity))
        return bml_fail_memory(e->err, SIZE_MAX, "token ids");
    if (needed <= e->capacity)
        return BML_OK;
    int32_t *grown = bml_realloc(e->ids, capacity, sizeof *grown);
    if (!grown)
        return bml_fail_memory(e->err, capacity * sizeof *grown, "token ids");
    e->ids = grown;
    e->capacity = capacity;
    return BML_OK;
}

/* Text without added tokens, cut into pieces. */
static bml_status encode_pieces(encoder *e, const uint8_t *text, size_t length)
{
    const bml_bpe *bpe = &e->tokenizer->bpe;
    const uint8_t *end = text + length;
    while (text < end) {
        size_t rest = (size_t)(end - text), n = rest;
        if (!e->tokenizer->whole_text)
            n = bml_pretokenize(text, rest);
        /* A piece gives at most as many ids as it has bytes. */
        if (e->capacity - e->n_ids < n) {
            bml_status status = reserve(e, n);
            if (status)
                return status;
        }
        int32_t id = bml_bpe_find(bpe, text, n, rest >= 16);
        if (id >= 0) {
            e->ids[e->n_ids++] = id;
        } else {
            size_t n_out;
            bml_status status =
                bml_bpe_merge(bpe, text, n, e->ids + e->n_ids, &n_out, &e->work, e->err);
            if (status)
                return status;
            e->n_ids += n_out;
        }
        text += n;
    }
    return BML_OK;
}

static bml_status encode_plain(encoder *e, const uint8_t *text, size_t length)
{
    if (!e->tokenizer->add_prefix_space || text[0] == ' ')
        return encode_pieces(e, text, length);
    size_t size;
    if (!bml_add_size(length, 1, &size))
        return bml_fail_memory(e->err, SIZE_MAX, "the text");
    uint8_t *prefixed = malloc(size);
    if (!prefixed)
        return bml_fail_memory(e->err, size, "the text");
    prefixed[0] = ' ';
    memcpy(prefixed + 1, text, length);
    bml_status status = encode_pieces(e, prefixed, size);
    free(prefixed);
    return status;
}

/* Takes the added tokens out of a text, one set after the other, and encodes what is between. */
static bml_status encode_text(encoder *e, int pass, const uint8_t *text, size_t length)
{
    if (length == 0)
        return BML_OK;
    if (pass == 2)
        return encode_plain(e, text, length);
    const bml_added_set *set = pass == 0 ? &e->tokenizer->first : &e->tokenizer->second;
    bml_added_walk walk = {.text = text, .length = length};
    bml_status status = BML_OK;
    while (!status) {
        size_t before = walk.done, start, stop;
        int32_t id;
        if (!bml_added_next(set, &walk, e->parse_special, &id, &start, &stop))
            return encode_text(e, pass + 1, text + before, length - before);
        if (start > before)
            status = encode_text(e, pass + 1, text + before, start - before);
        if (!status)
            status = reserve(e, 1);
        if (!status)
            e->ids[e->n_ids++] = id;
    }
    return status;
}

bml_status bml_tokenize(const bml_tokenizer *tokenizer, const char *text, size_t length,
                        bool parse_special, int32_t **ids, size_t *n_ids, bml_error *err)
{
    encoder e = {.tokenizer = tokenizer, .parse_special = parse_special, .err = err};
    bml_status status = reserve(&e, length / 8 + 16); /* doubled: for English that is enough */
    if (!status)
        status = encode_text(&e, 0, (const uint8_t *)text, length);
    bml_bpe_work_free(&e.work);
    if (status) {
        free(e.ids);
        return status;
    }
    int32_t *fitted = bml_realloc(e.ids, e.n_ids, sizeof *fitted);
    *ids = fitted ? fitted : e.ids;
    *n_ids = e.n_ids;
    return BML_OK;
}

/* ---- ids to text ------------------------------------------------------------------------------*/

int bml_tokenizer_size(const bml_tokenizer *tokenizer)
{
    return tokenizer->bpe.n_ids;
}

const char *bml_token_bytes(const bml_tokenizer *tokenizer, int32_t id, size_t *length)
{
    const bml_bpe *bpe = &tokenizer->bpe;
    if (id < 0 || id >= bpe->n_ids || bpe->spans[id].offset == UINT32_MAX)
        return NULL;
    if (length)
        *length = bpe->spans[id].length;
    return bpe->bytes + bpe->spans[id].offset;
}

bml_status bml_detokenize(const bml_tokenizer *tokenizer, const int32_t *ids, size_t n_ids,
                          char **text, size_t *length, bml_error *err)
{
    size_t total = 1;
    for (size_t i = 0; i < n_ids; i++) {
        size_t n;
        if (!bml_token_bytes(tokenizer, ids[i], &n))
            return bml_fail(err, BML_ERR_ARGUMENT,
                            "id %d at index %zu is not a token: the ids of this tokenizer are 0 "
                            "to %d",
                            ids[i], i, tokenizer->bpe.n_ids - 1);
        if (!bml_add_size(total, n, &total))
            return bml_fail_memory(err, SIZE_MAX, "the text");
    }
    char *out = malloc(total);
    if (!out)
        return bml_fail_memory(err, total, "the text");
    size_t done = 0;
    for (size_t i = 0; i < n_ids; i++) {
        size_t n;
        const char *bytes = bml_token_bytes(tokenizer, ids[i], &n);
        memcpy(out + done, bytes, n);
        done += n;
    }
    out[done] = 0;
    *text = out;
    *length = done;
    return BML_OK;
}
