/* SPDX-License-Identifier: Apache-2.0 */
/*
 * For programs that say what liveshift relies on CUDA to do. The same program runs on the simulated
 * libraries and on real ones, and says on which; it ends with 1 at the first difference. Computing
 * is a copy to pinned memory, a host function and a copy back: no kernel, no nvcc.
 */
#ifndef LIVESHIFT_CONTRACT_H
#define LIVESHIFT_CONTRACT_H

#include "cudart_abi.h"

#include <dlfcn.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static inline bool on_double(void) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    return driver != NULL && dlsym(driver, "simcuda_enqueue") != NULL;
}

static inline void say_where(void) {
    char name[128] = "?";
    int version = 0;
    cuDriverGetVersion(&version);
    if (cuInit(0) == CUDA_SUCCESS)
        cuDeviceGetName(name, sizeof name, 0);
    printf("on %s: %s, CUDA %d.%d\n", on_double() ? "simulated" : "real", name, version / 1000,
           version % 1000 / 10);
    fflush(stdout);
}

static inline void must(bool true_, const char *what, const char *file, int line, long value) {
    if (true_)
        return;
    fprintf(stderr, "%s:%d: %s: not so (%ld)\n", file, line, what, value);
    exit(1);
}

/* Something must be so. */
#define MUST(condition) must((condition), #condition, __FILE__, __LINE__, 0)
/* A call must return that. */
#define GIVES(expected, call)                                                                      \
    do {                                                                                           \
        long given_ = (long)(call);                                                                \
        must(given_ == (long)(expected), #call " gives " #expected, __FILE__, __LINE__, given_);   \
    } while (0)
#define WORKS(call) GIVES(0, call)

/* Everything since the last one, in words. */
static inline void ok(const char *what) {
    printf("ok %s\n", what);
    fflush(stdout);
}

static inline double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

/* Something to be held up on a stream until it is let go. */
struct hold {
    _Atomic int begun, go;
};
static inline void held(void *argument) {
    struct hold *hold = argument;
    hold->begun = 1;
    while (!hold->go)
        usleep(200);
}

static inline void add_one(void *argument) { ++*(_Atomic int *)argument; }

#endif
