/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A rank that a test controls: commanded FOLDER RANK COUNT. It reads commands from stdin, one per
 * line, and answers each with "COMMAND: RESULT". The result of an NCCL call is its number.
 * Communicators have names.
 */
#include <dlfcn.h>

#include "rank.h"

#define N 16

static struct {
    char name[32];
    ncclComm_t comm;
} table[16];

static cudaStream_t stream;
static float *data;
static cudaGraph_t graph;
static cudaGraphExec_t executable;
static ncclWindow_t window;

static ncclComm_t *named(const char *name) {
    for (int i = 0; i < 16; i++)
        if (table[i].name[0] == '\0' || strcmp(table[i].name, name) == 0) {
            snprintf(table[i].name, sizeof table[i].name, "%s", name);
            return &table[i].comm;
        }
    abort();
}

static void fill(float value) {
    float host[N];
    for (int i = 0; i < N; i++)
        host[i] = value;
    CHECK(cudaMemcpy(data, host, sizeof host, cudaMemcpyHostToDevice));
}

static ncclResult_t sum(ncclComm_t comm, cudaStream_t on) {
    return ncclAllReduce(data, data, N, ncclFloat32, ncclSum, comm, on);
}

/* Returns the sum of the members' ranks, counted from 1. */
static int summed(ncclComm_t comm) {
    float host[N];
    fill((float)own + 1);
    if (sum(comm, stream) != ncclSuccess)
        return -1;
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaMemcpy(host, data, sizeof host, cudaMemcpyDeviceToHost));
    return (int)host[N - 1];
}

static int capture(ncclComm_t comm) {
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    CHECK(sum(comm, stream));
    CHECK(cudaStreamEndCapture(stream, &graph));
    return cudaGraphInstantiate(&executable, graph, 0);
}

static int drop(void) {
    CHECK(cudaGraphExecDestroy(executable));
    return cudaGraphDestroy(graph);
}

/* Makes a communicator by functions that no preloaded library can replace. */
static int use_unseen_communicator(void) {
    void *library = dlopen("libnccl.so.2", RTLD_NOLOAD | RTLD_LAZY);
    ncclResult_t (*get)(ncclUniqueId *) = dlsym(library, "pncclGetUniqueId");
    ncclResult_t (*make)(ncclComm_t *, int, ncclUniqueId, int) =
        dlsym(library, "pncclCommInitRank");
    ncclUniqueId id;
    ncclComm_t comm;
    CHECK(get(&id));
    CHECK(make(&comm, 1, id, 0));
    return sum(comm, stream);
}

/* Does what NCCL's own threads do when a communicator ends: they deregister their windows by NCCL's
   exported functions. */
static void *unregister(void *comm) {
    CHECK(ncclCommWindowDeregister(comm, NULL));
    return NULL;
}

static int deregister_as_nccl(void) {
    void *library = dlopen("libnccl.so.2", RTLD_NOLOAD | RTLD_LAZY);
    ncclResult_t (*get)(ncclUniqueId *) = dlsym(library, "pncclGetUniqueId");
    ncclResult_t (*make)(ncclComm_t *, int, ncclUniqueId, int) =
        dlsym(library, "pncclCommInitRank");
    ncclResult_t (*destroy)(ncclComm_t) = dlsym(library, "pncclCommDestroy");
    ncclUniqueId id;
    ncclComm_t comm;
    pthread_t thread;
    CHECK(get(&id));
    CHECK(make(&comm, 1, id, 0));
    CHECK(pthread_create(&thread, NULL, unregister, comm));
    CHECK(pthread_join(thread, NULL));
    return destroy(comm);
}

static int estimate(ncclComm_t comm) {
    ncclSimInfo_t info = {sizeof info, NCCL_SIM_INFO_MAGIC, 22907, -1};
    CHECK(ncclGroupStart());
    CHECK(sum(comm, stream));
    CHECK(sum(comm, stream));
    return ncclGroupSimulateEnd(&info);
}

static int window_pointer(ncclComm_t comm) {
    void *pointer;
    CHECK(ncclCommWindowRegister(comm, data, N * sizeof(float), &window, 0));
    return ncclWinGetUserPtr(comm, window, &pointer);
}

static int device_communicator(ncclComm_t comm) {
    static char wants[4096], out[4096];
    return ncclDevCommCreate(comm, wants, out);
}

