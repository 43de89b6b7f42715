/* Any bytes as a config.json; what is accepted must keep its promises. */
#include "formats/hf_config.h"

#include <math.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void require(bool promise)
{
    if (!promise)
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    bml_hf_config c;
    bml_error err;
    if (bml_hf_config_parse((const char *)data, size, "fuzz", &c, &err))
        return 0;
    require(c.n_layer > 0 && c.n_head > 0 && c.n_embd > 0 && c.n_inner > 0);
    require(c.n_positions > 0 && c.vocab_size > 0);
    require(c.n_embd % c.n_head == 0 && 3 * (int64_t)c.n_embd <= INT32_MAX);
    require(isfinite(c.layer_norm_epsilon) && c.layer_norm_epsilon > 0);
    require(c.activation >= BML_ACT_GELU_TANH && c.activation <= BML_ACT_RELU);
    require(c.bos_token_id >= -1 && c.bos_token_id < c.vocab_size);
    require(c.eos_token_id >= -1 && c.eos_token_id < c.vocab_size);
    return 0;
}
