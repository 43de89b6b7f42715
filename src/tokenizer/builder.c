#include "tokenizer/builder.h"

#include "base/error.h"
#include "base/utf8.h"
#include "tokenizer/hash.h"

#include <stdlib.h>
#include <string.h>

/* At most this much of a token goes into a message. */
static int shown(size_t length)
{
    return length < 48 ? (int)length : 48;
}

/* ---- the byte alphabet ------------------------------------------------------------------------*/

/*
 * The byte that a character of a token's name stands for, or -1. GPT-2 writes printable Latin-1
 * bytes as themselves and the other 68, in order, as U+0100 and on: the space is U+0120, "Ġ".
 */
static int alphabet_byte(uint32_t c)
{
    if ((c >= 0x21 && c <= 0x7e) || (c >= 0xa1 && c <= 0xac) || (c >= 0xae && c <= 0xff))
        return (int)c;
    if (c < 0x100 || c >= 0x100 + 68)
        return -1;
    c -= 0x100;
    return (int)(c <= 0x20 ? c : c < 67 ? c - 33 + 0x7f : 0xad);
}

/* Writes the bytes that NAME stands for to OUT (LENGTH bytes suffice), or NAME itself if it has a
 * character that stands for none. */
static size_t name_bytes(const char *name, size_t length, char *out, bool *is_bytes)
{
    const uint8_t *p = (const uint8_t *)name, *end = p + length;
    size_t n = 0;
    *is_bytes = true;
    while (p < end) {
        uint32_t c;
        p += bml_utf8_decode(p, end, &c);
        int byte = alphabet_byte(c);
        if (byte < 0) {
            *is_bytes = false;
            memcpy(out, name, length);
            return length;
        }
        out[n++] = (char)byte;
    }
    return n;
}

/* ---- the vocabulary ---------------------------------------------------------------------------*/

/* Reads the vocabulary; adds to *N_BYTES the length of all names, raises *MAX_ID to the largest id.
 */
static bml_status read_entries(bml_builder *b, const char *file, const json_t *vocab,
                               size_t *n_bytes, int32_t *max_id, bml_error *err)
{
    size_t n = json_object_size(vocab);
    if (n == 0)
        return bml_fail(err, BML_ERR_FORMAT, "%s: the vocabulary is empty", file);
    b->entries = bml_calloc(n, sizeof *b->entries);
    if (!b->entries)
        return bml_fail_memory(err, n * sizeof *b->entries, "the vocabulary");
    const char *name;
    json_t *value;
    json_object_foreach((json_t *)vocab, name, value)
    {
        size_t length = strlen(name);
        json_int_t id = json_integer_value(value);
        if (!json_is_integer(value) || id < 0 || id >= BML_TOKEN_ID_LIMIT)
            return bml_fail(err, BML_ERR_FORMAT,
                            "%s: the id of token \"%.*s\" is not an integer from 0 to %d", file,
                            shown(length), name, BML_TOKEN_ID_LIMIT - 1);
        b->entries[b->n_entries++] =
            (bml_vocab_entry){name, length, (int32_t)id, bml_hash_bytes(name, length)};
        *max_id = id > *max_id ? (int32_t)id : *max_id;
        *n_bytes += length;
    }
    return BML_OK;
}

static bml_status index_entries(bml_builder *b, bml_error *err)
{
    b->slot_bits = bml_hash_bits(b->n_entries);
    size_t n_slots = (size_t)1 << b->slot_bits;
    b->slots = bml_calloc(n_slots, sizeof *b->slots);
    if (!b->slots)
        return bml_fail_memory(err, n_slots * sizeof *b->slots, "the vocabulary");
    for (size_t i = 0; i < b->n_entries; i++) {
        size_t at = (size_t)(b->entries[i].hash * BML_HASH_A >> (64 - b->slot_bits));
        while (b->slots[at])
            at = (at + 1) & (n_slots - 1);
        b->slots[at] = (uint32_t)i + 1;
    }
    return BML_OK;
}

