/* SPDX-License-Identifier: Apache-2.0 */
/* Starts a thread as the interposer does, and prints the thread's name and signal mask. */

#include "gate/thread.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <unistd.h>

static int done[2];

static void body(void *argument) {
    char name[16];
    sigset_t blocked;
    prctl(PR_GET_NAME, name);
    sigprocmask(SIG_SETMASK, NULL, &blocked);
    printf("%s %s %d%d\n", name, (char *)argument, sigismember(&blocked, SIGTERM),
           sigismember(&blocked, SIGUSR1));
    fflush(stdout);
    if (write(done[1], "", 1) != 1)
        abort();
}

int main(void) {
    char byte;
    sigset_t blocked;
    if (pipe(done) != 0)
        return 1;
    int failure = thread_start("liveshift", body, "passed-on");
    if (failure != 0 || read(done[0], &byte, 1) != 1)
        return 1 + failure;
    sigprocmask(SIG_SETMASK, NULL, &blocked);
    printf("%d%d\n", sigismember(&blocked, SIGTERM), sigismember(&blocked, SIGUSR1));
    return 0;
}
