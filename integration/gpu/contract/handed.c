/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory that one process hands to another by descriptor, and what the driver's checkpoint makes of
 * either. What is printed with "note" liveshift asks at run time, or can do without. Needs root.
 */
#include "contract.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>

static struct shared {
    _Atomic int asked, done; /* the giver's steps */
    _Atomic int taken;
} *shared;
static int ends[2];

static const CUmemAccessDesc read_write = {{CU_MEM_LOCATION_TYPE_DEVICE, 0},
                                           CU_MEM_ACCESS_FLAGS_PROT_READWRITE};

static void send_descriptor(int descriptor) {
    char byte = 0, room[CMSG_SPACE(sizeof(int))] = {0};
    struct iovec part = {&byte, 1};
    struct msghdr message = {
        .msg_iov = &part, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof room};
    struct cmsghdr *head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(head), &descriptor, sizeof descriptor);
    MUST(sendmsg(ends[0], &message, 0) == 1);
}

static int receive_descriptor(void) {
    char byte, room[CMSG_SPACE(sizeof(int))];
    struct iovec part = {&byte, 1};
    struct msghdr message = {
        .msg_iov = &part, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof room};
    int descriptor;
    MUST(recvmsg(ends[1], &message, 0) == 1 && CMSG_FIRSTHDR(&message) != NULL);
    memcpy(&descriptor, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof descriptor);
    return descriptor;
}

static unsigned int word_at(CUdeviceptr pointer) {
    unsigned int word;
    WORKS(cuMemcpyDtoH_v2(&word, pointer, sizeof word));
    return word;
}

static void await_step(int step) {
    while (shared->asked < step)
        usleep(500);
}

static void giver(void) {
    CUmemAllocationProp p = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                             .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                             .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
    CUmemGenericAllocationHandle handle;
    CUdeviceptr at;
    size_t grain;
    int descriptor;
    WORKS(cudaFree(NULL));
    WORKS(cuMemGetAllocationGranularity(&grain, &p, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
    WORKS(cuMemAddressReserve(&at, grain, 0, 0, 0));
    WORKS(cuMemCreate(&handle, grain, &p, 0));
    WORKS(cuMemMap(at, grain, 0, handle, 0));
    WORKS(cuMemRelease(handle));
    WORKS(cuMemSetAccess(at, grain, &read_write, 1));
    WORKS(cuMemsetD32_v2(at, 41, grain / 4));
    WORKS(cuCtxSynchronize());
    shared->done = 1;
    await_step(2); /* checkpointed and restored meanwhile */
    MUST(word_at(at + grain - 4) == 41);
    WORKS(cuMemRetainAllocationHandle(&handle, (void *)(uintptr_t)at));
    WORKS(cuMemExportToShareableHandle(&descriptor, handle,
                                       CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    WORKS(cuMemUnmap(at, grain));
    WORKS(cuMemRelease(handle));
    MUST(cuMemRetainAllocationHandle(&handle, (void *)(uintptr_t)at) != CUDA_SUCCESS);
    send_descriptor(descriptor);
    close(descriptor);
    shared->done = 2;
    for (;;)
        pause();
}

static void taker(void) {
    CUmemGenericAllocationHandle handle;
    CUdeviceptr at;
    CUmemAllocationProp grains = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                  .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
    size_t grain;
    int descriptor = receive_descriptor(), again = -1;
    WORKS(cudaFree(NULL));
    WORKS(cuMemGetAllocationGranularity(&grain, &grains, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
    WORKS(cuMemImportFromShareableHandle(&handle, (void *)(intptr_t)descriptor,
                                         CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
    close(descriptor);
    WORKS(cuMemAddressReserve(&at, grain, 0, 0, 0));
    WORKS(cuMemMap(at, grain, 0, handle, 0));
    WORKS(cuMemSetAccess(at, grain, &read_write, 1));
    MUST(word_at(at) == 41 && word_at(at + grain - 4) == 41);
    note("what was imported is exported again with",
         cuMemExportToShareableHandle(&again, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    if (again >= 0)
        close(again);
    WORKS(cuMemRelease(handle));
    MUST(word_at(at) == 41);
    shared->taken = 1;
    for (;;)
        pause();
}

static pid_t spawn(void (*what)(void)) {
    pid_t pid = fork();
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        what();
    }
    return pid;
}

static void until(_Atomic int *value, int least) {
    for (double end = now() + 30; *value < least;) {
        MUST(now() < end);
        usleep(500);
    }
}

static CUresult lock(pid_t pid) {
    CUcheckpointLockArgs args = {.timeoutMs = 10000};
    return cuCheckpointProcessLock(pid, &args);
}

static void there_and_back(pid_t pid) {
    WORKS(lock(pid));
    WORKS(cuCheckpointProcessCheckpoint(pid, NULL));
    WORKS(cuCheckpointProcessRestore(pid, NULL));
    WORKS(cuCheckpointProcessUnlock(pid, NULL));
}

int main(void) {
    CUprocessState none;
    shared = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    MUST(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
    pid_t gives = spawn(giver), takes = spawn(taker);
    say_where();
    note("the state of a process that is only about to use CUDA is told with",
         cuCheckpointProcessGetState(takes, &none));
    until(&shared->done, 1);
    there_and_back(gives);
    ok("memory that could be exported, and was not, goes along with a checkpoint");
    shared->asked = 2;
    until(&shared->done, 2);
    ok("where nothing is mapped there is no handle");
    until(&shared->taken, 1);
    ok("memory outlives its maker's letting go");
    there_and_back(gives);
    ok("addresses that hold nothing go along with a checkpoint");

    WORKS(lock(takes));
    CUresult given = cuCheckpointProcessCheckpoint(takes, NULL);
    note("a checkpoint with imported memory gives", given);
    if (on_double())
        MUST(given == CUDA_ERROR_NOT_SUPPORTED);
    WORKS(cuCheckpointProcessGetState(takes, &none));
    note("and leaves the process in state", none);
    kill(gives, SIGKILL);
    kill(takes, SIGKILL);
    waitpid(gives, NULL, 0);
    waitpid(takes, NULL, 0);
    return 0;
}