/* Makes room for the spans of N_IDS ids and N_BYTES more bytes; new ids have no token. */
static bml_status grow_spans(bml_builder *b, int32_t n_ids, size_t n_bytes, bml_error *err)
{
    bml_bpe *bpe = &b->tokenizer->bpe;
    if (n_ids > bpe->n_ids) {
        bml_span *spans = bml_realloc(bpe->spans, (size_t)n_ids, sizeof *spans);
        if (spans)
            bpe->spans = spans;
        bool *is_bytes = spans ? bml_realloc(b->is_bytes, (size_t)n_ids, sizeof *is_bytes) : NULL;
        if (!is_bytes)
            return bml_fail_memory(err, (size_t)n_ids * sizeof *spans, "the vocabulary");
        b->is_bytes = is_bytes;
        for (; bpe->n_ids < n_ids; bpe->n_ids++) {
            bpe->spans[bpe->n_ids] = (bml_span){UINT32_MAX, 0};
            b->is_bytes[bpe->n_ids] = false;
        }
    }
    char *bytes = bml_realloc(bpe->bytes, b->n_bytes + n_bytes, 1);
    if (!bytes)
        return bml_fail_memory(err, b->n_bytes + n_bytes, "the vocabulary");
    bpe->bytes = bytes;
    return BML_OK;
}

/* What each id stands for, and which ids stand for single bytes. */
static bml_status fill_spans(bml_builder *b, const char *file, bml_error *err)
{
    bml_bpe *bpe = &b->tokenizer->bpe;
    memset(bpe->byte_ids, 0xff, sizeof bpe->byte_ids);
    for (size_t i = 0; i < b->n_entries; i++) {
        const bml_vocab_entry *entry = &b->entries[i];
        bml_span *span = &bpe->spans[entry->id];
        if (span->offset != UINT32_MAX)
            return bml_fail(err, BML_ERR_FORMAT,
                            "%s: token \"%.*s\" has the id %d of another token", file,
                            shown(entry->length), entry->name, entry->id);
        char *bytes = bpe->bytes + b->n_bytes;
        size_t n = name_bytes(entry->name, entry->length, bytes, &b->is_bytes[entry->id]);
        *span = (bml_span){(uint32_t)b->n_bytes, (uint32_t)n};
        b->n_bytes += n;
        if (b->is_bytes[entry->id] && n == 1)
            bpe->byte_ids[(uint8_t)bytes[0]] = entry->id;
    }
    return BML_OK;
}

bml_status bml_builder_start(bml_builder *b, const char *file, const json_t *vocab, size_t n_merges,
                             bml_error *err)
{
    b->max_added = -1;
    b->tokenizer = bml_calloc(1, sizeof *b->tokenizer);
    if (!b->tokenizer)
        return bml_fail_memory(err, sizeof *b->tokenizer, "the tokenizer");
    size_t n_bytes = 0;
    int32_t max_id = -1;
    bml_status status = read_entries(b, file, vocab, &n_bytes, &max_id, err);
    if (!status)
        status = index_entries(b, err);
    if (!status)
        status = grow_spans(b, max_id + 1, n_bytes, err);
    if (!status)
        status = fill_spans(b, file, err);
    return status ? status : bml_bpe_pairs_new(&b->tokenizer->bpe, n_merges, err);
}

int32_t bml_builder_find(const bml_builder *b, const char *name, size_t length)
{
    uint64_t hash = bml_hash_bytes(name, length);
    size_t mask = ((size_t)1 << b->slot_bits) - 1;
    size_t at = (size_t)(hash * BML_HASH_A >> (64 - b->slot_bits));
    for (; b->slots[at]; at = (at + 1) & mask) {
        const bml_vocab_entry *entry = &b->entries[b->slots[at] - 1];
        if (entry->hash == hash && entry->length == length &&
            memcmp(entry->name, name, length) == 0)
            return entry->id;
    }
    return -1;
}

/* ---- merges -----------------------------------------------------------------------------------*/

bml_status bml_builder_merge(bml_builder *b, const char *file, const char *place, size_t number,
                             uint32_t rank, const char *left, size_t left_length, const char *right,
                             size_t right_length, bml_error *err)
{
    b->scratch.length = 0;
    if (!bml_bytes_append(&b->scratch, left, left_length) ||
        !bml_bytes_append(&b->scratch, right, right_length))
        return bml_fail_memory(err, left_length + right_length, "a merge");
    const char *names[] = {left, right, b->scratch.data};
    size_t lengths[] = {left_length, right_length, b->scratch.length};
    int32_t ids[3];
    for (int i = 0; i < 3; i++) {
        ids[i] = bml_builder_find(b, names[i], lengths[i]);
        if (ids[i] < 0)
            return bml_fail(err, BML_ERR_FORMAT,
                            "%s: %s %zu: the token \"%.*s\" is not in the vocabulary", file, place,
                            number, shown(lengths[i]), names[i]);
    }
    bml_bpe_pairs_put(&b->tokenizer->bpe, ids[0], ids[1], rank, ids[2]);
    return BML_OK;
}

