/* Added tokens: strings that become one id wherever they stand in a text, before it is cut into
 * pieces. The rules are those of AddedVocabulary in Hugging Face's tokenizers. */
#ifndef BML_TOKENIZER_ADDED_TOKENS_H
#define BML_TOKENIZER_ADDED_TOKENS_H

#include "bml.h"

typedef struct bml_added_token {
    char *content;
    size_t length; /* at least 1 */
    int32_t id;
    bool special;        /* found only when special tokens are asked for */
    bool lstrip, rstrip; /* takes the white space before, after it */
    bool single_word;    /* only where no word character touches it */
    bool normalized;     /* looked for after those that are not */
} bml_added_token;

/* The tokens that are looked for in one pass over the text. */
typedef struct bml_added_set {
    const bml_added_token **sorted; /* by content; owned array, tokens belong to the tokenizer */
    size_t n;
    bool has_plain;   /* some token is not special */
    bool starts[256]; /* some token starts with this byte */
    int only_start;   /* the byte that all tokens start with, or -1 */
} bml_added_set;

/* Gathers the tokens whose normalized flag is NORMALIZED. */
bml_status bml_added_set_new(const bml_added_token *tokens, size_t n, bool normalized,
                             bml_added_set *set, bml_error *err);
void bml_added_set_clear(bml_added_set *set);

/* A walk over a text. Set up as {text, length}; scan and done start at 0. */
typedef struct bml_added_walk {
    const uint8_t *text;
    size_t length;
    size_t scan; /* where to look next */
    size_t done; /* the end of the last match, stripped white space included */
} bml_added_walk;

/*
 * The next token in the text: the leftmost, of those the longest. *START and *STOP receive its
 * place, stripped white space included; the text between walk->done before the call and *START is
 * in front of it (nothing if that is not positive). False at the end of the text.
 */
bool bml_added_next(const bml_added_set *set, bml_added_walk *walk, bool parse_special, int32_t *id,
                    size_t *start, size_t *stop);

#endif
