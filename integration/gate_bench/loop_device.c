/* SPDX-License-Identifier: Apache-2.0 */
/* ARGV[2] times what ARGV[1] says, on CUDA and NCCL or their doubles: "allreduce" of a communicator
   of one rank, or "malloc" and free, or "malloc-large". Prints the nanoseconds of one. */

#include "cuda_abi.h"
#include "nccl_abi.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

int cudaMalloc(void **pointer, size_t size);
int cudaFree(void *pointer);
int cudaSetDevice(int device);
int cudaStreamCreate(void **stream);
int cudaStreamSynchronize(void *stream);

#define CHECK(call)                                                                                \
    do {                                                                                           \
        int result = (int)(call);                                                                  \
        if (result != 0) {                                                                         \
            fprintf(stderr, "%s: %d\n", #call, result);                                            \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

static void allreduce(long times, void *buffer, ncclComm_t comm, void *stream) {
    for (long i = 0; i < times; i++) {
        CHECK(ncclAllReduce(buffer, buffer, 1, ncclFloat32, ncclSum, comm, stream));
        if (i % 64 == 63)
            CHECK(cudaStreamSynchronize(stream));
    }
    CHECK(cudaStreamSynchronize(stream));
}

static void allocate(long times, size_t size) {
    void *pointer;
    for (long i = 0; i < times; i++) {
        CHECK(cudaMalloc(&pointer, size));
        CHECK(cudaFree(pointer));
    }
}

int main(int argc, char **argv) {
    struct timespec began, ended;
    void *buffer, *stream;
    ncclUniqueId id;
    ncclComm_t comm;
    if (argc != 3)
        return 2;
    long times = strtol(argv[2], NULL, 10);
    CHECK(cudaSetDevice(0));
    CHECK(cudaMalloc(&buffer, 4096));
    CHECK(cudaStreamCreate(&stream));
    CHECK(ncclGetUniqueId(&id));
    CHECK(ncclCommInitRank(&comm, 1, id, 0));
    allreduce(1, buffer, comm, stream);
    allocate(1, 1 << 20);
    clock_gettime(CLOCK_MONOTONIC, &began);
    if (strcmp(argv[1], "malloc") == 0)
        allocate(times, 1 << 20);
    else if (strcmp(argv[1], "malloc-large") == 0)
        allocate(times, 2 << 20);
    else
        allreduce(times, buffer, comm, stream);
    clock_gettime(CLOCK_MONOTONIC, &ended);
    printf("%.4f\n",
           ((double)(ended.tv_sec - began.tv_sec) * 1e9 + (double)(ended.tv_nsec - began.tv_nsec)) /
               (double)times);
    CHECK(ncclCommDestroy(comm));
    return 0;
}