/* To the next and from the one before, in a group within a group; what came, from 1. */
static int ring(ncclComm_t comm) {
    float host[N];
    fill((float)own + 1);
    CHECK(ncclGroupStart());
    CHECK(ncclSend(data, N / 2, ncclFloat32, (own + 1) % count, comm, stream));
    CHECK(ncclGroupStart());
    CHECK(ncclRecv(data + N / 2, N / 2, ncclFloat32, (own + count - 1) % count, comm, stream));
    CHECK(ncclGroupEnd());
    CHECK(ncclGroupEnd());
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaMemcpy(host, data, sizeof host, cudaMemcpyDeviceToHost));
    return (int)host[N - 1];
}

/* A factor for one sum, made and gone with it. */
static int scaled(ncclComm_t comm) {
    float host[N], two = 2;
    ncclRedOp_t twice;
    fill((float)own + 1);
    CHECK(ncclRedOpCreatePreMulSum(&twice, &two, ncclFloat32, ncclScalarHostImmediate, comm));
    CHECK(ncclAllReduce(data, data, N, ncclFloat32, twice, comm, stream));
    CHECK(ncclRedOpDestroy(twice, comm));
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaMemcpy(host, data, sizeof host, cudaMemcpyDeviceToHost));
    return (int)host[N - 1];
}

static int async_error(ncclComm_t comm) {
    ncclResult_t error = ncclInternalError;
    CHECK(ncclCommGetAsyncError(comm, &error));
    return (int)error;
}

static int encrypt(void) {
    ncclResult_t (*set)(const ncclEncryptionConfig_t *) = dlsym(RTLD_DEFAULT, "ncclSetEncryption");
    ncclEncryptionConfig_t config = {sizeof config, NCCL_API_MAGIC, 23203, 0, NULL};
    return set(&config);
}

static int obey(const char *command, const char *name) {
    ncclComm_t *comm = named(name);
    if (strcmp(command, "init") == 0)
        return ncclCommInitRank(comm, count, shared_id(name), own);
    if (strcmp(command, "split") == 0)
        return ncclCommSplit(*named("world"), 0, own, comm, NULL);
    if (strcmp(command, "sum") == 0)
        return summed(*comm);
    if (strcmp(command, "ring") == 0)
        return ring(*comm);
    if (strcmp(command, "scaled") == 0)
        return scaled(*comm);
    if (strcmp(command, "enqueue") == 0)
        return sum(*comm, stream);
    if (strcmp(command, "per-thread") == 0)
        return sum(*comm, (cudaStream_t)2);
    if (strcmp(command, "default") == 0)
        return sum(*comm, NULL);
    if (strcmp(command, "sync") == 0)
        return cudaDeviceSynchronize();
    if (strcmp(command, "capture") == 0)
        return capture(*comm);
    if (strcmp(command, "drop") == 0)
        return drop();
    if (strcmp(command, "foreign") == 0)
        return use_unseen_communicator();
    if (strcmp(command, "estimate") == 0)
        return estimate(*comm);
    if (strcmp(command, "inner") == 0)
        return deregister_as_nccl();
    if (strcmp(command, "window") == 0)
        return window_pointer(*comm);
    if (strcmp(command, "device") == 0)
        return device_communicator(*comm);
    if (strcmp(command, "suspend") == 0)
        return ncclCommSuspend(*comm, NCCL_SUSPEND_MEM);
    if (strcmp(command, "resume") == 0)
        return ncclCommResume(*comm);
    if (strcmp(command, "signal") == 0)
        return ncclSignal((own + 1) % count, 0, 0, 0, *comm, stream);
    if (strcmp(command, "revoke") == 0)
        return ncclCommRevoke(*comm, 0);
    if (strcmp(command, "encrypt") == 0)
        return encrypt();
    if (strcmp(command, "error") == 0)
        return async_error(*comm);
    if (strcmp(command, "finalize") == 0)
        return ncclCommFinalize(*comm);
    if (strcmp(command, "destroy") == 0)
        return ncclCommDestroy(*comm);
    if (strcmp(command, "abort") == 0)
        return ncclCommAbort(*comm);
    return -2;
}

int main(int argc, char **argv) {
    begin(argc, argv);
    CHECK(cudaStreamCreateWithFlags(&stream, 1));
    data = device_floats(N);
    printf("begun\n");
    char line[100], command[32], name[32];
    while (fgets(line, sizeof line, stdin) != NULL) {
        snprintf(name, sizeof name, "world");
        if (sscanf(line, "%31s %31s", command, name) > 0)
            printf("%s: %d\n", command, obey(command, name));
    }
    return 0;
}
