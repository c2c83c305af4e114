/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Holds device state that a test examines: `holder STORY` does the story's steps. After each it
 * prints what it has ("step 1 …"), and goes on when it reads a line. It is linked with the CUDA
 * double and not with liveshift, and runs on real CUDA as well.
 */
#include "cudart_abi.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MIB ((size_t)1 << 20)

#define OK(call)                                                                                   \
    do {                                                                                           \
        int result_ = (int)(call);                                                                 \
        if (result_ != 0) {                                                                        \
            fprintf(stderr, "%s:%d: %s: %d\n", __FILE__, __LINE__, #call, result_);                \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

#define FAILS(call)                                                                                \
    do {                                                                                           \
        if ((int)(call) == 0) {                                                                    \
            fprintf(stderr, "%s:%d: %s: did not fail\n", __FILE__, __LINE__, #call);               \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

static void step(const char *text) {
    char line[16];
    printf("step %s\n", text);
    fflush(stdout);
    if (fgets(line, sizeof line, stdin) == NULL)
        exit(2);
}

static void memory(void) {
    void *plain, *pitched, *pool, *managed, *pinned, *host, *own = aligned_alloc(4096, MIB);
    size_t pitch;
    cudaStream_t stream;
    OK(cudaMalloc(&plain, 3 * MIB));
    OK(cudaMallocPitch(&pitched, &pitch, 1000, 16));
    OK(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, -1));
    OK(cudaMallocAsync(&pool, 2 * MIB, stream));
    OK(cudaMallocManaged(&managed, MIB, cudaMemAttachGlobal));
    OK(cudaHostAlloc(&pinned, 5 * MIB, cudaHostAllocPortable));
    OK(cudaMallocHost(&host, MIB));
    OK(cudaHostRegister(own, MIB, 0));
    FAILS(cudaMalloc(&(void *){NULL}, (size_t)1 << 50));
    FAILS(cudaFree((void *)0x10));
    OK(cudaFree(NULL));
    char text[64];
    snprintf(text, sizeof text, "held %p %zu %p", plain, pitch * 16, (void *)stream);
    step(text);
    OK(cudaFree(plain));
    OK(cudaFree(pitched));
    OK(cudaFreeAsync(pool, stream));
    OK(cudaFree(managed));
    OK(cudaFreeHost(pinned));
    OK(cudaFreeHost(host));
    OK(cudaHostUnregister(own));
    OK(cudaStreamDestroy(stream));
    step("freed");
}

/* The driver's functions as PyTorch's expandable segments get them. */
#define ENTRY(name)                                                                                \
    __typeof__(&name) p_##name = NULL;                                                             \
    enum cudaDriverEntryPointQueryResult status_##name;                                            \
    OK(cudaGetDriverEntryPointByVersion(#name, (void **)&p_##name, 12000, 0, &status_##name));     \
    OK(status_##name)

static void segments(void) {
    ENTRY(cuMemAddressReserve);
    ENTRY(cuMemAddressFree);
    ENTRY(cuMemCreate);
    ENTRY(cuMemRelease);
    ENTRY(cuMemMap);
    ENTRY(cuMemUnmap);
    ENTRY(cuMemSetAccess);
    ENTRY(cuMemExportToShareableHandle);
    ENTRY(cuMemImportFromShareableHandle);
    ENTRY(cuMemRetainAllocationHandle);
    enum { PIECES = 4 };
    size_t piece = 2 * MIB;
    CUdeviceptr base;
    CUmemGenericAllocationHandle handles[PIECES], again;
    CUmemAllocationProp properties = {.type = CU_MEM_ALLOCATION_TYPE_PINNED};
    properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    OK(cudaFree(NULL)); /* makes the context */
    OK(p_cuMemAddressReserve(&base, 64 * MIB, 0, 0, 0));
    for (int i = 0; i < PIECES; i++) {
        OK(p_cuMemCreate(&handles[i], piece, &properties, 0));
        OK(p_cuMemMap(base + (size_t)i * piece, piece, 0, handles[i], 0));
    }
    CUmemAccessDesc access = {properties.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    OK(p_cuMemSetAccess(base, PIECES * piece, &access, 1));
    step("mapped");
    OK(p_cuMemRelease(handles[0])); /* it stays, since it is mapped */
    OK(p_cuMemRetainAllocationHandle(&again, (void *)(base + piece)));
    OK(p_cuMemRelease(handles[1])); /* it stays, since another handle exists */
    OK(p_cuMemUnmap(base + piece, piece));
    step("released");
    int fd = -1;
    OK(p_cuMemExportToShareableHandle(&fd, handles[2], CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                      0));
    CUmemGenericAllocationHandle imported;
    OK(p_cuMemImportFromShareableHandle(&imported, (void *)(intptr_t)fd,
                                        CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
    step("shared");
    if (imported != handles[2])
        OK(p_cuMemRelease(imported));
    close(fd);
    OK(p_cuMemUnmap(base, piece));
    OK(p_cuMemUnmap(base + 2 * piece, 2 * piece)); /* two mappings at once */
    OK(p_cuMemRelease(again));
    OK(p_cuMemRelease(handles[2]));
    OK(p_cuMemRelease(handles[3]));
    OK(p_cuMemAddressFree(base, 64 * MIB));
    step("freed");
}

/* Gets the driver's own API in three ways: linked, by its resolver, and by the resolver that the
   resolver finds. */
static void driver(void) {
    __typeof__(&cuMemAlloc_v2) alloc = NULL, again = NULL, old = NULL;
    __typeof__(&cuGetProcAddress_v2) resolve = NULL;
    CUdeviceptr linked, resolved, twice, pinned;
    OK(cudaFree(NULL));
    OK(cuMemAlloc_v2(&linked, MIB));
    OK(cuGetProcAddress_v2("cuMemAlloc", (void **)&alloc, 12000, 0, NULL));
    OK(alloc(&resolved, 2 * MIB));
    OK(cuGetProcAddress("cuGetProcAddress", (void **)&resolve, 12000, 0));
    OK(resolve("cuMemAlloc", (void **)&again, 13000, 0, NULL));
    OK(again(&twice, 3 * MIB));
    OK(cuMemAllocHost_v2((void **)&pinned, 4 * MIB));
    FAILS(cuGetProcAddress_v2("cuNothing", (void **)&old, 12000, 0, NULL) == 0 && old != NULL ? 0
                                                                                              : 1);
    step("held");
    OK(cuMemFree_v2(linked));
    OK(cuMemFree_v2(resolved));
    OK(cudaFree((void *)twice)); /* the two APIs free each other's memory */
    OK(cuMemFreeHost((void *)pinned));
    step("freed");
}

static void shared(void) {
    void *pointer;
    cudaIpcMemHandle_t handle;
    int out[2], in[2];
    if (pipe(out) != 0 || pipe(in) != 0)
        exit(2);
    pid_t child = fork(); /* before CUDA is used, so the child can use CUDA, too */
    if (child == 0) {
        void *opened, *twice;
        char word;
        if (read(out[0], &handle, sizeof handle) != sizeof handle)
            _exit(2);
        OK(cudaIpcOpenMemHandle(&opened, handle, cudaIpcMemLazyEnablePeerAccess));
        OK(cudaIpcOpenMemHandle(&twice, handle, cudaIpcMemLazyEnablePeerAccess));
        OK(cudaIpcCloseMemHandle(twice));
        if (write(in[1], "o", 1) != 1 || read(out[0], &word, 1) != 1)
            _exit(2);
        OK(cudaIpcCloseMemHandle(opened));
        if (write(in[1], "c", 1) != 1 || read(out[0], &word, 1) != 1)
            _exit(2);
        _exit(0);
    }
    char word;
    OK(cudaMalloc(&pointer, MIB));
    OK(cudaIpcGetMemHandle(&handle, pointer));
    OK(cudaIpcGetMemHandle(&handle, pointer));
    if (write(out[1], &handle, sizeof handle) != sizeof handle || read(in[0], &word, 1) != 1)
        exit(2);
    char text[32];
    snprintf(text, sizeof text, "opened %d", child);
    step(text);
    if (write(out[1], "x", 1) != 1 || read(in[0], &word, 1) != 1)
        exit(2);
    OK(cudaFree(pointer));
    step("closed");
    if (write(out[1], "x", 1) != 1)
        exit(2);
    waitpid(child, NULL, 0);
}

static void nothing(void *argument) { (void)argument; }

static void work(void) {
    cudaStream_t streams[3];
    cudaEvent_t events[5];
    cudaGraph_t graph, made;
    cudaGraphExec_t exec;
    for (int i = 0; i < 3; i++)
        OK(cudaStreamCreateWithFlags(&streams[i], cudaStreamNonBlocking));
    for (int i = 0; i < 5; i++)
        OK(cudaEventCreateWithFlags(&events[i], cudaEventDisableTiming));
    OK(cudaStreamDestroy(streams[1]));
    OK(cudaEventDestroy(events[0]));
    OK(cudaStreamBeginCapture(streams[0], cudaStreamCaptureModeRelaxed));
    OK(cudaLaunchHostFunc(streams[0], nothing, NULL));
    /* Does what the NCCL adapter does when an operation is enqueued on the stream, if the test
       exports that function. */
    void (*has_nccl)(uint64_t) = (void (*)(uint64_t))dlsym(RTLD_DEFAULT, "ledger_capture_has_nccl");
    if (has_nccl != NULL)
        has_nccl((uint64_t)streams[0]);
    step("capturing");
    OK(cudaStreamEndCapture(streams[0], &graph));
    OK(cudaGraphInstantiateWithFlags(&exec, graph, 0));
    OK(cudaGraphCreate(&made, 0));
    step("captured");
    OK(cudaGraphDestroy(graph));
    OK(cudaGraphDestroy(made));
    step("half-destroyed");
    OK(cudaGraphExecDestroy(exec));
    for (int i = 1; i < 5; i++)
        OK(cudaEventDestroy(events[i]));
    OK(cudaStreamDestroy(streams[0]));
    OK(cudaStreamDestroy(streams[2]));
    step("destroyed");
}

static void reset(void) {
    void *device, *pinned;
    cudaStream_t stream;
    OK(cudaMalloc(&device, MIB));
    OK(cudaMallocHost(&pinned, MIB));
    OK(cudaStreamCreate(&stream));
    step("held");
    OK(cudaDeviceReset());
    step("reset");
}

static unsigned pairs;

static void *pair_after_pair(void *argument) {
    void *held[8] = {NULL};
    (void)argument;
    for (unsigned i = 0; i < pairs; i++) {
        unsigned at = i % 8;
        if (held[at] != NULL)
            OK(cudaFree(held[at]));
        OK(cudaMalloc(&held[at], 512));
    }
    for (unsigned at = 0; at < 8; at++)
        OK(cudaFree(held[at]));
    return NULL;
}

static void threads(unsigned how_many, unsigned each) {
    pthread_t ids[64];
    struct timespec from, to;
    pairs = each;
    OK(cudaFree(NULL));
    clock_gettime(CLOCK_MONOTONIC, &from);
    for (unsigned i = 0; i < how_many; i++)
        pthread_create(&ids[i], NULL, pair_after_pair, NULL);
    for (unsigned i = 0; i < how_many; i++)
        pthread_join(ids[i], NULL);
    clock_gettime(CLOCK_MONOTONIC, &to);
    double ns = (double)(to.tv_sec - from.tv_sec) * 1e9 + (double)(to.tv_nsec - from.tv_nsec);
    char text[64];
    snprintf(text, sizeof text, "ns_per_pair %.1f", ns / each / how_many);
    step(text);
}

/* A child, and then another program in this process's place. */
static void family(char **argv) {
    void *pointer;
    OK(cudaHostAlloc(&pointer, MIB, 0));
    pid_t child = fork();
    if (child == 0)
        _exit(0);
    waitpid(child, NULL, 0);
    char text[32];
    snprintf(text, sizeof text, "forked %d", child);
    step(text);
    execv(argv[0], (char *[]){argv[0], "memory", NULL});
}

int main(int argc, char **argv) {
    const char *story = argc > 1 ? argv[1] : "";
    if (strcmp(story, "memory") == 0)
        memory();
    else if (strcmp(story, "segments") == 0)
        segments();
    else if (strcmp(story, "driver") == 0)
        driver();
    else if (strcmp(story, "shared") == 0)
        shared();
    else if (strcmp(story, "reset") == 0)
        reset();
    else if (strcmp(story, "work") == 0)
        work();
    else if (strcmp(story, "threads") == 0)
        threads((unsigned)atoi(argv[2]), (unsigned)atoi(argv[3]));
    else if (strcmp(story, "family") == 0)
        family(argv);
    else if (strcmp(story, "idle") == 0)
        step("idle");
    else
        return 2;
    return 0;
}
