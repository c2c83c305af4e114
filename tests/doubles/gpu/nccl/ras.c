/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The RAS thread: on by default, with a socket of its own, started with the first communicator and
 * ended only at exit. It survives the last communicator, which is why liveshift's launcher sets
 * NCCL_RAS_ENABLE=0. Here it only listens.
 */
#include <poll.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "sim.h"

static int listener = -1;
static int quit[2] = {-1, -1};
static pthread_t thread;

static void *ras_thread(void *argument) {
    struct pollfd both[2] = {{.fd = listener, .events = POLLIN}, {.fd = quit[0], .events = POLLIN}};
    (void)argument;
    prctl(PR_SET_NAME, "NCCL RAS");
    while (both[1].revents == 0) {
        int client = -1;
        if (poll(both, 2, -1) > 0 && both[0].revents != 0)
            client = accept(listener, NULL, NULL);
        if (client >= 0)
            close(client);
    }
    return NULL;
}

static void at_exit(void) {
    if (write(quit[1], "", 1) == 1)
        pthread_join(thread, NULL);
}

static void start(void) {
    union address address;
    const char *enabled = getenv("NCCL_RAS_ENABLE");
    if (enabled != NULL && atoi(enabled) == 0)
        return;
    listener = listen_here(&address);
    if (listener < 0 || pipe(quit) != 0)
        return;
    if (pthread_create(&thread, NULL, ras_thread, NULL) == 0)
        atexit(at_exit);
}

void ras_start(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, start);
}
