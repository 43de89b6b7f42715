/* Building a tokenizer from what both file formats hold: vocabulary, merges and added tokens. */
#ifndef BML_TOKENIZER_BUILDER_H
#define BML_TOKENIZER_BUILDER_H

#include "base/memory.h"
#include "bml.h"
#include "tokenizer/added_tokens.h"
#include "tokenizer/bpe.h"

#include <jansson.h>

enum {
    BML_TOKENIZER_FILE_LIMIT = 64 << 20, /* bytes of one tokenizer file; GPT-2's have 2 MB */
    BML_ADDED_TOKEN_LIMIT = 1 << 14
};

struct bml_tokenizer {
    bml_bpe bpe;
    bml_added_token *added; /* [n_added], contents distinct */
    size_t n_added;
    bml_added_set first, second; /* the added tokens that are not normalized, and those that are */
    bool add_prefix_space;       /* a text that does not start with a space gets one */
    bool whole_text;             /* a text is one piece (use_regex false) */
};

/* A token of the vocabulary, in the spelling of the file. */
typedef struct bml_vocab_entry {
    const char *name;
    size_t length;
    int32_t id;
    uint64_t hash;
} bml_vocab_entry;

/* {0} to start with. */
typedef struct bml_builder {
    bml_tokenizer *tokenizer;
    bml_vocab_entry *entries; /* [n_entries], in the order of the file */
    size_t n_entries;
    uint32_t *slots; /* a hash table by name: index of an entry plus 1; 0 is empty */
    unsigned slot_bits;
    int32_t max_added; /* the largest id of an added token, -1 without any */
    bool *is_bytes;    /* [n_ids]: the name is made of characters that stand for bytes */
    size_t n_bytes;    /* used in tokenizer->bpe.bytes */
    bml_bytes scratch;
} bml_builder;

/*
 * Takes the vocabulary, an object of token to id, which must outlive the builder. Room is made for
 * N_MERGES merges. FILE goes into messages, here and below.
 */
bml_status bml_builder_start(bml_builder *builder, const char *file, const json_t *vocab,
                             size_t n_merges, bml_error *err);

/* The id of a token of the vocabulary, -1 if there is none of that name. */
int32_t bml_builder_find(const bml_builder *builder, const char *name, size_t length);

/* Takes the next merge: RANK counts from 0. PLACE and NUMBER say where it stands, "line" 3. */
bml_status bml_builder_merge(bml_builder *builder, const char *file, const char *place,
                             size_t number, uint32_t rank, const char *left, size_t left_length,
                             const char *right, size_t right_length, bml_error *err);

/*
 * Takes an added token; only its flags are read from FLAGS. Its id is that of the vocabulary or,
 * for a token that is not there, the next free one, as in Hugging Face's tokenizers. An empty
 * content is ignored; a content given twice keeps the later flags, and stays special.
 */
bml_status bml_builder_add(bml_builder *builder, const char *file, const char *content,
                           size_t length, bml_added_token flags, bml_error *err);

/* Completes and hands over the tokenizer. IGNORE_MERGES as for bml_bpe_pieces_new. */
bml_status bml_builder_finish(bml_builder *builder, bool ignore_merges, bml_tokenizer **tokenizer,
                              bml_error *err);

/* To be called in any case, with the tokenizer handed over or not. */
void bml_builder_clear(bml_builder *builder);

#endif
