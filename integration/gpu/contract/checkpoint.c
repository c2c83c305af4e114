/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cuCheckpointProcess*: a child works with its GPU, the parent locks, checkpoints, restores and
 * unlocks it by its pid, as liveshift's helper does. Needs root, and driver 580 or later.
 */
#include "contract.h"

#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#define BYTES ((size_t)3 << 20)

/* What parent and child share. */
static struct shared {
    /* The child: ready; the parent: check, end. */
    _Atomic int ready, check, checked, end;
    /* Rounds that the child's other thread made through the API. */
    _Atomic int rounds;
    /* A host function that takes its time: on demand, until let go. */
    _Atomic int slow, begun, go, slow_done;
} *shared;

static void slow_function(void *unused) {
    (void)unused;
    shared->begun = 1;
    while (!shared->go)
        usleep(500);
    shared->slow_done = 1;
}

static void *rounds(void *unused) {
    void *p;
    WORKS(cudaSetDevice(0));
    while (!shared->end) {
        WORKS(cudaMalloc(&p, 4096));
        WORKS(cudaFree(p));
        shared->rounds++;
        usleep(1000);
    }
    return unused;
}

static char *map_physical(void) {
    CUmemAllocationProp p = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                             .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
    CUmemAccessDesc access = {{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUmemGenericAllocationHandle handle;
    CUdeviceptr at;
    size_t grain;
    WORKS(cuMemGetAllocationGranularity(&grain, &p, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
    size_t size = (BYTES + grain - 1) / grain * grain;
    WORKS(cuMemAddressReserve(&at, 2 * size, 0, 0, 0));
    WORKS(cuMemCreate(&handle, size, &p, 0));
    WORKS(cuMemMap(at, size, 0, handle, 0));
    WORKS(cuMemSetAccess(at, size, &access, 1));
    return (char *)(uintptr_t)at;
}

/* A pattern that shows whose memory it is and where in it. */
static void fill(char *pinned, int which) {
    for (size_t i = 0; i < BYTES; i += 4) {
        unsigned int word = (unsigned int)i * 2654435761u + (unsigned int)which;
        memcpy(pinned + i, &word, 4);
    }
}

static int child(void) {
    char *memory[3], *pinned, *expected = malloc(BYTES);
    cudaStream_t stream;
    cudaEvent_t event;
    pthread_t thread;
    WORKS(cudaMalloc((void **)&memory[0], BYTES));
    WORKS(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    WORKS(cudaEventCreate(&event));
    WORKS(cudaMallocAsync((void **)&memory[1], BYTES, stream));
    memory[2] = map_physical();
    WORKS(cudaMallocHost((void **)&pinned, BYTES));
    for (int i = 0; i < 3; i++) {
        fill(pinned, i);
        WORKS(cudaMemcpyAsync(memory[i], pinned, BYTES, cudaMemcpyHostToDevice, stream));
        WORKS(cudaStreamSynchronize(stream));
    }
    MUST(pthread_create(&thread, NULL, rounds, NULL) == 0);
    shared->ready = 1;
    while (!shared->end) {
        usleep(500);
        if (shared->slow) {
            shared->slow = 0;
            WORKS(cudaLaunchHostFunc(stream, slow_function, NULL));
        }
        if (!shared->check)
            continue;
        for (int i = 0; i < 3; i++) {
            memset(pinned, 0, BYTES);
            WORKS(cudaMemcpyAsync(pinned, memory[i], BYTES, cudaMemcpyDeviceToHost, stream));
            WORKS(cudaEventRecord(event, stream));
            WORKS(cudaEventSynchronize(event));
            fill(expected, i);
            MUST(memcmp(pinned, expected, BYTES) == 0);
        }
        shared->check = 0;
        shared->checked++;
    }
    pthread_join(thread, NULL);
    WORKS(cudaDeviceSynchronize());
    free(expected);
    return 0;
}

static void until(_Atomic int *value, int least) {
    for (double end = now() + 30; *value < least;) {
        MUST(now() < end);
        usleep(500);
    }
}

static void check_content(void) {
    int before = shared->checked;
    shared->check = 1;
    until(&shared->checked, before + 1);
}

static CUprocessState state(int pid) {
    CUprocessState is;
    WORKS(cuCheckpointProcessGetState(pid, &is));
    return is;
}

static CUresult lock(int pid, unsigned int timeout_ms) {
    CUcheckpointLockArgs args = {.timeoutMs = timeout_ms};
    return cuCheckpointProcessLock(pid, &args);
}

static void cycle(int pid) {
    int tid = 0;
    char path[64];
    WORKS(cuCheckpointProcessGetRestoreThreadId(pid, &tid));
    snprintf(path, sizeof path, "/proc/%d/task/%d", pid, tid);
    MUST(access(path, F_OK) == 0);
    ok("the restore thread is one of the process");

    MUST(state(pid) == CU_PROCESS_STATE_RUNNING);
    GIVES(CUDA_ERROR_ILLEGAL_STATE, cuCheckpointProcessCheckpoint(pid, NULL));
    GIVES(CUDA_ERROR_ILLEGAL_STATE, cuCheckpointProcessRestore(pid, NULL));
    GIVES(CUDA_ERROR_ILLEGAL_STATE, cuCheckpointProcessUnlock(pid, NULL));
    WORKS(lock(pid, 10000));
    MUST(state(pid) == CU_PROCESS_STATE_LOCKED);
    int rounds = shared->rounds;
    usleep(50000);
    /* One may have been between the call and the count. */
    MUST(shared->rounds <= rounds + 1);
    GIVES(CUDA_ERROR_ILLEGAL_STATE, lock(pid, 0));
    WORKS(cuCheckpointProcessUnlock(pid, NULL));
    MUST(state(pid) == CU_PROCESS_STATE_RUNNING);
    until(&shared->rounds, rounds + 3);
    ok("locked, calls wait; unlocked, they go on");

    for (int i = 0; i < 2; i++) {
        WORKS(lock(pid, 10000));
        WORKS(cuCheckpointProcessCheckpoint(pid, NULL));
        MUST(state(pid) == CU_PROCESS_STATE_CHECKPOINTED);
        GIVES(CUDA_ERROR_ILLEGAL_STATE, cuCheckpointProcessUnlock(pid, NULL));
        GIVES(CUDA_ERROR_ILLEGAL_STATE, lock(pid, 0));
        rounds = shared->rounds;
        usleep(50000);
        MUST(shared->rounds <= rounds + 1);
        WORKS(cuCheckpointProcessRestore(pid, NULL));
        MUST(state(pid) == CU_PROCESS_STATE_LOCKED);
        WORKS(cuCheckpointProcessUnlock(pid, NULL));
        check_content();
        until(&shared->rounds, rounds + 3);
    }
    ok("checkpointed and restored, memory of all kinds is what it was, where it was");
}

static void draining(int pid) {
    shared->slow = 1;
    until(&shared->begun, 1);
    GIVES(CUDA_ERROR_NOT_READY, lock(pid, 200));
    MUST(state(pid) == CU_PROCESS_STATE_RUNNING);
    int rounds = shared->rounds;
    /* cudaFree waits for the device, so rounds go on only once the function ends. */
    shared->go = 1;
    until(&shared->rounds, rounds + 3);
    ok("a lock that runs out of time leaves the process running");

    shared->begun = shared->go = shared->slow_done = 0;
    shared->slow = 1;
    until(&shared->begun, 1);
    pid_t opener = fork();
    if (opener == 0) {
        usleep(200000);
        shared->go = 1;
        _exit(0);
    }
    WORKS(lock(pid, 20000));
    MUST(shared->slow_done);
    WORKS(cuCheckpointProcessUnlock(pid, NULL));
    waitpid(opener, NULL, 0);
    ok("a lock waits for submitted work, host functions too");
}

static void maps(int pid) {
    int count;
    WORKS(cuDeviceGetCount(&count));
    CUcheckpointGpuPair *pairs = calloc((size_t)count, sizeof *pairs);
    for (int i = 0; i < count; i++) {
        WORKS(cuDeviceGetUuid_v2(&pairs[i].oldUuid, i));
        pairs[i].newUuid = pairs[i].oldUuid;
    }
    CUcheckpointRestoreArgs args = {.gpuPairs = pairs, .gpuPairsCount = (unsigned int)count};
    WORKS(lock(pid, 10000));
    WORKS(cuCheckpointProcessCheckpoint(pid, NULL));
    pairs[0].newUuid.bytes[0] ^= 1;
    GIVES(CUDA_ERROR_INVALID_VALUE, cuCheckpointProcessRestore(pid, &args));
    MUST(state(pid) == CU_PROCESS_STATE_CHECKPOINTED);
    pairs[0].newUuid.bytes[0] ^= 1;
    WORKS(cuCheckpointProcessRestore(pid, &args));
    WORKS(cuCheckpointProcessUnlock(pid, NULL));
    check_content();
    free(pairs);
    ok("a map to a GPU that isn't there is refused; identity is taken");
}

static void *lock_it(void *pid) { return (void *)(intptr_t)lock((int)(intptr_t)pid, 0); }

static void *ask_it(void *pid) {
    CUprocessState is;
    return (void *)(intptr_t)cuCheckpointProcessGetState((int)(intptr_t)pid, &is);
}

/* A call on a stopped process has not returned after a second, and works once it goes on. */
static void waits(int pid, void *(*call)(void *)) {
    pthread_t thread;
    void *result;
    struct timespec soon;
    kill(pid, SIGSTOP);
    waitpid(pid, NULL, WUNTRACED);
    MUST(pthread_create(&thread, NULL, call, (void *)(intptr_t)pid) == 0);
    clock_gettime(CLOCK_REALTIME, &soon);
    soon.tv_sec++;
    MUST(pthread_timedjoin_np(thread, &result, &soon) != 0);
    kill(pid, SIGCONT);
    pthread_join(thread, &result);
    WORKS((intptr_t)result);
}

static void stopped(int pid) {
    int tid;
    waits(pid, lock_it);
    WORKS(cuCheckpointProcessUnlock(pid, NULL));
    check_content();
    ok("operations on a stopped process wait until it goes on");

    kill(pid, SIGSTOP);
    waitpid(pid, NULL, WUNTRACED);
    WORKS(cuCheckpointProcessGetRestoreThreadId(pid, &tid));
    kill(pid, SIGCONT);
    ok("the restore thread of a stopped process is known");

    WORKS(lock(pid, 10000));
    WORKS(cuCheckpointProcessCheckpoint(pid, NULL));
    waits(pid, ask_it);
    WORKS(cuCheckpointProcessRestore(pid, NULL));
    WORKS(cuCheckpointProcessUnlock(pid, NULL));
    check_content();
    ok("the driver tells the state of a stopped process once the process goes on");
}

/* Driver 580: what it can't take along. The child is given up afterwards. */
static int with_managed_memory(void) {
    void *p;
    WORKS(cudaMallocManaged(&p, 4096, cudaMemAttachGlobal));
    shared->ready = 1;
    while (!shared->end)
        pause();
    return 0;
}

static pid_t spawn(int (*what)(void)) {
    memset(shared, 0, sizeof *shared);
    pid_t pid = fork();
    if (pid == 0) {
        /* A difference ends the parent; who is left would keep its output open. */
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        _exit(what());
    }
    until(&shared->ready, 1);
    return pid;
}

static void *by_itself(void *unused) {
    WORKS(lock(getpid(), 10000));
    WORKS(cuCheckpointProcessCheckpoint(getpid(), NULL));
    WORKS(cuCheckpointProcessRestore(getpid(), NULL));
    WORKS(cuCheckpointProcessUnlock(getpid(), NULL));
    return unused;
}

static int alone(void) {
    pthread_t thread;
    char *p, back[4] = {0};
    WORKS(cudaMalloc((void **)&p, 4096));
    WORKS(cudaMemset(p, 6, 4096));
    MUST(pthread_create(&thread, NULL, by_itself, NULL) == 0);
    pthread_join(thread, NULL);
    WORKS(cudaMemcpy(back, p, 4, cudaMemcpyDeviceToHost));
    MUST(back[3] == 6);
    shared->ready = 1;
    return 0;
}

static int without_cuda(void) {
    shared->ready = 1;
    while (!shared->end)
        pause();
    return 0;
}

int main(void) {
    int status;
    CUprocessState none;
    shared = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    /* Children first: what forks after cuInit can't use CUDA. */
    pid_t lone = spawn(alone);
    MUST(waitpid(lone, &status, 0) == lone && status == 0);
    pid_t managed = spawn(with_managed_memory), plain = spawn(without_cuda), pid = spawn(child);
    say_where();
    ok("a process checkpoints itself from another thread");
    MUST(cuCheckpointProcessGetState(plain, &none) != CUDA_SUCCESS);
    MUST(lock(plain, 0) != CUDA_SUCCESS);
    kill(plain, SIGKILL);
    waitpid(plain, NULL, 0);
    MUST(cuCheckpointProcessGetState(plain, &none) != CUDA_SUCCESS);
    ok("a process without CUDA, or none, is an error");

    cycle(pid);
    draining(pid);
    maps(pid);
    stopped(pid);
    shared->end = 1;
    MUST(waitpid(pid, &status, 0) == pid && status == 0);

    WORKS(lock(managed, 10000));
    GIVES(CUDA_ERROR_NOT_SUPPORTED, cuCheckpointProcessCheckpoint(managed, NULL));
    kill(managed, SIGKILL);
    waitpid(managed, NULL, 0);
    ok("managed memory can't be checkpointed");
    return 0;
}
