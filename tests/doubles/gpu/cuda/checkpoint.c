/* SPDX-License-Identifier: Apache-2.0 */
/* cuCheckpointProcess*, the side of the caller; served.c is that of the process that it names. */
#include "control.h"
#include "gate.h"
#include "holders.h"
#include "simcuda.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static bool transfer(int pid, void *mine, size_t offset, size_t bytes, bool write) {
    struct iovec here = {mine, bytes};
    struct iovec there = {(void *)(CONTROL_ADDRESS + offset), bytes};
    ssize_t done = write ? process_vm_writev(pid, &here, 1, &there, 1, 0)
                         : process_vm_readv(pid, &here, 1, &there, 1, 0);
    return done == (ssize_t)bytes;
}

#define READ(pid, field, into)                                                                     \
    transfer(pid, (into), offsetof(struct control, field), sizeof *(into), false)
#define WRITE(pid, field, from)                                                                    \
    transfer(pid, (from), offsetof(struct control, field), sizeof *(from), true)

/* Before driver 570 there was no such API; the exports are here all the same. */
static CUresult check(int pid) {
    struct inventory host;
    uint64_t magic;
    if (!gate_initialised())
        return CUDA_ERROR_NOT_INITIALIZED;
    if (!inventory_read(&host) || host.driver < 570)
        return CUDA_ERROR_NOT_SUPPORTED;
    if (!READ(pid, magic, &magic))
        /* No such process, no right to it, or no page: never called cuInit. */
        return errno == EPERM ? CUDA_ERROR_NOT_PERMITTED : CUDA_ERROR_INVALID_VALUE;
    return magic == CONTROL_MAGIC ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* The restore thread's number here: the thread whose innermost number is the one in the page. */
static int find_thread(int pid, int inner) {
    char path[64], line[256];
    snprintf(path, sizeof path, "/proc/%d/task", pid);
    DIR *tasks = opendir(path);
    int found = -1;
    for (struct dirent *entry; found < 0 && tasks != NULL && (entry = readdir(tasks)) != NULL;) {
        snprintf(path, sizeof path, "/proc/%d/task/%.16s/status", pid, entry->d_name);
        FILE *status = fopen(path, "re");
        while (status != NULL && fgets(line, sizeof line, status) != NULL) {
            if (strncmp(line, "NSpid:", 6) != 0)
                continue;
            const char *last = strrchr(line, '\t');
            if (last != NULL && atoi(last) == inner)
                found = atoi(entry->d_name);
        }
        if (status != NULL)
            fclose(status);
    }
    if (tasks != NULL)
        closedir(tasks);
    return found;
}

/* Waits for the answer for as long as the process lives: one that is stopped never gives it, as with
   the real driver (NVIDIA/cuda-checkpoint#5). */
static CUresult await(int pid, int tid, uint64_t number) {
    struct timespec pause = {0, 100000};
    for (;;) {
        uint64_t answered;
        int32_t answer;
        if (!READ(pid, answered, &answered))
            return CUDA_ERROR_OPERATING_SYSTEM;
        if (answered == number)
            return READ(pid, answer, &answer) ? (CUresult)answer : CUDA_ERROR_OPERATING_SYSTEM;
        if (syscall(SYS_tgkill, pid, tid, 0) != 0)
            return CUDA_ERROR_OPERATING_SYSTEM;
        nanosleep(&pause, NULL);
        if (pause.tv_nsec < 2000000)
            pause.tv_nsec *= 2;
    }
}

static CUresult ask_locked(int pid, struct control_request *request) {
    uint64_t asked, answered;
    int32_t inner;
    if (!READ(pid, asked, &asked) || !READ(pid, answered, &answered) ||
        !READ(pid, restore_thread, &inner))
        return CUDA_ERROR_OPERATING_SYSTEM;
    int tid = find_thread(pid, inner);
    /* A caller that was killed left an operation behind: it goes on, and must end first. */
    if (asked != answered)
        await(pid, tid, asked);
    asked++;
    if (tid < 0 || !WRITE(pid, request, request) || !WRITE(pid, asked, &asked) ||
        syscall(SYS_tgkill, pid, tid, CONTROL_SIGNAL) != 0)
        return CUDA_ERROR_OPERATING_SYSTEM;
    return await(pid, tid, asked);
}

/* One operation per process at a time, whoever calls. */
static CUresult ask(int pid, struct control_request *request) {
    char path[32];
    CUresult result = check(pid);
    if (result != CUDA_SUCCESS)
        return result;
    snprintf(path, sizeof path, "/proc/%d", pid);
    int turn = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (turn < 0 || flock(turn, LOCK_EX) != 0)
        result = CUDA_ERROR_OPERATING_SYSTEM;
    else
        result = ask_locked(pid, request);
    if (turn >= 0)
        close(turn);
    return result;
}

static bool all_zero(const void *bytes, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (((const char *)bytes)[i] != 0)
            return false;
    return true;
}

/* Waits while the restore thread, which answers questions about the process, is stopped. */
static CUresult await_restore_thread(int pid) {
    int32_t inner;
    if (!READ(pid, restore_thread, &inner))
        return CUDA_ERROR_INVALID_VALUE;
    char path[64], state = 'T';
    snprintf(path, sizeof path, "/proc/%d/task/%d/stat", pid, find_thread(pid, inner));
    while (state == 'T' || state == 't') {
        FILE *stat = fopen(path, "re");
        if (stat == NULL)
            return CUDA_ERROR_OPERATING_SYSTEM;
        /* The name stands in brackets, and may hold any character but a slash. */
        int read = fscanf(stat, "%*d (%*[^)]) %c", &state);
        fclose(stat);
        if (read != 1)
            return CUDA_ERROR_OPERATING_SYSTEM;
        if (state == 'T' || state == 't')
            nanosleep(&(struct timespec){0, 500000}, NULL);
    }
    return CUDA_SUCCESS;
}

struct others {
    int but;
    struct inventory *host;
};

static void count(int pid, const struct inventory *theirs, void *argument) {
    const struct others *others = argument;
    if (pid == others->but)
        return;
    for (uint32_t i = 0; i < theirs->count; i++)
        for (uint32_t j = 0; j < others->host->count; j++) {
            struct gpu *gpu = &others->host->gpus[j];
            if (memcmp(theirs->gpus[i].uuid, gpu->uuid, sizeof gpu->uuid) == 0)
                gpu->used += theirs->gpus[i].used;
        }
}

/* What other processes on this host hold of each of its GPUs. */
static void count_others(int pid, struct inventory *host) {
    holders(count, &(struct others){pid, host});
}

/* ---- entry points ----------------------------------------------------------------------------- */

CUresult cuCheckpointProcessGetRestoreThreadId(int pid, int *tid) {
    int32_t inner;
    CUresult result = check(pid);
    if (result != CUDA_SUCCESS)
        return result;
    if (tid == NULL || !READ(pid, restore_thread, &inner))
        return CUDA_ERROR_INVALID_VALUE;
    *tid = find_thread(pid, inner);
    return *tid > 0 ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
}

CUresult cuCheckpointProcessGetState(int pid, CUprocessState *result) {
    uint32_t state;
    CUresult found = check(pid);
    if (found == CUDA_SUCCESS)
        found = await_restore_thread(pid);
    if (found != CUDA_SUCCESS)
        return found;
    if (result == NULL || !READ(pid, state, &state))
        return CUDA_ERROR_INVALID_VALUE;
    *result = (CUprocessState)state;
    return CUDA_SUCCESS;
}

int simcuda_held_bytes(int pid, unsigned long long *bytes) {
    struct inventory theirs;
    CUresult found = check(pid);
    if (found != CUDA_SUCCESS)
        return (int)found;
    if (bytes == NULL || !READ(pid, inventory, &theirs))
        return CUDA_ERROR_INVALID_VALUE;
    *bytes = 0;
    for (uint32_t i = 0; i < theirs.count && i < MAX_DEVICES; i++)
        *bytes += theirs.gpus[i].used;
    return CUDA_SUCCESS;
}

CUresult cuCheckpointProcessLock(int pid, CUcheckpointLockArgs *args) {
    struct control_request request = {.operation = CONTROL_LOCK};
    if (args != NULL) {
        if (args->reserved0 != 0 || !all_zero(args->reserved1, sizeof args->reserved1))
            return CUDA_ERROR_INVALID_VALUE;
        request.timeout_ms = args->timeoutMs;
    }
    return ask(pid, &request);
}

CUresult cuCheckpointProcessCheckpoint(int pid, CUcheckpointCheckpointArgs *args) {
    struct control_request request = {.operation = CONTROL_CHECKPOINT};
    if (args != NULL && !all_zero(args, sizeof *args))
        return CUDA_ERROR_INVALID_VALUE;
    return ask(pid, &request);
}

CUresult cuCheckpointProcessRestore(int pid, CUcheckpointRestoreArgs *args) {
    struct control_request request = {.operation = CONTROL_RESTORE};
    if (!inventory_read(&request.host))
        return CUDA_ERROR_NO_DEVICE;
    if (args != NULL) {
        /* Driver 580 brought the map; to 570 its place is reserved. */
        if (request.host.driver < 580
                ? !all_zero(args, sizeof *args)
                : !all_zero(args->reserved, sizeof args->reserved) || args->reserved1 != 0)
            return CUDA_ERROR_INVALID_VALUE;
        if (args->gpuPairsCount > MAX_DEVICES || (args->gpuPairsCount > 0 && !args->gpuPairs))
            return CUDA_ERROR_INVALID_VALUE;
        request.pair_count = args->gpuPairsCount;
        memcpy(request.pairs, args->gpuPairs, args->gpuPairsCount * sizeof *request.pairs);
    }
    count_others(pid, &request.host);
    return ask(pid, &request);
}

CUresult cuCheckpointProcessUnlock(int pid, CUcheckpointUnlockArgs *args) {
    struct control_request request = {.operation = CONTROL_UNLOCK};
    if (args != NULL && !all_zero(args, sizeof *args))
        return CUDA_ERROR_INVALID_VALUE;
    return ask(pid, &request);
}
