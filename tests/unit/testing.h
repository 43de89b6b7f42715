/* What every unit test includes: cmocka with its prerequisites, and a few helpers. */
#ifndef TESTS_TESTING_H
#define TESTS_TESTING_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Skips the running test with a message when a path under ../shared is absent (a user's machine).
 * With CI set it fails instead: there it must not be skipped. */
static inline void require_shared(const char *path)
{
    if (access(path, R_OK) == 0)
        return;
    if (getenv("CI"))
        fail_msg("%s is missing, and in CI it must be there", path);
    printf("skipped: %s is not here\n", path);
    skip();
}

/* Sanitizers make everything slow: tests that repeat a lot do less of it then. */
#if defined(__SANITIZE_ADDRESS__)
#define TEST_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define TEST_SANITIZED 1
#endif
#endif
#ifndef TEST_SANITIZED
#define TEST_SANITIZED 0
#endif

/* splitmix64: a small generator for test data. */
static inline uint64_t test_random(uint64_t *state)
{
    uint64_t z = (*state += 0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
}

#endif
