#include "tokenizer/bpe.h"

#include "base/error.h"
#include "base/memory.h"
#include "tokenizer/hash.h"

#include <stdlib.h>
#include <string.h>

enum {
    KEY_BYTES = 16,  /* of a piece that are compared without touching the token's bytes */
    SHORT_PIECE = 48 /* up to here scanning for the lowest rank beats a heap */
};

#define NO_RANK UINT32_MAX

/* ---- the tables -----------------------------------------------------------------------------*/

static inline size_t pair_home(const bml_bpe *bpe, int32_t left, int32_t right)
{
    uint64_t key = (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
    return (size_t)(key * BML_HASH_A >> (64 - bpe->pair_bits));
}

/* The slot of a pair, or the empty slot where it would be. */
static inline bml_pair_slot *find_pair(const bml_bpe *bpe, int32_t left, int32_t right)
{
    size_t mask = ((size_t)1 << bpe->pair_bits) - 1;
    for (size_t i = pair_home(bpe, left, right);; i = (i + 1) & mask) {
        bml_pair_slot *slot = &bpe->pairs[i];
        if (slot->rank == NO_RANK || (slot->left == left && slot->right == right))
            return slot;
    }
}

bml_status bml_bpe_pairs_new(bml_bpe *bpe, size_t count, bml_error *err)
{
    bpe->pair_bits = bml_hash_bits(count);
    size_t slots = (size_t)1 << bpe->pair_bits;
    bpe->pairs = bml_calloc(slots, sizeof *bpe->pairs);
    if (!bpe->pairs)
        return bml_fail_memory(err, slots * sizeof *bpe->pairs, "the tokenizer's merges");
    for (size_t i = 0; i < slots; i++)
        bpe->pairs[i].rank = NO_RANK;
    return BML_OK;
}

void bml_bpe_pairs_put(bml_bpe *bpe, int32_t left, int32_t right, uint32_t rank, int32_t merged)
{
    *find_pair(bpe, left, right) = (bml_pair_slot){left, right, rank, merged};
}

/* The key of a piece. SAFE: 16 bytes at PIECE can be read, however short it is. */
static inline void make_key(const uint8_t *piece, size_t length, bool safe, uint64_t key[2])
{
    if (length > KEY_BYTES) {
        key[0] = bml_hash_bytes(piece, length);
        key[1] = 0;
    } else if (safe) {
        static const uint8_t keep[2 * KEY_BYTES] = {[0 ... KEY_BYTES - 1] = 0xff};
        uint64_t mask[2];
        memcpy(mask, keep + KEY_BYTES - length, sizeof mask);
        memcpy(key, piece, KEY_BYTES);
        key[0] &= mask[0];
        key[1] &= mask[1];
    } else {
        key[0] = key[1] = 0;
        memcpy(key, piece, length);
    }
}

/* The slot of a piece, or the empty slot where it would be. */
static inline bml_piece_slot *find_piece(const bml_bpe *bpe, const uint8_t *piece, size_t length,
                                         bool safe)
{
    uint64_t key[2];
    make_key(piece, length, safe, key);
    uint64_t hash = key[0] * BML_HASH_A + key[1] * BML_HASH_B + length * BML_HASH_C;
    size_t mask = ((size_t)1 << bpe->piece_bits) - 1;
    for (size_t i = (size_t)(hash >> (64 - bpe->piece_bits));; i = (i + 1) & mask) {
        bml_piece_slot *slot = &bpe->pieces[i];
        if (slot->length == 0)
            return slot;
        if (slot->key[0] == key[0] && slot->length == length &&
            (length <= KEY_BYTES ? slot->key[1] == key[1]
                                 : memcmp(bpe->bytes + slot->key[1], piece, length) == 0))
            return slot;
    }
}

int32_t bml_bpe_find(const bml_bpe *bpe, const uint8_t *piece, size_t length, bool safe)
{
    const bml_piece_slot *slot = find_piece(bpe, piece, length, safe);
    return slot->length ? slot->id : -1;
}

bml_status bml_bpe_pieces_new(bml_bpe *bpe, const bool *is_bytes, bool ignore_merges,
                              bml_error *err)
{
    bpe->piece_bits = bml_hash_bits((size_t)bpe->n_ids);
    size_t slots = (size_t)1 << bpe->piece_bits, longest = 0;
    bpe->pieces = bml_calloc(slots, sizeof *bpe->pieces);
    if (!bpe->pieces)
        return bml_fail_memory(err, slots * sizeof *bpe->pieces, "the tokenizer's pieces");
    for (int32_t id = 0; id < bpe->n_ids; id++)
        if (is_bytes[id] && bpe->spans[id].length > longest)
            longest = bpe->spans[id].length;
    int32_t *out = bml_calloc(longest, sizeof *out);
    if (!out)
        return bml_fail_memory(err, longest * sizeof *out, "a token");
    bml_bpe_work work = {0};
    bml_status status = BML_OK;
    for (int32_t id = 0; id < bpe->n_ids && !status; id++) {
        size_t length = bpe->spans[id].length, n = 0;
        if (!is_bytes[id] || length == 0)
            continue;
        const uint8_t *bytes = (const uint8_t *)bpe->bytes + bpe->spans[id].offset;
        if (!ignore_merges) {
            status = bml_bpe_merge(bpe, bytes, length, out, &n, &work, NULL);
            if (status == BML_ERR_UNSUPPORTED) { /* a byte without a token: never a whole piece */
                status = BML_OK;
                continue;
            }
            if (status || n != 1 || out[0] != id)
                continue;
        }
        bml_piece_slot *slot = find_piece(bpe, bytes, length, false);
        make_key(bytes, length, false, slot->key);
        if (length > KEY_BYTES)
            slot->key[1] = bpe->spans[id].offset;
        slot->length = (uint32_t)length;
        slot->id = id;
    }
    free(out);
    bml_bpe_work_free(&work);
    return status ? bml_fail_memory(err, longest, "a token") : BML_OK;
}

void bml_bpe_clear(bml_bpe *bpe)
{
    free(bpe->pairs);
    free(bpe->pieces);
    free(bpe->spans);
    free(bpe->bytes);
    *bpe = (bml_bpe){0};
}

/* ---- merging --------------------------------------------------------------------------------*/

/* Short pieces: the ranks of all neighbours in a small array, scanned for the lowest. */
static size_t merge_short(const bml_bpe *bpe, int32_t *ids, size_t n)
{
    uint32_t ranks[SHORT_PIECE];
    int32_t merged[SHORT_PIECE];
    for (size_t i = 0; i + 1 < n; i++) {
        const bml_pair_slot *slot = find_pair(bpe, ids[i], ids[i + 1]);
        ranks[i] = slot->rank;
        merged[i] = slot->merged;
    }
    while (n > 1) {
        size_t best = 0;
        for (size_t i = 1; i + 1 < n; i++)
            if (ranks[i] < ranks[best])
                best = i;
        if (ranks[best] == NO_RANK)
            break;
        ids[best] = merged[best];
        n--;
        for (size_t i = best + 1; i < n; i++) {
            ids[i] = ids[i + 1];
            ranks[i - 1] = ranks[i];
            merged[i - 1] = merged[i];
        }
        for (size_t i = best ? best - 1 : 0; i <= best && i + 1 < n; i++) {
            const bml_pair_slot *slot = find_pair(bpe, ids[i], ids[i + 1]);
            ranks[i] = slot->rank;
            merged[i] = slot->merged;
        }
    }
    return n;
}

/* A token in the doubly linked list over a long piece. id -1: swallowed by the one before it. */
typedef struct node {
    int32_t id;
    uint32_t previous, next; /* indices; the piece's length where there is none */
} node;

/* A min-heap of rank << 32 | position. Entries go stale when their pair changes; popping checks. */
typedef struct heap {
    uint64_t *items;
    size_t n;
} heap;

static void sift_down(heap *h, size_t at)
{
    uint64_t item = h->items[at];
    for (size_t child; (child = 2 * at + 1) < h->n; at = child) {
        child += child + 1 < h->n && h->items[child + 1] < h->items[child];
        if (h->items[child] >= item)
            break;
        h->items[at] = h->items[child];
    }
    h->items[at] = item;
}

static uint64_t heap_pop(heap *h)
{
    uint64_t top = h->items[0];
    h->items[0] = h->items[--h->n];
    if (h->n)
        sift_down(h, 0);
    return top;
}

static void heap_push(heap *h, uint64_t item)
{
    size_t at = h->n++;
    for (; at && h->items[(at - 1) / 2] > item; at = (at - 1) / 2)
        h->items[at] = h->items[(at - 1) / 2];
    h->items[at] = item;
}

static void push_pair(const bml_bpe *bpe, heap *h, const node *nodes, uint32_t at, uint32_t end)
{
    uint32_t next = at == end ? end : nodes[at].next;
    if (next == end)
        return;
    uint32_t rank = find_pair(bpe, nodes[at].id, nodes[next].id)->rank;
    if (rank != NO_RANK)
        heap_push(h, (uint64_t)rank << 32 | at);
}

static size_t merge_long(const bml_bpe *bpe, int32_t *ids, uint32_t n, node *nodes, uint64_t *items)
{
    heap h = {items, 0};
    for (uint32_t i = 0; i < n; i++) {
        nodes[i] = (node){ids[i], i ? i - 1 : n, i + 1};
        uint32_t rank = i + 1 < n ? find_pair(bpe, ids[i], ids[i + 1])->rank : NO_RANK;
        if (rank != NO_RANK)
            h.items[h.n++] = (uint64_t)rank << 32 | i;
    }
    for (size_t i = h.n / 2; i-- > 0;)
        sift_down(&h, i);
    while (h.n) {
        uint64_t top = heap_pop(&h);
        node *left = &nodes[(uint32_t)top];
        if (left->id < 0 || left->next == n)
            continue;
        node *right = &nodes[left->next];
        const bml_pair_slot *slot = find_pair(bpe, left->id, right->id);
        if (slot->rank != top >> 32)
            continue;
        left->id = slot->merged;
        left->next = right->next;
        right->id = -1;
        if (right->next != n)
            nodes[right->next].previous = (uint32_t)top;
        push_pair(bpe, &h, nodes, left->previous, n);
        push_pair(bpe, &h, nodes, (uint32_t)top, n);
    }
    size_t out = 0;
    for (uint32_t i = 0; i != n; i = nodes[i].next)
        ids[out++] = nodes[i].id;
    return out;
}

/* Room for the nodes and the heap. Each merge removes a node and pushes at most two pairs, after
 * popping one: never more than 2 n entries. */
static bml_status reserve_work(bml_bpe_work *work, size_t n, bml_error *err)
{
    size_t size;
    if (!bml_mul_size(n, sizeof(node) + 2 * sizeof(uint64_t), &size))
        return bml_fail_memory(err, SIZE_MAX, "a long piece of text");
    if (size <= work->size)
        return BML_OK;
    bml_bpe_work_free(work);
    work->memory = bml_calloc(size, 1);
    if (!work->memory)
        return bml_fail_memory(err, size, "a long piece of text");
    work->size = size;
    return BML_OK;
}

void bml_bpe_work_free(bml_bpe_work *work)
{
    free(work->memory);
    *work = (bml_bpe_work){0};
}

bml_status bml_bpe_merge(const bml_bpe *bpe, const uint8_t *piece, size_t length, int32_t *out,
                         size_t *n_out, bml_bpe_work *work, bml_error *err)
{
    if (length >= UINT32_MAX)
        return bml_fail(err, BML_ERR_ARGUMENT,
                        "a stretch of %zu bytes without a word boundary is too long to tokenize",
                        length);
    for (size_t i = 0; i < length; i++) {
        out[i] = bpe->byte_ids[piece[i]];
        if (out[i] < 0)
            return bml_fail(err, BML_ERR_UNSUPPORTED,
                            "the tokenizer has no token for the byte 0x%02x", piece[i]);
    }
    if (length <= SHORT_PIECE) {
        *n_out = merge_short(bpe, out, length);
        return BML_OK;
    }
    bml_status status = reserve_work(work, length, err);
    if (status)
        return status;
    uint64_t *items = work->memory;
    *n_out = merge_long(bpe, out, (uint32_t)length, (node *)(items + 2 * length), items);
    return BML_OK;
}
