#include "tokenizer/added_tokens.h"

#include "base/error.h"
#include "base/memory.h"
#include "base/utf8.h"
#include "tokenizer/unicode.h"

#include <stdlib.h>
#include <string.h>

static int by_content(const void *a, const void *b)
{
    const bml_added_token *x = *(const bml_added_token *const *)a;
    const bml_added_token *y = *(const bml_added_token *const *)b;
    int order = memcmp(x->content, y->content, x->length < y->length ? x->length : y->length);
    return order ? order : (x->length > y->length) - (x->length < y->length);
}

bml_status bml_added_set_new(const bml_added_token *tokens, size_t n, bool normalized,
                             bml_added_set *set, bml_error *err)
{
    *set = (bml_added_set){.only_start = -1};
    set->sorted = bml_calloc(n, sizeof *set->sorted);
    if (!set->sorted)
        return bml_fail_memory(err, n * sizeof *set->sorted, "the added tokens");
    for (size_t i = 0; i < n; i++) {
        if (tokens[i].normalized != normalized)
            continue;
        set->sorted[set->n++] = &tokens[i];
        set->has_plain |= !tokens[i].special;
        set->starts[(uint8_t)tokens[i].content[0]] = true;
    }
    qsort(set->sorted, set->n, sizeof *set->sorted, by_content);
    if (set->n && set->sorted[0]->content[0] == set->sorted[set->n - 1]->content[0])
        set->only_start = (uint8_t)set->sorted[0]->content[0];
    return BML_OK;
}

void bml_added_set_clear(bml_added_set *set)
{
    free(set->sorted);
    *set = (bml_added_set){.only_start = -1};
}

/* The longest token at TEXT, or NULL. Byte by byte narrows the range of tokens that agree. */
static const bml_added_token *longest_at(const bml_added_set *set, const uint8_t *text,
                                         size_t length)
{
    const bml_added_token *best = NULL;
    size_t low = 0, high = set->n;
    for (size_t depth = 0; low < high; depth++) {
        if (set->sorted[low]->length == depth)
            best = set->sorted[low++];
        if (depth == length)
            break;
        /* The first in [low, high) whose byte is not below, then the first that is above. */
        size_t edge[2] = {low, low};
        for (int above = 0; above < 2; above++) {
            size_t end = high;
            while (edge[above] < end) {
                size_t middle = edge[above] + (end - edge[above]) / 2;
                if ((uint8_t)set->sorted[middle]->content[depth] < text[depth] + above)
                    edge[above] = middle + 1;
                else
                    end = middle;
            }
        }
        low = edge[0];
        high = edge[1];
    }
    return best;
}

/* The first place from FROM on where a token may start; LENGTH if there is none. */
static size_t next_start(const bml_added_set *set, const uint8_t *text, size_t from, size_t length)
{
    if (set->only_start >= 0) {
        const uint8_t *found =
            from < length ? memchr(text + from, set->only_start, length - from) : NULL;
        return found ? (size_t)(found - text) : length;
    }
    while (from < length && !set->starts[text[from]])
        from++;
    return from;
}

static bool touches_word(const bml_added_walk *walk, size_t start, size_t stop)
{
    uint32_t c;
    if (start > 0) {
        bml_utf8_decode_back(walk->text, walk->text + start, &c);
        if (bml_unicode_lookup(c) & BML_UNICODE_WORD)
            return true;
    }
    if (stop < walk->length) {
        bml_utf8_decode(walk->text + stop, walk->text + walk->length, &c);
        if (bml_unicode_lookup(c) & BML_UNICODE_WORD)
            return true;
    }
    return false;
}

static bool is_space(uint32_t code_point)
{
    return (bml_unicode_lookup(code_point) & BML_UNICODE_CLASS) == BML_UNICODE_SPACE;
}

/* Where the white space before START begins; never before walk->done. */
static size_t strip_left(const bml_added_walk *walk, size_t start)
{
    if (start < walk->done)
        return walk->done;
    while (start > walk->done) {
        uint32_t c;
        size_t n = bml_utf8_decode_back(walk->text + walk->done, walk->text + start, &c);
        if (!is_space(c))
            break;
        start -= n;
    }
    return start;
}

static size_t strip_right(const bml_added_walk *walk, size_t stop)
{
    while (stop < walk->length) {
        uint32_t c;
        size_t n = bml_utf8_decode(walk->text + stop, walk->text + walk->length, &c);
        if (!is_space(c))
            break;
        stop += n;
    }
    return stop;
}

bool bml_added_next(const bml_added_set *set, bml_added_walk *walk, bool parse_special, int32_t *id,
                    size_t *start, size_t *stop)
{
    /* A special token that is not asked for still hides the tokens inside it; but when there are
     * no others the whole pass can be spared. */
    if (set->n == 0 || (!parse_special && !set->has_plain))
        return false;
    while ((walk->scan = next_start(set, walk->text, walk->scan, walk->length)) < walk->length) {
        size_t from = walk->scan;
        const bml_added_token *token = longest_at(set, walk->text + from, walk->length - from);
        if (!token) {
            walk->scan++;
            continue;
        }
        size_t to = walk->scan = from + token->length;
        if ((token->special && !parse_special) ||
            (token->single_word && touches_word(walk, from, to)))
            continue;
        *start = token->lstrip ? strip_left(walk, from) : from;
        /* Up to walk->done the last token has already found nothing but white space. */
        *stop = token->rstrip ? strip_right(walk, to > walk->done ? to : walk->done) : to;
        if (*start >= *stop) /* inside what the last token has taken */
            continue;
        *id = token->id;
        walk->done = *stop;
        return true;
    }
    return false;
}
