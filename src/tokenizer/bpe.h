/*
 * Byte-level BPE: a piece of text starts as one token a byte, and the adjacent pair with the lowest
 * rank (the leftmost on ties) is merged until no pair has a rank.
 */
#ifndef BML_TOKENIZER_BPE_H
#define BML_TOKENIZER_BPE_H

#include "bml.h"

/* Ids are below this, so that a damaged file cannot make us allocate gigabytes. */
enum { BML_TOKEN_ID_LIMIT = 1 << 22 };

/* Two tokens that merge. rank UINT32_MAX marks an empty slot. */
typedef struct bml_pair_slot {
    int32_t left, right;
    uint32_t rank;
    int32_t merged;
} bml_pair_slot;

/* A token whose bytes BPE makes into itself, so that a piece of these bytes needs no merging. Up to
 * 16 bytes are held in key, zero-padded; of more, key[0] is the hash and key[1] the offset in
 * bml_bpe.bytes. length 0: an empty slot. */
typedef struct bml_piece_slot {
    uint64_t key[2];
    uint32_t length;
    int32_t id;
} bml_piece_slot;

/* Bytes in bml_bpe.bytes. offset UINT32_MAX: no such token. */
typedef struct bml_span {
    uint32_t offset, length;
} bml_span;

/* Immutable once built; owned by the tokenizer. */
typedef struct bml_bpe {
    int32_t byte_ids[256]; /* -1 for a byte without a token */
    bml_pair_slot *pairs;
    unsigned pair_bits; /* log2 of the number of slots */
    bml_piece_slot *pieces;
    unsigned piece_bits;
    bml_span *spans; /* [n_ids] */
    int32_t n_ids;
    char *bytes;
} bml_bpe;

/* Scratch memory for long pieces, kept between calls. {0} is empty; freed by bml_bpe_work_free. */
typedef struct bml_bpe_work {
    void *memory;
    size_t size;
} bml_bpe_work;

void bml_bpe_work_free(bml_bpe_work *work);

/* Makes room for COUNT pairs; adds one (a later one replaces an earlier one, as the reference). */
bml_status bml_bpe_pairs_new(bml_bpe *bpe, size_t count, bml_error *err);
void bml_bpe_pairs_put(bml_bpe *bpe, int32_t left, int32_t right, uint32_t rank, int32_t merged);

/*
 * Fills the table of pieces from the spans, once everything else is there. IGNORE_MERGES: every
 * token counts, whether or not BPE makes it (a flag of tokenizer.json). IS_BYTES[id] says whether
 * the token's span is made of bytes that a text can hold, as opposed to a name.
 */
bml_status bml_bpe_pieces_new(bml_bpe *bpe, const bool *is_bytes, bool ignore_merges,
                              bml_error *err);

/* The id of the token that PIECE is as a whole, or -1. SAFE: 16 bytes at PIECE can be read. */
int32_t bml_bpe_find(const bml_bpe *bpe, const uint8_t *piece, size_t length, bool safe);

/*
 * Encodes a piece by merging. OUT has room for LENGTH ids, *N_OUT of which are written. Linear in
 * LENGTH but for a logarithm. BML_ERR_UNSUPPORTED: a byte has no token.
 */
bml_status bml_bpe_merge(const bml_bpe *bpe, const uint8_t *piece, size_t length, int32_t *out,
                         size_t *n_out, bml_bpe_work *work, bml_error *err);

/* Frees what the tables hold, not BPE itself. */
void bml_bpe_clear(bml_bpe *bpe);

#endif
