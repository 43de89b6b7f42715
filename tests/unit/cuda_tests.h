/* What the files of the CUDA tests share. */
#ifndef TESTS_CUDA_TESTS_H
#define TESTS_CUDA_TESTS_H

#include "backend/cuda/cuda.h"
#include "gpt2/model.h"
#include "gpt2/session.h"
#include "testing.h"

enum { VOCAB = 8192 };

extern bml_error failure;

/* Under compute-sanitizer everything is slow: with BML_FEW_TESTS all kernels are tested, but in few
 * passes. BML_TESTS names tests, with * and ?: the others are left out. */
extern bool few_tests;

void ok(bml_status status);

/* The built-in model on the GPU with weights of this bml_weight_format. */
bml_model *cuda(int format);
bml_session *session_on(const bml_model *model, bml_session_options options);

/* cuda_chains.c */
void test_chains(void **state);
void test_chain_ends(void **state);
void test_chains_in_threads(void **state);
void test_patience(void **state);

#endif
