/* SPDX-License-Identifier: Apache-2.0 */
/*
 * For programs of one rank each, started N times on one machine, which are quiesced from outside:
 * program FOLDER RANK COUNT …; unique ids go through files of FOLDER. They hold on the simulated
 * CUDA and NCCL, and use nothing that the real ones don't have.
 */
#ifndef LIVESHIFT_TESTS_NCCL_RANK_H
#define LIVESHIFT_TESTS_NCCL_RANK_H

#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "cuda_abi.h"
#include "cudart_abi.h"
#include "nccl_abi.h"

static const char *folder;
static int own, count;

#define REQUIRE(condition, ...)                                                                    \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "rank %d, line %d: %s: ", own, __LINE__, #condition);                  \
            fprintf(stderr, __VA_ARGS__);                                                          \
            fprintf(stderr, "\n");                                                                 \
            _exit(1);                                                                              \
        }                                                                                          \
    } while (0)
#define CHECK(call)                                                                                \
    do {                                                                                           \
        int got_ = (int)(call);                                                                    \
        REQUIRE(got_ == 0, "%s is %d", #call, got_);                                               \
    } while (0)

static inline void pause_us(long us) {
    struct timespec time = {us / 1000000, us % 1000000 * 1000};
    nanosleep(&time, NULL);
}

/* Passes bytes from the rank `from` to all others by a file of this name, for which they wait. */
static inline void share(const char *name, int from, void *bytes, size_t size) {
    char path[512], draft[520];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    snprintf(draft, sizeof draft, "%s.part", path);
    if (own == from) {
        int fd = open(draft, O_WRONLY | O_CREAT | O_TRUNC, 0644);
        REQUIRE(write(fd, bytes, size) == (ssize_t)size, "%s", draft);
        close(fd);
        CHECK(rename(draft, path));
        return;
    }
    int fd;
    while ((fd = open(path, O_RDONLY)) < 0)
        pause_us(2000);
    REQUIRE(read(fd, bytes, size) == (ssize_t)size, "%s", path);
    close(fd);
}

static inline ncclUniqueId shared_id(const char *name) {
    ncclUniqueId id;
    if (own == 0)
        CHECK(ncclGetUniqueId(&id));
    share(name, 0, &id, sizeof id);
    return id;
}

static inline void begin(int argc, char **argv) {
    REQUIRE(argc >= 4, "FOLDER RANK COUNT");
    folder = argv[1];
    own = atoi(argv[2]);
    count = atoi(argv[3]);
    setvbuf(stdout, NULL, _IOLBF, 0);
    CHECK(cudaSetDevice(0));
}

static inline float *device_floats(size_t n) {
    void *pointer;
    CHECK(cudaMalloc(&pointer, n * sizeof(float)));
    return pointer;
}

static inline uint64_t hash(uint64_t seed, const void *bytes, size_t size) {
    for (const unsigned char *at = bytes; size-- > 0; at++)
        seed = (seed ^ *at) * 0x100000001b3u;
    return seed;
}

#endif
