/* SPDX-License-Identifier: Apache-2.0 */
/*
 * For programs that say what liveshift relies on CUDA to do. The same program runs on the simulated
 * libraries and on real ones, and says on which; it ends with 1 if it has found a difference.
 * Computing is a copy to pinned memory, a host function and a copy back: no kernel, no nvcc.
 */
#ifndef LIVESHIFT_CONTRACT_H
#define LIVESHIFT_CONTRACT_H

#include "cudart_abi.h"

#include <dlfcn.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
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

/* What liveshift does not rely on, but a reader wants to know: of the machine at hand. */
static inline void note(const char *what, long value) {
    printf("note %s: %ld\n", what, value);
    fflush(stdout);
}

struct group {
    const char *name;
    void (*claims)(void);
};

enum { GROUP_S = 20 };

/*
 * Plays each group in a process of its own, for at most GROUP_S seconds: the others are played also
 * if one hangs or finds a difference. Call it before anything of CUDA. Returns the program's status.
 */
static inline int play(const struct group *groups, size_t count) {
    int status = 0;
    for (size_t one = 0; one < count; one++) {
        int how;
        pid_t child = fork();
        if (child == 0) {
            alarm(GROUP_S);
            if (one == 0)
                say_where();
            groups[one].claims();
            exit(0);
        }
        waitpid(child, &how, 0);
        if (how == 0)
            continue;
        fprintf(stderr, "%s: %s %d\n", groups[one].name,
                WIFSIGNALED(how) ? "ended by signal" : "ended with",
                WIFSIGNALED(how) ? WTERMSIG(how) : WEXITSTATUS(how));
        status = 1;
    }
    return status;
}
#define PLAY(...)                                                                                  \
    do {                                                                                           \
        static const struct group groups_[] = {__VA_ARGS__};                                       \
        return play(groups_, sizeof groups_ / sizeof *groups_);                                    \
    } while (0)

#endif
