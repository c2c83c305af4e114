/* SPDX-License-Identifier: Apache-2.0 */
/* Versions, error texts, the last error, and what NCCL_DEBUG asks to be told. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#include "sim.h"

enum level { LEVEL_NONE, LEVEL_VERSION, LEVEL_WARN };

static pthread_mutex_t last_lock = PTHREAD_MUTEX_INITIALIZER;
static char last_error[512];

static enum level debug_level(void) {
    const char *value = getenv("NCCL_DEBUG");
    if (value == NULL || *value == '\0')
        return LEVEL_NONE;
    return strcasecmp(value, "VERSION") == 0 ? LEVEL_VERSION : LEVEL_WARN;
}

static void say(enum level level, const char *text) {
    if (debug_level() >= level)
        fprintf(stderr, "%d simulated NCCL: %s\n", (int)getpid(), text);
}

static void warn_list(const char *format, va_list arguments) {
    char text[sizeof last_error];
    vsnprintf(text, sizeof text, format, arguments);
    pthread_mutex_lock(&last_lock);
    memcpy(last_error, text, sizeof text);
    pthread_mutex_unlock(&last_lock);
    say(LEVEL_WARN, text);
}

void warn(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    warn_list(format, arguments);
    va_end(arguments);
}

ncclResult_t fail(ncclResult_t result, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    warn_list(format, arguments);
    va_end(arguments);
    return result;
}

void log_version(void) {
    char text[96];
    snprintf(text, sizeof text, "NCCL version %d.%d.%d+liveshift.simulated",
             SIMNCCL_VERSION / 10000, SIMNCCL_VERSION / 100 % 100, SIMNCCL_VERSION % 100);
    say(LEVEL_VERSION, text);
}

API(ncclResult_t, ncclGetVersion, (int *version)) {
    if (version == NULL)
        return ncclInvalidArgument;
    log_version();
    *version = SIMNCCL_VERSION;
    return ncclSuccess;
}

API(const char *, ncclGetErrorString, (ncclResult_t result)) {
    switch (result) {
    case ncclSuccess:
        return "no error";
    case ncclUnhandledCudaError:
        return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case ncclSystemError:
        return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case ncclInternalError:
        return "internal error - please report this issue to the NCCL developers";
    case ncclInvalidArgument:
        return "invalid argument (run with NCCL_DEBUG=WARN for details)";
    case ncclInvalidUsage:
        return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case ncclRemoteError:
        return "remote process exited or there was a network error";
    case ncclInProgress:
        return "NCCL operation in progress";
#if SIMNCCL_VERSION >= 23004
    case ncclTimeout:
        return "timeout";
#endif
    default:
        return "unknown result code";
    }
}

/* The real one gives its one static buffer; a copy per thread reads the same and races with nothing. */
API(const char *, ncclGetLastError, (ncclComm_t comm)) {
    static _Thread_local char copy[sizeof last_error];
    (void)comm;
    pthread_mutex_lock(&last_lock);
    memcpy(copy, last_error, sizeof copy);
    pthread_mutex_unlock(&last_lock);
    return copy;
}

__attribute__((visibility("default"))) void ncclResetDebugInitInternal(void) {}

API(void, ncclResetDebugInit, (void)) { ncclResetDebugInitInternal(); }
