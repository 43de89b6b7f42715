/* What generate.c needs of the sampler beyond bml_sample. */
#ifndef BML_GPT2_SAMPLER_H
#define BML_GPT2_SAMPLER_H

#include "bml.h"

/* BML_ERR_ARGUMENT, naming the setting and its range, if one is out of range. */
bml_status bml_sampling_check(const bml_sampling *sampling, bml_error *err);

#endif
