/* tokenizer.json, the file of Hugging Face's tokenizers. What is not byte-level BPE as GPT-2's is
 * refused by name. Its post-processor, truncation and padding are of no concern: bml_tokenize
 * gives the ids of the text and nothing else (add_special_tokens=False). */
#include "tokenizer/load.h"

#include "base/error.h"
#include "tokenizer/tokenizer.h"
#include "tokenizer/tokens_json.h"

#include <string.h>

typedef struct loader {
    const char *file;
    const json_t *root;
    bml_builder builder;
    bool ignore_merges, add_prefix_space, use_regex;
} loader;

static const char *const what_works =
    "only byte-level BPE tokenizers as GPT-2's can be used with this program";

/* The "type" of a component, for messages. */
static const char *type_of(const json_t *component)
{
    const char *type = json_string_value(json_object_get(component, "type"));
    return type ? type : "without a type";
}

/* *VALUE = the boolean KEY of OBJECT, DEFAULT_VALUE where it is absent or null. */
static bml_status read_flag(const loader *l, const char *where, const json_t *object,
                            const char *key, bool default_value, bool *value, bml_error *err)
{
    const json_t *flag = json_object_get(object, key);
    *value = flag && !json_is_null(flag) ? json_is_true(flag) : default_value;
    if (flag && !json_is_null(flag) && !json_is_boolean(flag))
        return bml_fail(err, BML_ERR_FORMAT, "%s: %s: \"%s\" is not true or false", l->file, where,
                        key);
    return BML_OK;
}

static bml_status check_model(loader *l, const json_t *model, bml_error *err)
{
    if (!json_is_object(model))
        return bml_fail(err, BML_ERR_FORMAT, "%s: has no \"model\" object", l->file);
    /* Files from before the types were written down have none; a BPE has merges. */
    const json_t *type = json_object_get(model, "type");
    if (type ? strcmp(type_of(model), "BPE") != 0 : !json_object_get(model, "merges"))
        return bml_fail(err, BML_ERR_UNSUPPORTED, "%s: the model is %s: %s", l->file,
                        type_of(model), what_works);
    const char *const affixes[] = {"continuing_subword_prefix", "end_of_word_suffix"};
    for (int i = 0; i < 2; i++) {
        const json_t *affix = json_object_get(model, affixes[i]);
        if (affix && !json_is_null(affix) && json_string_length(affix) != 0)
            return bml_fail(err, BML_ERR_UNSUPPORTED, "%s: the model has a \"%s\": %s", l->file,
                            affixes[i], what_works);
    }
    const json_t *dropout = json_object_get(model, "dropout");
    if (dropout && !json_is_null(dropout) &&
        (!json_is_number(dropout) || json_number_value(dropout) != 0))
        return bml_fail(err, BML_ERR_UNSUPPORTED,
                        "%s: the model has \"dropout\", which makes ids random; it must be null",
                        l->file);
    bool byte_fallback;
    bml_status status = read_flag(l, "model", model, "byte_fallback", false, &byte_fallback, err);
    if (!status)
        status = read_flag(l, "model", model, "ignore_merges", false, &l->ignore_merges, err);
    if (!status && byte_fallback)
        status = bml_fail(err, BML_ERR_UNSUPPORTED, "%s: the model has \"byte_fallback\": %s",
                          l->file, what_works);
    return status;
}

/*
 * Finds the one ByteLevel in a component that is it, or a Sequence of it. KEY is "pre_tokenizer" or
 * "decoder", LIST the key of its Sequence's members.
 */
static bml_status find_byte_level(const loader *l, const char *key, const char *list,
                                  const json_t **found, bml_error *err)
{
    const json_t *component = json_object_get(l->root, key);
    if (strcmp(type_of(component), "Sequence") == 0) {
        const json_t *members = json_object_get(component, list);
        if (json_array_size(members) == 1)
            component = json_array_get(members, 0);
        for (size_t i = 0; i < json_array_size(members); i++)
            if (strcmp(type_of(json_array_get(members, i)), "ByteLevel") != 0)
                component = json_array_get(members, i); /* to be named below */
    }
    if (strcmp(type_of(component), "ByteLevel") != 0)
        return bml_fail(err, BML_ERR_UNSUPPORTED, "%s: the %s is %s, not ByteLevel: %s", l->file,
                        key, component && !json_is_null(component) ? type_of(component) : "missing",
                        what_works);
    *found = component;
    return BML_OK;
}

static bml_status check_pipeline(loader *l, bml_error *err)
{
    const json_t *normalizer = json_object_get(l->root, "normalizer");
    bool empty = strcmp(type_of(normalizer), "Sequence") == 0 &&
                 json_array_size(json_object_get(normalizer, "normalizers")) == 0;
    if (normalizer && !json_is_null(normalizer) && !empty)
        return bml_fail(err, BML_ERR_UNSUPPORTED,
                        "%s: the normalizer %s is not supported: GPT-2's tokenizer has none",
                        l->file, type_of(normalizer));
    const json_t *found, *decoder = json_object_get(l->root, "decoder");
    if (decoder && !json_is_null(decoder)) {
        bml_status status = find_byte_level(l, "decoder", "decoders", &found, err);
        if (status)
            return status;
    }
    bml_status status = find_byte_level(l, "pre_tokenizer", "pretokenizers", &found, err);
    if (!status)
        status = read_flag(l, "pre_tokenizer", found, "add_prefix_space", true,
                           &l->add_prefix_space, err);
    if (!status)
        status = read_flag(l, "pre_tokenizer", found, "use_regex", true, &l->use_regex, err);
    return status;
}

