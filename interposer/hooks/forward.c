/* SPDX-License-Identifier: Apache-2.0 */
#include "forward.h"
#include "elf_lookup.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define TORCH_LIBRARY "libtorch_cpu.so"

void *real_function(const char *symbol) {
    const char *reason;
    void *found = elf_lookup(TORCH_LIBRARY, symbol, &reason);
    if (found != NULL)
        return found;
    dprintf(STDERR_FILENO,
            "liveshift: a hooked function was called, but its real function %s can't be found in "
            "%s: %s; stopping\n",
            symbol, TORCH_LIBRARY, reason);
    abort();
}
