/* SPDX-License-Identifier: Apache-2.0 */
#include "control.h"

#include "served.h"

#include <pthread.h>
#include <semaphore.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

static struct control *page;

struct control *control(void) { return page; }

CUresult control_initialise(void) {
    void *at = mmap((void *)CONTROL_ADDRESS, sizeof *page, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    if (at != (void *)CONTROL_ADDRESS) {
        fprintf(stderr, "simcuda: the place of the control page, %#lx, is taken\n",
                (unsigned long)CONTROL_ADDRESS);
        return CUDA_ERROR_OPERATING_SYSTEM;
    }
    page = at;
    return CUDA_SUCCESS;
}

void control_forget(void) {
    if (page != NULL)
        atomic_store(&page->magic, 0);
}

static void *serve(void *shown) {
    sigset_t bell;
    sigemptyset(&bell);
    sigaddset(&bell, CONTROL_SIGNAL);
    page->restore_thread = (int32_t)syscall(SYS_gettid);
    atomic_store(&page->magic, CONTROL_MAGIC);
    sem_post(shown);
    for (;;) {
        /* The time is for a bell that was lost, which no one could ring again. */
        sigtimedwait(&bell, NULL, &(struct timespec){1, 0});
        uint64_t asked = atomic_load(&page->asked);
        if (asked == atomic_load(&page->answered))
            continue;
        page->answer = (int32_t)serve_request(&page->request);
        atomic_store(&page->answered, asked);
    }
    return NULL;
}

CUresult restore_thread_start(void) {
    static sem_t shown;
    sigset_t all, before;
    pthread_t thread;
    sem_init(&shown, 0, 0);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&thread, NULL, serve, &shown);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error != 0)
        return CUDA_ERROR_OPERATING_SYSTEM;
    pthread_detach(thread);
    while (sem_wait(&shown) != 0)
        continue;
    return CUDA_SUCCESS;
}