/* A merge is "left right" or ["left", "right"]. */
static bml_status read_merge(loader *l, size_t index, const json_t *merge, bml_error *err)
{
    const char *left = NULL, *right = NULL;
    size_t left_length = 0, right_length = 0;
    if (json_is_string(merge)) {
        const char *text = json_string_value(merge);
        size_t length = json_string_length(merge);
        const char *space = memchr(text, ' ', length);
        if (space && !memchr(space + 1, ' ', (size_t)(text + length - space - 1))) {
            left = text;
            left_length = (size_t)(space - text);
            right = space + 1;
            right_length = length - left_length - 1;
        }
    } else if (json_array_size(merge) == 2 && json_is_string(json_array_get(merge, 0)) &&
               json_is_string(json_array_get(merge, 1))) {
        left = json_string_value(json_array_get(merge, 0));
        left_length = json_string_length(json_array_get(merge, 0));
        right = json_string_value(json_array_get(merge, 1));
        right_length = json_string_length(json_array_get(merge, 1));
    }
    if (!left)
        return bml_fail(err, BML_ERR_FORMAT,
                        "%s: merge %zu is neither \"left right\" nor [\"left\", \"right\"]",
                        l->file, index);
    return bml_builder_merge(&l->builder, l->file, "merge", index, (uint32_t)index, left,
                             left_length, right, right_length, err);
}

static bml_status read_model(loader *l, const json_t *model, bml_error *err)
{
    const json_t *vocab = json_object_get(model, "vocab");
    const json_t *merges = json_object_get(model, "merges");
    if (!json_is_object(vocab))
        return bml_fail(err, BML_ERR_FORMAT, "%s: the model has no \"vocab\" object", l->file);
    if (!json_is_array(merges))
        return bml_fail(err, BML_ERR_FORMAT, "%s: the model has no \"merges\" array", l->file);
    bml_status status =
        bml_builder_start(&l->builder, l->file, vocab, json_array_size(merges), err);
    for (size_t i = 0; i < json_array_size(merges) && !status; i++)
        status = read_merge(l, i, json_array_get(merges, i), err);
    return status;
}

static bml_status read_added(loader *l, bml_error *err)
{
    const json_t *added = json_object_get(l->root, "added_tokens");
    if (added && !json_is_null(added) && !json_is_array(added))
        return bml_fail(err, BML_ERR_FORMAT, "%s: \"added_tokens\" is not an array", l->file);
    bml_status status = BML_OK;
    for (size_t i = 0; i < json_array_size(added) && !status; i++)
        status = bml_tokens_add(&l->builder, l->file, "\"added_tokens\"", json_array_get(added, i),
                                false, err);
    return status;
}

/*
 * tokenizer_config.json beside tokenizer.json: its added tokens, and add_prefix_space unless the
 * class is the generic one, which takes that from tokenizer.json as transformers does.
 */
static bml_status read_config(loader *l, const char *file, const json_t *config, bml_error *err)
{
    const char *class = json_string_value(json_object_get(config, "tokenizer_class"));
    bool generic = class && (strcmp(class, "PreTrainedTokenizerFast") == 0 ||
                             strcmp(class, "TokenizersBackend") == 0);
    const json_t *prefix = json_object_get(config, "add_prefix_space");
    if (!generic && json_is_boolean(prefix))
        l->add_prefix_space = json_is_true(prefix);
    return bml_tokens_add_decoder(&l->builder, file,
                                  json_object_get(config, "added_tokens_decoder"), err);
}

bml_status bml_tokenizer_from_json(const char *file, const char *json, size_t length,
                                   const char *config_file, const json_t *config,
                                   bml_tokenizer **tokenizer, bml_error *err)
{
    json_t *root;
    bml_status status = bml_tokens_parse(file, json, length, &root, err);
    if (status)
        return status;
    loader l = {.file = file, .root = root};
    const json_t *model = json_object_get(root, "model");
    status = check_model(&l, model, err);
    if (!status)
        status = check_pipeline(&l, err);
    if (!status)
        status = read_model(&l, model, err);
    if (!status)
        status = read_added(&l, err);
    if (!status)
        status = read_config(&l, config_file, config, err);
    if (!status)
        status = bml_builder_finish(&l.builder, l.ignore_merges, tokenizer, err);
    if (!status) {
        (*tokenizer)->add_prefix_space = l.add_prefix_space;
        (*tokenizer)->whole_text = !l.use_regex;
    }
    bml_builder_clear(&l.builder);
    json_decref(root);
    return status;
}

bml_status bml_tokenizer_parse_json(const char *json, size_t length, const char *origin,
                                    bml_tokenizer **tokenizer, bml_error *err)
{
    return bml_tokenizer_from_json(origin, json, length, NULL, NULL, tokenizer, err);
}
