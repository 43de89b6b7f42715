#include "formats/safetensors.h"

#include "base/error.h"
#include "base/memory.h"
#include "formats/foreign.h"
#include "formats/json.h"
#include "formats/safetensors_set.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "tensors are used as they lie on disk");

/* The limit of the format's own implementation in Rust. */
enum { MAX_HEADER = 100000000 };

/* One container while its header is read. */
typedef struct container {
    const char *origin; /* for errors */
    const char *path;   /* the same text, owned by the shard */
    const uint8_t *data;
    size_t data_size;
    bool mapped;
} container;

/* Bits of an element; 0 for a dtype that is not in the format. */
static int dtype_bits(const char *dtype)
{
    static const struct {
        const char *name;
        int bits;
    } known[] = {
        {"F64", 64},        {"F32", 32},        {"F16", 16}, {"BF16", 16},   {"I64", 64},
        {"I32", 32},        {"I16", 16},        {"I8", 8},   {"U64", 64},    {"U32", 32},
        {"U16", 16},        {"U8", 8},          {"BOOL", 8}, {"C64", 64},    {"F8_E4M3", 8},
        {"F8_E5M2", 8},     {"F8_E8M0", 8},     {"F4", 4},   {"F6_E2M3", 6}, {"F6_E3M2", 6},
        {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (strcmp(known[i].name, dtype) == 0)
            return known[i].bits;
    return 0;
}

const char *bml_shape_text(const int64_t *shape, int n_dims, char *text, size_t size)
{
    size_t length = (size_t)snprintf(text, size, "[");
    for (int i = 0; i < n_dims && length < size; i++)
        length +=
            (size_t)snprintf(text + length, size - length, "%s%" PRId64, i ? ", " : "", shape[i]);
    if (length < size)
        snprintf(text + length, size - length, "]");
    return text;
}

static bml_status wrong_entry(const container *c, const char *name, const char *what,
                              bml_error *err)
{
    return bml_fail(err, BML_ERR_FORMAT, "%s: tensor \"%s\": %s", c->origin, name, what);
}

static bml_status read_shape(const container *c, const json_t *json, bml_tensor *t, bml_error *err)
{
    if (!json_is_array(json))
        return wrong_entry(c, t->name, "\"shape\" is not an array of integers", err);
    size_t n = json_array_size(json);
    if (n > BML_MAX_DIMS)
        return bml_fail(err, BML_ERR_UNSUPPORTED,
                        "%s: tensor \"%s\" has %zu dimensions; at most %d are supported", c->origin,
                        t->name, n, BML_MAX_DIMS);
    t->n_dims = (int)n;
    for (size_t i = 0; i < n; i++) {
        const json_t *dim = json_array_get(json, i);
        if (!json_is_integer(dim) || json_integer_value(dim) < 0)
            return wrong_entry(c, t->name, "\"shape\" holds something else than integers >= 0",
                               err);
        t->shape[i] = json_integer_value(dim);
    }
    return BML_OK;
}

/* shape x dtype must be what the offsets span. */
static bml_status check_span(const container *c, const bml_tensor *t, bml_error *err)
{
    int bits = dtype_bits(t->dtype);
    if (!bits)
        return BML_OK;
    char shape[160];
    bml_shape_text(t->shape, t->n_dims, shape, sizeof shape);
    size_t count = 1, total;
    for (int i = 0; i < t->n_dims; i++)
        if ((uint64_t)t->shape[i] > SIZE_MAX || !bml_mul_size(count, (size_t)t->shape[i], &count))
            return bml_fail(err, BML_ERR_FORMAT,
                            "%s: tensor \"%s\": the product of its shape %s overflows", c->origin,
                            t->name, shape);
    if (!bml_mul_size(count, (size_t)bits, &total))
        return bml_fail(err, BML_ERR_FORMAT,
                        "%s: tensor \"%s\": the size of shape %s times %s overflows", c->origin,
                        t->name, shape, t->dtype);
    if (total % 8 || total / 8 != t->bytes)
        return bml_fail(err, BML_ERR_FORMAT,
                        "%s: tensor \"%s\": shape %s of %s takes %zu bytes, but its data_offsets "
                        "span %zu",
                        c->origin, t->name, shape, t->dtype, (total + 7) / 8, t->bytes);
    return BML_OK;
}

static bml_status read_offsets(const container *c, const json_t *json, bml_tensor *t,
                               bml_error *err)
{
    const json_t *begin = json_array_get(json, 0), *end = json_array_get(json, 1);
    if (json_array_size(json) != 2 || !json_is_integer(begin) || !json_is_integer(end))
        return wrong_entry(c, t->name, "\"data_offsets\" is not an array of two integers", err);
    json_int_t b = json_integer_value(begin), e = json_integer_value(end);
    if (b < 0 || e < b)
        return bml_fail(err, BML_ERR_FORMAT,
                        "%s: tensor \"%s\": data_offsets [%lld, %lld] are not 0 <= begin <= end",
                        c->origin, t->name, (long long)b, (long long)e);
    if ((uint64_t)e > c->data_size)
        return bml_fail(err, BML_ERR_FORMAT,
                        "%s: tensor \"%s\" ends at byte %lld of the data, but the file has only "
                        "%zu bytes of data; it is cut short or its header is wrong",
                        c->origin, t->name, (long long)e, c->data_size);
    t->data = c->data + b;
    t->mapped = c->mapped;
    t->bytes = (size_t)(e - b);
    return BML_OK;
}

/* Fills T, whose name is set, from its entry in the header. */
static bml_status read_entry(const container *c, const json_t *entry, bml_tensor *t, bml_error *err)
{
    if (!json_is_object(entry))
        return wrong_entry(c, t->name, "its entry in the header is not an object", err);
    const char *dtype = json_string_value(json_object_get(entry, "dtype"));
    if (!dtype)
        return wrong_entry(c, t->name, "\"dtype\" is not a string", err);
    snprintf(t->dtype, sizeof t->dtype, "%s", dtype);
    t->file = c->path;
    bml_status status = read_shape(c, json_object_get(entry, "shape"), t, err);
    if (!status)
        status = read_offsets(c, json_object_get(entry, "data_offsets"), t, err);
    return status ? status : check_span(c, t, err);
}

static int by_position(const void *left, const void *right)
{
    const bml_tensor *a = left, *b = right;
    const uint8_t *p = a->data, *q = b->data;
    if (p != q)
        return p < q ? -1 : 1;
    return (a->bytes > b->bytes) - (a->bytes < b->bytes);
}

/* The N tensors must cover the data from its first byte to its last, each byte once. */
static bml_status check_tiling(const container *c, bml_tensor *tensors, size_t n, bml_error *err)
{
    if (n)
        qsort(tensors, n, sizeof *tensors, by_position);
    size_t end = 0;
    for (size_t i = 0; i < n; i++) {
        size_t begin = (size_t)((const uint8_t *)tensors[i].data - c->data);
        if (begin < end)
            return bml_fail(err, BML_ERR_FORMAT,
                            "%s: tensors \"%s\" and \"%s\" overlap at byte %zu of the data",
                            c->origin, tensors[i - 1].name, tensors[i].name, begin);
        if (begin > end)
            return bml_fail(err, BML_ERR_FORMAT,
                            "%s: a gap before tensor \"%s\": bytes %zu to %zu of the data belong "
                            "to no tensor",
                            c->origin, tensors[i].name, end, begin);
        end += tensors[i].bytes;
    }
    if (end < c->data_size)
        return bml_fail(err, BML_ERR_FORMAT,
                        "%s: the file goes on for %zu bytes after the end of its last tensor",
                        c->origin, c->data_size - end);
    return BML_OK;
}

static bml_status read_entries(bml_safetensors *st, const container *c, json_t *header,
                               bml_error *err)
{
    size_t first = st->n_tensors, n = json_object_size(header);
    bml_tensor *grown = bml_realloc(st->tensors, first + n, sizeof *grown);
    if (!grown)
        return bml_fail_memory(err, n * sizeof *grown, "the list of tensors");
    st->tensors = grown;
    const char *name;
    json_t *entry;
    json_object_foreach(header, name, entry)
    {
        if (strcmp(name, "__metadata__") == 0) {
            if (!json_is_object(entry))
                return bml_fail(err, BML_ERR_FORMAT,
                                "%s: \"__metadata__\" in the header is not an object", c->origin);
            continue;
        }
        bml_tensor *t = &st->tensors[st->n_tensors];
        *t = (bml_tensor){.name = bml_strndup(name, strlen(name))};
        if (!t->name)
            return bml_fail_memory(err, strlen(name) + 1, "a tensor's name");
        st->n_tensors++;
        bml_status status = read_entry(c, entry, t, err);
        if (status)
            return status;
    }
    return check_tiling(c, st->tensors + first, st->n_tensors - first, err);
}

/* Finds the header in the SIZE bytes of BYTES; its length is checked before anything is read. */
static bml_status find_header(const uint8_t *bytes, size_t size, const char *origin,
                              size_t *header_size, bml_error *err)
{
    if (size == 0)
        return bml_fail(err, BML_ERR_FORMAT, "%s: is empty, not a safetensors file", origin);
    uint64_t length = 0;
    if (size >= 8)
        memcpy(&length, bytes, 8);
    bool plausible = size > 8 && length <= size - 8 && length <= MAX_HEADER;
    /* A true header begins with "{", so that no length can be taken for a foreign magic. */
    if (!plausible || bytes[8] != '{') {
        bml_status status = bml_refuse_foreign(bytes, size, origin, err);
        if (status)
            return status;
    }
    if (size < 8)
        return bml_fail(err, BML_ERR_FORMAT,
                        "%s: is %zu bytes long; a safetensors file begins with 8 bytes of header "
                        "length",
                        origin, size);
    if (length > MAX_HEADER)
        return bml_fail(err, BML_ERR_FORMAT,
                        "%s: the header length in bytes 0 to 7 is %" PRIu64
                        ", more than the %d allowed",
                        origin, length, MAX_HEADER);
    if (length > size - 8)
        return bml_fail(err, BML_ERR_FORMAT,
                        "%s: the header length in bytes 0 to 7 is %" PRIu64
                        ", but only %zu bytes follow",
                        origin, length, size - 8);
    *header_size = (size_t)length;
    return BML_OK;
}

/* Adds a shard for a file, and the tensors in BYTES, which FILE may hold. Takes FILE over. */
static bml_status add_container(bml_safetensors *st, const uint8_t *bytes, size_t size,
                                bml_file file, const char *origin, bml_error *err)
{
    char *path = bml_strndup(origin, strlen(origin));
    bml_shard *shards = bml_realloc(st->shards, st->n_shards + 1, sizeof *shards);
    if (shards)
        st->shards = shards;
    if (!path || !shards) {
        free(path);
        bml_file_close(&file);
        return bml_fail_memory(err, sizeof *shards, "the list of files");
    }
    st->shards[st->n_shards++] = (bml_shard){path, file};

    size_t header_size = 0;
    json_t *header;
    bml_status status = find_header(bytes, size, origin, &header_size, err);
    if (status)
        return status;
    status = bml_json_parse_object((const char *)bytes + 8, header_size, JSON_REJECT_DUPLICATES,
                                   origin, &header, err);
    if (status) {
        bml_error_prefix(err, "safetensors header");
        return status;
    }
    container c = {origin, path, bytes + 8 + header_size, size - 8 - header_size, file.mapped};
    status = read_entries(st, &c, header, err);
    json_decref(header);
    return status;
}

bml_status bml_safetensors_add_file(bml_safetensors *st, const char *path, bml_error *err)
{
    bml_file file;
    bml_status status = bml_file_map(path, &file, err);
    return status ? status : add_container(st, file.data, file.size, file, path, err);
}

static int by_name(const void *left, const void *right)
{
    return strcmp(((const bml_tensor *)left)->name, ((const bml_tensor *)right)->name);
}

bml_status bml_safetensors_finish(bml_safetensors *st, bml_error *err)
{
    if (st->n_tensors)
        qsort(st->tensors, st->n_tensors, sizeof *st->tensors, by_name);
    for (size_t i = 1; i < st->n_tensors; i++) {
        const bml_tensor *a = &st->tensors[i - 1], *b = &st->tensors[i];
        if (strcmp(a->name, b->name) == 0)
            return bml_fail(err, BML_ERR_FORMAT, "tensor \"%s\" is in two files: %s and %s",
                            a->name, a->file, b->file);
    }
    return BML_OK;
}

bml_status bml_safetensors_open(const char *path, bml_safetensors **st, bml_error *err)
{
    bml_safetensors *new = bml_calloc(1, sizeof *new);
    if (!new)
        return bml_fail_memory(err, sizeof *new, path);
    bml_status status;
    if (bml_path_ends_with(path, ".index.json")) {
        status = bml_safetensors_add_index(new, path, err);
    } else {
        status = bml_safetensors_add_file(new, path, err);
        if (!status)
            status = bml_safetensors_finish(new, err);
    }
    if (status)
        bml_safetensors_close(new);
    else
        *st = new;
    return status;
}

bml_status bml_safetensors_parse(const void *data, size_t size, const char *origin,
                                 bml_safetensors **st, bml_error *err)
{
    bml_safetensors *new = bml_calloc(1, sizeof *new);
    if (!new)
        return bml_fail_memory(err, sizeof *new, origin);
    bml_status status = add_container(new, data, size, (bml_file){0}, origin, err);
    if (!status)
        status = bml_safetensors_finish(new, err);
    if (status)
        bml_safetensors_close(new);
    else
        *st = new;
    return status;
}

void bml_safetensors_close(bml_safetensors *st)
{
    if (!st)
        return;
    for (size_t i = 0; i < st->n_tensors; i++)
        free(st->tensors[i].name);
    for (size_t i = 0; i < st->n_shards; i++) {
        bml_file_close(&st->shards[i].file);
        free(st->shards[i].path);
    }
    free(st->tensors);
    free(st->shards);
    free(st);
}

size_t bml_safetensors_count(const bml_safetensors *st)
{
    return st->n_tensors;
}

const bml_tensor *bml_safetensors_at(const bml_safetensors *st, size_t index)
{
    return &st->tensors[index];
}

const bml_tensor *bml_safetensors_find(const bml_safetensors *st, const char *name)
{
    bml_tensor key = {.name = (char *)name};
    return st->n_tensors ? bsearch(&key, st->tensors, st->n_tensors, sizeof *st->tensors, by_name)
                         : NULL;
}
