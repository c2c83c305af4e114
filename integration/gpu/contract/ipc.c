/* SPDX-License-Identifier: Apache-2.0 */
/* Legacy IPC: one process opens another's memory. */
#include "contract.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>

static void hand(int descriptor, void *bytes, size_t count) {
    MUST(write(descriptor, bytes, count) == (ssize_t)count);
}
static void take(int descriptor, void *bytes, size_t count) {
    MUST(read(descriptor, bytes, count) == (ssize_t)count);
}

/* Allocates, hands out the handle, waits for a word, looks what was written. */
static int owner(int in, int out) {
    cudaIpcMemHandle_t handle;
    char *p, back[8] = {0};
    void *pinned;
    WORKS(cudaMalloc((void **)&p, 100000));
    WORKS(cudaMemset(p, 4, 100000));
    WORKS(cudaIpcGetMemHandle(&handle, p));
    WORKS(cudaMallocHost(&pinned, 4096));
    GIVES(cudaErrorInvalidValue, cudaIpcGetMemHandle(&handle, pinned));
    WORKS(cudaIpcGetMemHandle(&handle, p));
    hand(out, &handle, sizeof handle);
    take(in, back, 1);
    WORKS(cudaMemcpy(back, p + 50000, 8, cudaMemcpyDeviceToHost));
    MUST(back[0] == 9);
    WORKS(cudaFree(p));
    return 0;
}

int main(void) {
    int there[2], back[2], status;
    MUST(pipe(there) == 0 && pipe(back) == 0);
    pid_t child = fork();
    if (child == 0 && prctl(PR_SET_PDEATHSIG, SIGKILL) == 0)
        _exit(owner(there[0], back[1]));
    say_where();
    cudaIpcMemHandle_t handle;
    char *p, first;
    take(back[0], &handle, sizeof handle);
    WORKS(cudaIpcOpenMemHandle((void **)&p, handle, cudaIpcMemLazyEnablePeerAccess));
    WORKS(cudaMemcpy(&first, p, 1, cudaMemcpyDeviceToHost));
    MUST(first == 4);
    WORKS(cudaMemset(p + 50000, 9, 8));
    WORKS(cudaDeviceSynchronize());
    WORKS(cudaIpcCloseMemHandle(p));
    hand(there[1], &first, 1);
    MUST(waitpid(child, &status, 0) == child && status == 0);
    ok("memory is opened by another process");
    return 0;
}
