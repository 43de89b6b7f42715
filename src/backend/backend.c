#include "backend/backend.h"

#include "base/error.h"

#include <math.h>

static const struct {
    bml_backend_kind kind;
    const char *name;
    const bml_backend *(*get)(void); /* NULL: not in this build */
} backends[] = {
#ifdef BML_HAVE_METAL
    {BML_BACKEND_METAL, "metal", bml_backend_metal},
#else
    {BML_BACKEND_METAL, "metal", NULL},
#endif
#ifdef BML_HAVE_CUDA
    {BML_BACKEND_CUDA, "cuda", bml_backend_cuda},
#else
    {BML_BACKEND_CUDA, "cuda", NULL},
#endif
    {BML_BACKEND_CPU, "cpu", bml_backend_cpu},
};

bml_status bml_backend_list(bml_backend_kind kind, const bml_backend *list[3], int *n,
                            bml_error *err)
{
    const char *wanted = NULL;
    *n = 0;
    for (size_t i = 0; i < sizeof backends / sizeof *backends; i++) {
        if (kind != BML_BACKEND_AUTO && kind != backends[i].kind)
            continue;
        wanted = backends[i].name;
        if (backends[i].get)
            list[(*n)++] = backends[i].get();
    }
    if (!wanted)
        return bml_fail(err, BML_ERR_ARGUMENT, "no backend of kind %d", (int)kind);
    if (!*n)
        return bml_fail(err, BML_ERR_UNSUPPORTED,
                        "this build has no %s backend; --backend auto chooses one that it has",
                        wanted);
    return BML_OK;
}

float bml_attention_scale(const bml_hf_config *config, int layer)
{
    double scale = 1;
    if (config->scale_attn_weights)
        scale /= sqrt((double)(config->n_embd / config->n_head));
    if (config->scale_attn_by_inverse_layer_idx)
        scale /= layer + 1;
    return (float)scale;
}

bool bml_batch_one_a_slot(const bml_batch *batch)
{
    for (int t = 1; t < batch->n_tokens; t++)
        for (int other = 0; other < t; other++)
            if (batch->slot[t] == batch->slot[other])
                return false;
    return true;
}
