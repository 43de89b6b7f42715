/* What the files of the kernel suite share: the backend under test, arrays, matrices. */
#ifndef TESTS_KERNEL_FRAME_H
#define TESTS_KERNEL_FRAME_H

#include "kernel_suite.h"

#include "testing.h"

#include "backend/cpu/quant.h"
#include "base/dtype.h"

#include <math.h>

extern const kernel_suite *suite;
extern const bml_backend *b;
extern bml_queue *queue;
extern bml_device *device, *packer_device;

/* A number from 1 to n; one from -scale to scale. */
size_t up_to(size_t n);
float uniform(float scale);

/* A buffer of the device and its image on the host: begin_pass() uploads the images of all arrays,
 * end_pass() downloads them again. */
typedef struct array {
    void *data;
    bml_buffer buffer;
} array;

array array_of(size_t bytes);
array poisoned(size_t n);                  /* n floats, all NaN */
array random_array(size_t n, float scale); /* n floats */
void drop(array *a);

/* A batch of n tokens that is only there for its size. */
bml_batch plain_batch(size_t n);

void begin_pass(const bml_batch *batch);
void end_pass(void);
void assert_close(const char *what, double got, double wanted, double bound);

/* A random matrix of one dtype, exactly as held, and the same as float64. */
typedef struct matrix {
    void *data;
    double *exact;
    bml_matrix m;
} matrix;

matrix random_matrix(int rows, int cols, bml_dtype dtype, float scale);
bml_weight weight_of(const matrix *m, bool out_in, bml_weight_format format);
void drop_matrix(matrix *m, bml_weight *w);

/* kernel_products.c */
void test_linear(void **state);
void test_packed(void **state);
void test_packed_extreme_rows(void **state);
void test_packing_extremes(void **state);
void test_packed_keeps_nan(void **state);
void test_packed_keeps_bad_weights(void **state);
void test_packed_embedding(void **state);
void test_matmul(void **state);

/* kernel_rest.c */
void test_embedding(void **state);
void test_layernorm(void **state);
void test_softmax(void **state);
void test_softmax_keeps_nan(void **state);
void test_attention(void **state);
void test_attention_cached(void **state);
void test_heads(void **state);
void test_residual_add(void **state);
void test_gelu(void **state);
void test_nan_goes_through(void **state);
void test_argmax(void **state);
void test_score(void **state);

/* kernel_sample.c */
void test_sample(void **state);

#endif
