/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Starting a thread on any glibc.
 *
 * glibc 2.34 moved pthread_create from libpthread to libc and gave it a new version. So we look it
 * up instead of linking it. All other functions used here have been in libc since 2.2.5.
 */

#include "thread.h"
#include "hooks/elf_lookup.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>

#ifdef __has_feature
#define CLANG_SANITIZES (__has_feature(address_sanitizer) || __has_feature(thread_sanitizer))
#else
#define CLANG_SANITIZES 0
#endif

typedef int create_function(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);

static create_function *real_pthread_create(void) {
#if defined __SANITIZE_ADDRESS__ || defined __SANITIZE_THREAD__ || CLANG_SANITIZES
    return pthread_create; /* the sanitizer must see the thread begin */
#else
    create_function *found = elf_lookup("libc.so.6", "pthread_create", NULL);
    return found != NULL ? found : elf_lookup("libpthread.so.0", "pthread_create", NULL);
#endif
}

struct thread_arguments {
    const char *name;
    void (*body)(void *);
    void *argument;
};

static void *thread_main(void *of) {
    struct thread_arguments now = *(struct thread_arguments *)of;
    prctl(PR_SET_NAME, now.name); /* before free, which may wait for a thread that is stopped */
    free(of);
    now.body(now.argument);
    return NULL;
}

int thread_start(const char *name, void (*body)(void *), void *argument) {
    create_function *create_thread = real_pthread_create();
    if (create_thread == NULL)
        return ENOSYS;
    struct thread_arguments *first = malloc(sizeof *first);
    if (first == NULL)
        return ENOMEM;
    *first = (struct thread_arguments){name, body, argument};
    pthread_attr_t attributes;
    int failure = pthread_attr_init(&attributes);
    if (failure == 0) {
        sigset_t all, before;
        sigfillset(&all);
        pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
        /* On Linux this sets the mask of this thread only, which POSIX leaves open. pthread_sigmask
           is in libc only since 2.32. The new thread inherits the mask. */
        sigprocmask(SIG_SETMASK, &all, &before);
        pthread_t thread;
        failure = create_thread(&thread, &attributes, thread_main, first);
        sigprocmask(SIG_SETMASK, &before, NULL);
        pthread_attr_destroy(&attributes);
    }
    if (failure != 0)
        free(first);
    return failure;
}
