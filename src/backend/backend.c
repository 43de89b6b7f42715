#include "backend/backend.h"

#include <math.h>

float bml_attention_scale(const bml_hf_config *config, int layer)
{
    double scale = 1;
    if (config->scale_attn_weights)
        scale /= sqrt((double)(config->n_embd / config->n_head));
    if (config->scale_attn_by_inverse_layer_idx)
        scale /= layer + 1;
    return (float)scale;
}
