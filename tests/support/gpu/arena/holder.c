/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A process with device memory that a test controls: one command per line on stdin, one answer per
 * line on stdout. It is linked with the CUDA double and not with liveshift, and runs on real CUDA
 * as well. Numbers are hexadecimal.
 */
#include "cudart_abi.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define MIB ((size_t)1 << 20)
#define CHURNING 4

static void pattern(unsigned char *bytes, size_t size, unsigned seed) {
    uint64_t state = seed * 0x9e3779b97f4a7c15u + 1;
    for (size_t i = 0; i < size; i++) {
        if (i % 8 == 0)
            state = state * 6364136223846793005u + 1442695040888963407u;
        bytes[i] = (unsigned char)(state >> (8 * (i % 8)));
    }
}

static int put(void *address, size_t size, unsigned seed) {
    unsigned char *bytes = malloc(size);
    pattern(bytes, size, seed);
    int result = (int)cudaMemcpy(address, bytes, size, cudaMemcpyHostToDevice);
    free(bytes);
    return result;
}

/* 0: the memory has the bytes that put wrote. -1: it has other bytes. */
static int same(void *address, size_t size, unsigned seed) {
    unsigned char *expected = malloc(size), *found = malloc(size);
    pattern(expected, size, seed);
    int result = (int)cudaMemcpy(found, address, size, cudaMemcpyDeviceToHost);
    if (result == 0 && memcmp(expected, found, size) != 0)
        result = -1;
    free(expected);
    free(found);
    return result;
}

/* ---- threads that allocate and free all the time ---- */

static pthread_t threads[CHURNING];
static atomic_bool enough;
static atomic_ulong rounds;

static void must(bool good, const char *what) {
    if (good)
        return;
    fprintf(stderr, "holder: %s\n", what);
    _exit(3);
}

static void *churn(void *argument) {
    enum { KEPT = 3 };
    unsigned seed = (unsigned)(uintptr_t)argument;
    void *kept[KEPT] = {NULL};
    size_t size = 64 << 10; /* bytes of each block that are compared */
    for (unsigned i = 0; !atomic_load(&enough); i++) {
        void **one = &kept[i % KEPT];
        if (*one != NULL) {
            must(same(*one, size, seed + i - KEPT) == 0, "a block has changed");
            must(cudaFree(*one) == 0, "cudaFree failed");
        }
        must(cudaMalloc(one, (2 + 2 * (i % 3)) * MIB) == 0, "cudaMalloc failed");
        must(put(*one, size, seed + i) == 0, "writing failed");
        atomic_fetch_add(&rounds, 1);
    }
    for (unsigned i = 0; i < KEPT; i++)
        must(cudaFree(kept[i]) == 0, "cudaFree failed");
    return NULL;
}

static int churn_begin(void) {
    atomic_store(&enough, false);
    for (uintptr_t i = 0; i < CHURNING; i++)
        pthread_create(&threads[i], NULL, churn, (void *)(i * 1000003));
    return 0;
}

static unsigned long churn_end(void) {
    atomic_store(&enough, true);
    for (unsigned i = 0; i < CHURNING; i++)
        pthread_join(threads[i], NULL);
    return atomic_load(&rounds);
}

/* ---- commands ---- */

static cudaStream_t captured;