/* ---- added tokens -----------------------------------------------------------------------------*/

static bml_added_token *find_added(const bml_tokenizer *t, const char *content, size_t length)
{
    for (size_t i = 0; i < t->n_added; i++)
        if (t->added[i].length == length && memcmp(t->added[i].content, content, length) == 0)
            return &t->added[i];
    return NULL;
}

bml_status bml_builder_add(bml_builder *b, const char *file, const char *content, size_t length,
                           bml_added_token flags, bml_error *err)
{
    bml_tokenizer *t = b->tokenizer;
    if (length == 0)
        return BML_OK;
    bml_added_token *known = find_added(t, content, length);
    if (known) {
        flags.content = known->content;
        flags.length = length;
        flags.id = known->id;
        flags.special |= known->special;
        *known = flags;
        return BML_OK;
    }
    int32_t id = bml_builder_find(b, content, length);
    if (id < 0)
        id = b->max_added >= (int32_t)b->n_entries ? b->max_added + 1 : (int32_t)b->n_entries;
    if (id >= BML_TOKEN_ID_LIMIT || t->n_added >= BML_ADDED_TOKEN_LIMIT)
        return bml_fail(err, BML_ERR_UNSUPPORTED,
                        "%s: more than %d added tokens, or ids above %d, are not supported", file,
                        BML_ADDED_TOKEN_LIMIT, BML_TOKEN_ID_LIMIT - 1);
    bml_added_token *grown = bml_realloc(t->added, t->n_added + 1, sizeof *grown);
    if (!grown)
        return bml_fail_memory(err, (t->n_added + 1) * sizeof *grown, "the added tokens");
    t->added = grown;
    flags.content = bml_strndup(content, length);
    if (!flags.content)
        return bml_fail_memory(err, length, "an added token");
    flags.length = length;
    flags.id = id;
    t->added[t->n_added++] = flags;
    b->max_added = id > b->max_added ? id : b->max_added;
    return BML_OK;
}

/* ---- the end ----------------------------------------------------------------------------------*/

/* The text of an added token takes the place of what the vocabulary has for its id. */
static bml_status fill_added(bml_builder *b, bml_error *err)
{
    bml_tokenizer *t = b->tokenizer;
    size_t n_bytes = 0;
    for (size_t i = 0; i < t->n_added; i++)
        n_bytes += t->added[i].length;
    bml_status status = grow_spans(b, b->max_added + 1, n_bytes, err);
    for (size_t i = 0; i < t->n_added && !status; i++) {
        memcpy(t->bpe.bytes + b->n_bytes, t->added[i].content, t->added[i].length);
        t->bpe.spans[t->added[i].id] =
            (bml_span){(uint32_t)b->n_bytes, (uint32_t)t->added[i].length};
        b->n_bytes += t->added[i].length;
    }
    return status;
}

bml_status bml_builder_finish(bml_builder *b, bool ignore_merges, bml_tokenizer **tokenizer,
                              bml_error *err)
{
    bml_tokenizer *t = b->tokenizer;
    bml_status status = bml_bpe_pieces_new(&t->bpe, b->is_bytes, ignore_merges, err);
    if (!status)
        status = fill_added(b, err);
    if (!status)
        status = bml_added_set_new(t->added, t->n_added, false, &t->first, err);
    if (!status)
        status = bml_added_set_new(t->added, t->n_added, true, &t->second, err);
    if (status)
        return status;
    *tokenizer = t;
    b->tokenizer = NULL;
    return BML_OK;
}

void bml_builder_clear(bml_builder *b)
{
    bml_tokenizer_free(b->tokenizer);
    free(b->entries);
    free(b->slots);
    free(b->is_bytes);
    free(b->scratch.data);
    *b = (bml_builder){0};
}
