/* Memory for weights: zeroed, aligned, nobody else's, and given back whatever the order. */
#include "testing.h"

#include "backend/cpu/device.h"

#include <string.h>

static const size_t sizes[] = {
    1,       4096,    300000,           262144,           262143,
    5000001, 1 << 20, (size_t)33 << 20, (size_t)33 << 20, (size_t)70 << 20,
    777777};
enum { N = sizeof sizes / sizeof *sizes };

static bml_buffer memory_of(bml_device *device, size_t bytes)
{
    bml_buffer buffer = {0};
    bml_pool *pool = NULL;
    assert_int_equal(bml_cpu_weight_memory(device, bytes, &buffer, &pool, NULL), BML_OK);
    assert_non_null(pool);
    assert_int_equal(buffer.bytes, bytes);
    assert_int_equal((uintptr_t)buffer.data % 64, 0);
    return buffer;
}

static void test_weights_are_apart(void **state)
{
    (void)state;
    bml_device *device;
    bml_buffer buffers[N];
    assert_int_equal(bml_cpu_open(&device, NULL), BML_OK);
    for (size_t step = 1; step < N; step += 3) { /* N is prime: every step is another order */
        for (size_t i = 0; i < N; i++) {
            buffers[i] = memory_of(device, sizes[i]);
            const char *bytes = buffers[i].data;
            assert_int_equal(bytes[0], 0);
            assert_int_equal(memcmp(bytes, bytes + 1, sizes[i] - 1), 0);
            memset(buffers[i].data, (int)i + 1, sizes[i]);
        }
        for (size_t n = 0, i = 0; n < N; n++, i = (i + step) % N) {
            const char *bytes = buffers[i].data;
            assert_int_equal(bytes[0], i + 1); /* nobody has written there */
            assert_int_equal(memcmp(bytes, bytes + 1, sizes[i] - 1), 0);
            bml_cpu_weight_memory_free(device, &buffers[i]);
            assert_null(buffers[i].data);
        }
        assert_null(device->regions);
    }
    bml_cpu_close(device);
}

static void test_too_much(void **state)
{
    (void)state;
    bml_device *device;
    assert_int_equal(bml_cpu_open(&device, NULL), BML_OK);
    const size_t too_much[] = {SIZE_MAX, SIZE_MAX - 64, SIZE_MAX / 2};
    for (size_t i = 0; i < sizeof too_much / sizeof *too_much; i++) {
        bml_buffer buffer = {0};
        bml_pool *pool;
        bml_error err;
        assert_int_equal(bml_cpu_weight_memory(device, too_much[i], &buffer, &pool, &err),
                         BML_ERR_MEMORY);
        assert_non_null(strstr(err.message, "out of memory"));
        assert_null(buffer.data);
    }
    assert_null(device->regions);
    bml_cpu_close(device);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_weights_are_apart),
        cmocka_unit_test(test_too_much),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
