/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Helpers for the programs of the C test suite. Each program is one .c file in this folder. A
 * comment "needs: gate.c clocks.c" names the interposer's files that it needs.
 * tests/interposer/test_c_suite.py builds and runs the program, plain and under the sanitizers.
 * argv[1] says how much to do (100 is usual), argv[2] is an empty folder. Exit status 0: all
 * checks passed.
 */
#ifndef LIVESHIFT_TESTS_CHECK_H
#define LIVESHIFT_TESTS_CHECK_H

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

__attribute__((noreturn, format(printf, 1, 2))) static inline void failed(const char *format, ...) {
    va_list words;
    va_start(words, format);
    vfprintf(stderr, format, words);
    va_end(words);
    fputc('\n', stderr);
    _Exit(1);
}

#define CHECK(condition)                                                                           \
    ((condition) ? (void)0 : failed("%s:%d: failed: %s", __FILE__, __LINE__, #condition))

/* Fails and prints both numbers if they are not equal. */
#define CHECK_SAME(a, b)                                                                           \
    do {                                                                                           \
        unsigned long long a_ = (unsigned long long)(a), b_ = (unsigned long long)(b);             \
        if (a_ != b_)                                                                              \
            failed("%s:%d: %s is %llu, %s is %llu", __FILE__, __LINE__, #a, a_, #b, b_);           \
    } while (0)

/* Returns a random number below n from the caller's own sequence. */
static inline unsigned below(unsigned *seed, unsigned n) { return (unsigned)rand_r(seed) % n; }

static inline double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

#endif
