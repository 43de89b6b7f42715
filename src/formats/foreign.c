#include "formats/foreign.h"

#include "base/error.h"

#include <string.h>
#include <strings.h>

static bool starts_with(const char *data, size_t size, const char *magic, size_t length)
{
    return size >= length && memcmp(data, magic, length) == 0;
}

static bool is_html(const char *data, size_t size)
{
    while (size && (*data == ' ' || *data == '\n' || *data == '\r' || *data == '\t'))
        data++, size--;
    return (size >= 9 && strncasecmp(data, "<!doctype", 9) == 0) ||
           (size >= 5 && strncasecmp(data, "<html", 5) == 0);
}

bml_status bml_refuse_foreign(const void *data, size_t size, const char *origin, bml_error *err)
{
    const char *text = data;
    if (starts_with(text, size, "version https://git-lfs", 23))
        return bml_fail(err, BML_ERR_FORMAT,
                        "%s: is a git-LFS pointer, not the file itself; fetch it with 'git lfs "
                        "pull' or 'hf download'",
                        origin);
    if (starts_with(text, size, "PK\003\004", 4))
        return bml_fail(err, BML_ERR_UNSUPPORTED,
                        "%s: is a PyTorch zip checkpoint, not safetensors; %s", origin,
                        BML_CONVERT_HINT);
    /* A pickle begins with the PROTO opcode and a protocol from 2 to 5. */
    if (size >= 2 && text[0] == '\x80' && text[1] >= 2 && text[1] <= 5)
        return bml_fail(err, BML_ERR_UNSUPPORTED,
                        "%s: is a PyTorch pickle checkpoint, not safetensors; %s", origin,
                        BML_CONVERT_HINT);
    if (starts_with(text, size, "GGUF", 4))
        return bml_fail(err, BML_ERR_UNSUPPORTED,
                        "%s: is a GGUF file, not safetensors; use the model's Hugging Face files",
                        origin);
    if (starts_with(text, size, "\x89HDF\r\n\x1a\n", 8))
        return bml_fail(err, BML_ERR_UNSUPPORTED,
                        "%s: is an HDF5 file (TensorFlow weights), not safetensors; %s", origin,
                        BML_CONVERT_HINT);
    if (is_html(text, size))
        return bml_fail(err, BML_ERR_FORMAT,
                        "%s: is an HTML page, not a model file; the download went wrong", origin);
    return BML_OK;
}
