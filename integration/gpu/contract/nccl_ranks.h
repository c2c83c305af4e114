/* SPDX-License-Identifier: Apache-2.0 */
/*
 * For the NCCL contract programs: ranks as processes of one machine, and the little CUDA they need.
 *
 * The programs hold on the simulated libraries and on the real ones, and use no header of NVIDIA's.
 * Each rank has a NCCL_HOSTID of its own, which makes it a node of its own: several ranks share one
 * GPU, and all their traffic goes over TCP. Functions newer than NCCL 2.26 are looked up, not linked.
 */
#ifndef LIVESHIFT_CONTRACT_NCCL_RANKS_H
#define LIVESHIFT_CONTRACT_NCCL_RANKS_H

#include <dirent.h>
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "cuda_abi.h"
#include "nccl_abi.h"

#define MAX_RANKS 8

struct shared {
    pthread_barrier_t barrier;
    ncclUniqueId id[8];
    int number[MAX_RANKS];
};

struct rank {
    int rank, count;
    struct shared *shared;
    int version;
};

#define REQUIRE(condition, ...)                                                                    \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition);                        \
            fprintf(stderr, __VA_ARGS__);                                                          \
            fprintf(stderr, "\n");                                                                 \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)
#define CUDA(call)                                                                                 \
    do {                                                                                           \
        int error_ = (int)(call);                                                                  \
        REQUIRE(error_ == 0, "%s is %d", #call, error_);                                           \
    } while (0)
#define EXPECT(wanted, call)                                                                       \
    do {                                                                                           \
        int got_ = (int)(call);                                                                    \
        REQUIRE(got_ == (int)(wanted), "%s is %d (%s)", #call, got_, ncclGetLastError(NULL));      \
    } while (0)
#define NCCL(call) EXPECT(ncclSuccess, call)
/* The function of this name, or NULL where the library is older. */
#define LOOKUP(name) ((__typeof__(&name))dlsym(RTLD_DEFAULT, #name))

static inline void ok(const struct rank *rank, const char *what) {
    if (rank->rank == 0) {
        printf("ok %s\n", what);
        fflush(stdout);
    }
}

static inline void skipped(const struct rank *rank, const char *what) {
    if (rank->rank == 0) {
        printf("skip %s: not in NCCL %d\n", what, rank->version);
        fflush(stdout);
    }
}

static inline void barrier(const struct rank *rank) {
    pthread_barrier_wait(&rank->shared->barrier);
}

/* A fresh unique id, made by `root` and known to all. */
static inline ncclUniqueId fresh_id(const struct rank *rank, int slot, int root) {
    if (rank->rank == root)
        NCCL(ncclGetUniqueId(&rank->shared->id[slot]));
    barrier(rank);
    ncclUniqueId id = rank->shared->id[slot];
    barrier(rank);
    return id;
}

static inline ncclComm_t world(const struct rank *rank) {
    ncclComm_t comm;
    NCCL(ncclCommInitRank(&comm, rank->count, fresh_id(rank, 0, 0), rank->rank));
    return comm;
}

static inline void *device_bytes(size_t bytes) {
    CUdeviceptr pointer;
    CUDA(cuMemAlloc_v2(&pointer, bytes));
    return (void *)pointer;
}

static inline void device_free(void *pointer) { CUDA(cuMemFree_v2((CUdeviceptr)pointer)); }

static inline void upload(void *device, const void *host, size_t bytes) {
    CUDA(cuMemcpyHtoD_v2((CUdeviceptr)device, host, bytes));
}

static inline void download(void *host, const void *device, size_t bytes) {
    CUDA(cuMemcpyDtoH_v2(host, (CUdeviceptr)device, bytes));
}

static inline CUstream new_stream(void) {
    CUstream stream;
    CUDA(cuStreamCreate(&stream, 1 /* non-blocking */));
    return stream;
}

static inline void finish(CUstream stream) { CUDA(cuStreamSynchronize(stream)); }

/* For looking whether something that must hang does: there is nothing to wait for. */
static inline void watch(int milliseconds) {
    struct timespec time = {milliseconds / 1000, milliseconds % 1000 * 1000000L};
    nanosleep(&time, NULL);
}

static inline ncclResult_t async_error(ncclComm_t comm) {
    ncclResult_t state;
    NCCL(ncclCommGetAsyncError(comm, &state));
    return state;
}

/* Until a non-blocking communicator has done what it was asked. */
static inline ncclResult_t settled(ncclComm_t comm) {
    ncclResult_t state;
    while ((state = async_error(comm)) == ncclInProgress)
        watch(1);
    return state;
}

/* How many threads of this process have a name that begins so. */
static inline int threads_named(const char *prefix) {
    int count = 0;
    DIR *tasks = opendir("/proc/self/task");
    for (struct dirent *task; (task = readdir(tasks)) != NULL;) {
        char path[320], name[32] = "";
        snprintf(path, sizeof path, "/proc/self/task/%s/comm", task->d_name);
        FILE *file = fopen(path, "r");
        if (file == NULL)
            continue;
        count += fgets(name, sizeof name, file) && strncmp(name, prefix, strlen(prefix)) == 0;
        fclose(file);
    }
    closedir(tasks);
    return count;
}

static inline int open_sockets(void) {
    int count = 0;
    DIR *descriptors = opendir("/proc/self/fd");
    for (struct dirent *one; (one = readdir(descriptors)) != NULL;) {
        char target[64] = "";
        if (readlinkat(dirfd(descriptors), one->d_name, target, sizeof target - 1) > 0)
            count += strncmp(target, "socket:", 7) == 0;
    }
    closedir(descriptors);
    return count;
}

static inline void say_what_it_runs_on(struct rank *self) {
    char name[128] = "";
    int driver = 0;
    CUDA(cuDeviceGetName(name, sizeof name, 0));
    CUDA(cuDriverGetVersion(&driver));
    NCCL(ncclGetVersion(&self->version));
    if (self->rank == 0) {
        bool simulated = dlsym(RTLD_DEFAULT, "simcuda_enqueue") != NULL;
        printf("%s: %s, CUDA %d.%d, NCCL %d.%d.%d\n", simulated ? "simulated" : "real", name,
               driver / 1000, driver % 1000 / 10, self->version / 10000, self->version / 100 % 100,
               self->version % 100);
        fflush(stdout);
    }
}

static inline void run_one(struct rank *self, void (*body)(struct rank *)) {
    char host[16];
    CUcontext context;
    snprintf(host, sizeof host, "rank%d", self->rank);
    setenv("NCCL_HOSTID", host, 0);
    CUDA(cuInit(0));
    CUDA(cuDevicePrimaryCtxRetain(&context, 0));
    CUDA(cuCtxSetCurrent(context));
    say_what_it_runs_on(self);
    body(self);
    exit(0);
}

/* Runs body in `count` processes; the exit status of the program. A rank killed by `killed` is as it
   should be (0: none). */
static inline int run_ranks(int count, void (*body)(struct rank *), int killed) {
    static const char *const settings[][2] = {
        {"NCCL_SOCKET_IFNAME", "lo"}, {"NCCL_NET", "Socket"},      {"NCCL_IB_DISABLE", "1"},
        {"NCCL_P2P_DISABLE", "1"},    {"NCCL_SHM_DISABLE", "1"},   {"NCCL_NVLS_ENABLE", "0"},
        {"NCCL_RAS_ENABLE", "0"},     {"NCCL_CUMEM_ENABLE", "0"},  {"NCCL_CUMEM_HOST_ENABLE", "0"},
        {"NCCL_MAX_CTAS", "2"},       {"NCCL_NET_PLUGIN", "none"}, {"NCCL_SET_THREAD_NAME", "1"},
    };
    int status = 0;
    pid_t children[MAX_RANKS];
    for (size_t one = 0; one < sizeof settings / sizeof *settings; one++)
        setenv(settings[one][0], settings[one][1], 0);
    struct shared *shared =
        mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pthread_barrierattr_t attributes;
    pthread_barrierattr_init(&attributes);
    pthread_barrierattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_barrier_init(&shared->barrier, &attributes, (unsigned)count);
    for (int rank = 0; rank < count; rank++) {
        children[rank] = fork();
        if (children[rank] == 0)
            run_one(&(struct rank){.rank = rank, .count = count, .shared = shared}, body);
    }
    for (int left = count; left > 0; left--) {
        int how;
        pid_t child = wait(&how);
        if ((WIFEXITED(how) && WEXITSTATUS(how) == 0) ||
            (killed != 0 && WIFSIGNALED(how) && WTERMSIG(how) == killed))
            continue;
        fprintf(stderr, "a rank (pid %d) ended with status %#x\n", (int)child, how);
        for (int rank = 0; status == 0 && rank < count; rank++)
            if (children[rank] != child)
                kill(children[rank], SIGKILL); /* the others would wait for it for ever */
        status = 1;
        killed = SIGKILL;
    }
    munmap(shared, sizeof *shared);
    return status;
}

#endif
