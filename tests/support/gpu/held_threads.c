/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Threads that each do one thing again and again, and count it in a file that others can read.
 *
 *   held_threads FILE PROCESSES NAME:KIND …
 *
 * FILE is mapped. It has 16 rows for each process: one for each thread, and the last one counts
 * SIGUSR1. A row is (rounds done, errors, gettid()).
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { ROWS = 16, SIGNALS = ROWS - 1 };

struct row {
    _Atomic uint64_t done, wrong, tid;
};

struct task {
    char name[16], kind[16];
    struct row *row;
};

static struct row *rows;

static void count_signal(int number) {
    (void)number;
    rows[SIGNALS].done++;
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static int once(const char *kind, int ends[2]) {
    static int word;
    struct timespec nap = {0, 50000000};
    if (strcmp(kind, "busy") == 0)
        return 0;
    if (strcmp(kind, "sleep") == 0)
        return nanosleep(&nap, NULL);
    if (strcmp(kind, "poll") == 0)
        return poll(NULL, 0, 50);
    if (strcmp(kind, "futex") == 0) {
        long rc = syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, 0, &nap, NULL, 0);
        return rc == -1 && errno == ETIMEDOUT ? 0 : -1;
    }
    if (strcmp(kind, "read") == 0) { /* a child writes, once every 50 ms */
        char c;
        return read(ends[0], &c, 1) == 1 ? 0 : -1;
    }
    abort();
}

static void *run(void *of) {
    struct task *task = of;
    struct row *row = task->row;
    prctl(PR_SET_NAME, task->name);
    row->tid = (uint64_t)syscall(SYS_gettid);
    int ends[2];
    if (strcmp(task->kind, "forever") == 0)
        for (;;)
            pause();
    if (strcmp(task->kind, "read") == 0) {
        if (pipe(ends) != 0)
            abort();
        if (fork() == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            while (write(ends[1], "x", 1) == 1)
                usleep(50000);
            _exit(0);
        }
    }
    bool timed = strcmp(task->kind, "busy") != 0 && strcmp(task->kind, "read") != 0;
    for (;; row->done++) {
        double began = now();
        if (once(task->kind, ends) != 0)
            row->wrong++;
        else if (timed && now() - began < 0.0499)
            row->wrong++; /* it came back early */
    }
}

int main(int argc, char **argv) {
    int fd = open(argv[1], O_RDWR);
    int processes = atoi(argv[2]);
    size_t size = (size_t)processes * ROWS * sizeof *rows;
    if (fd < 0 || ftruncate(fd, (off_t)size) != 0)
        abort();
    rows = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (rows == MAP_FAILED)
        abort();
    close(fd);
    for (int p = 1; p < processes; p++)
        if (fork() == 0) {
            rows += (size_t)p * ROWS;
            break;
        }
    signal(SIGUSR1, count_signal);
    for (int i = 3; i < argc; i++) {
        struct task *task = calloc(1, sizeof *task);
        if (sscanf(argv[i], "%15[^:]:%15s", task->name, task->kind) != 2)
            abort();
        task->row = &rows[i - 3];
        pthread_t thread;
        if (pthread_create(&thread, NULL, run, task) != 0)
            abort();
    }
    rows[SIGNALS].tid = (uint64_t)getpid();
    for (;;)
        pause();
}
