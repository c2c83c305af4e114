/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Calls a collective of the double ARGV[1] times; prints the nanoseconds of one call.
 *
 * Where identify.c is preloaded with the hooks, the context has the identity that gloo's own would
 * have, so that the call passes the gate on a clock.
 */

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

void _ZN4gloo9allreduceERKNS_16AllreduceOptionsE(void *options);
extern void identify(const void *context) __attribute__((weak));

static int context;
static void *options[2] = {&context, NULL}; /* a std::shared_ptr<gloo::Context>, as C sees it */

int main(int argc, char **argv) {
    long calls = argc > 1 ? strtol(argv[1], NULL, 10) : 0;
    struct timespec began, ended;
    if (identify != NULL)
        identify(&context);
    _ZN4gloo9allreduceERKNS_16AllreduceOptionsE(options); /* finds the real one, makes the page */
    clock_gettime(CLOCK_MONOTONIC, &began);
    for (long i = 0; i < calls; i++)
        _ZN4gloo9allreduceERKNS_16AllreduceOptionsE(options);
    clock_gettime(CLOCK_MONOTONIC, &ended);
    if (calls > 0)
        printf("%.4f\n", ((double)(ended.tv_sec - began.tv_sec) * 1e9 +
                          (double)(ended.tv_nsec - began.tv_nsec)) /
                             (double)calls);
    return 0;
}
