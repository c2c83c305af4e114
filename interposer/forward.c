/* SPDX-License-Identifier: Apache-2.0 */
#include "forward.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define TORCH_LIBRARY "libtorch_cpu.so"

collective *real_collective(const char *symbol) {
    /* Not RTLD_NEXT: Python loads torch RTLD_LOCAL, outside the scope in which that would search.
       NOLOAD, because the caller is torch itself; a second copy would have its own statics. */
    void *torch = dlopen(TORCH_LIBRARY, RTLD_NOLOAD | RTLD_LAZY);
    void *found = torch != NULL ? dlsym(torch, symbol) : NULL;
    if (found != NULL)
        return found;
    const char *reason = torch != NULL ? dlerror() : "it is not loaded in this process";
    dprintf(STDERR_FILENO,
            "liveshift: a hooked collective was called, but its real function %s can't be found in "
            "%s: %s; stopping\n",
            symbol, TORCH_LIBRARY, reason);
    abort();
}