/* A forked child may not use CUDA. Returns 0 if freeing and allocating fail there. */
static long in_child(void *address) {
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        void *pointer;
        _exit(cudaFree(address) != 0 && cudaMalloc(&pointer, 4 * MIB) != 0 ? 0 : 1);
    }
    int status;
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static long long command(const char *word, unsigned long long a, unsigned long long b,
                         unsigned long long c) {
    void *pointer = (void *)(uintptr_t)a, *made = NULL;
    int result = -100;
    if (strcmp(word, "malloc") == 0)
        result = (int)cudaMalloc(&made, a);
    else if (strcmp(word, "async") == 0)
        result = (int)cudaMallocAsync(&made, a, NULL);
    else if (strcmp(word, "driver") == 0)
        result = (int)cuMemAlloc_v2((CUdeviceptr *)&made, a);
    if (result == 0)
        return (long long)(uintptr_t)made;
    if (result != -100)
        return -result;
    if (strcmp(word, "free") == 0)
        return -(int)cudaFree(pointer);
    if (strcmp(word, "freeasync") == 0)
        return -(int)cudaFreeAsync(pointer, NULL);
    if (strcmp(word, "driverfree") == 0)
        return -(int)cuMemFree_v2(a);
    if (strcmp(word, "unseen-free") ==
        0) { /* not by a function that a preloaded library can replace */
        void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
        return -((int (*)(CUdeviceptr))dlsym(driver, "cuMemFree_v2"))(a);
    }
    if (strcmp(word, "put") == 0)
        return -put(pointer, b, (unsigned)c);
    if (strcmp(word, "same") == 0)
        return -same(pointer, b, (unsigned)c);
    if (strcmp(word, "device") == 0)
        return -(int)cudaSetDevice((int)a);
    if (strcmp(word, "peer") == 0)
        return -(int)cudaDeviceEnablePeerAccess((int)a, 0);
    if (strcmp(word, "unpeer") == 0)
        return -(int)cudaDeviceDisablePeerAccess((int)a);
    if (strcmp(word, "access") == 0) {
        CUmemLocation location = {CU_MEM_LOCATION_TYPE_DEVICE, (int)b};
        unsigned long long flags = 77;
        result = (int)cuMemGetAccess(&flags, &location, a);
        return result == 0 ? (long long)flags : -result;
    }
    if (strcmp(word, "reset") == 0)
        return -(int)cudaDeviceReset();
    if (strcmp(word, "retain") == 0)
        return -(int)cuDevicePrimaryCtxRetain((CUcontext *)&made, (int)a);
    if (strcmp(word, "unretain") == 0)
        return -(int)cuDevicePrimaryCtxRelease_v2((int)a);
    if (strcmp(word, "ipc") == 0) {
        cudaIpcMemHandle_t handle;
        return -(int)cudaIpcGetMemHandle(&handle, pointer);
    }
    if (strcmp(word, "capture") == 0) {
        cudaStreamCreateWithFlags(&captured, cudaStreamNonBlocking);
        return -(int)cudaStreamBeginCapture(captured, (enum cudaStreamCaptureMode)a);
    }
    if (strcmp(word, "captured") == 0) {
        cudaGraph_t graph = NULL;
        result = (int)cudaStreamEndCapture(captured, &graph);
        if (graph != NULL)
            cudaGraphDestroy(graph);
        return -result;
    }
    if (strcmp(word, "mode") == 0) {
        enum cudaStreamCaptureMode mode = (enum cudaStreamCaptureMode)a;
        result = (int)cudaThreadExchangeStreamCaptureMode(&mode);
        return result == 0 ? (int)mode : -result;
    }
    if (strcmp(word, "free-memory") == 0) {
        size_t now, total;
        result = (int)cudaMemGetInfo(&now, &total);
        return result == 0 ? (long long)now : -result;
    }
    if (strcmp(word, "error") == 0)
        return -(int)cudaGetLastError();
    if (strcmp(word, "fork") == 0)
        return in_child(pointer);
    if (strcmp(word, "churn") == 0)
        return churn_begin();
    if (strcmp(word, "rounds") == 0)
        return (long long)atomic_load(&rounds);
    if (strcmp(word, "rest") == 0)
        return (long long)churn_end();
    fprintf(stderr, "holder: what is %s?\n", word);
    exit(2);
}

int main(void) {
    char line[200], word[32];
    while (fgets(line, sizeof line, stdin) != NULL) {
        unsigned long long a = 0, b = 0, c = 0;
        if (sscanf(line, "%31s %llx %llx %llx", word, &a, &b, &c) < 1)
            return 2;
        printf("%lld\n", command(word, a, b, c));
        fflush(stdout);
    }
    return 0;
}
