/* SPDX-License-Identifier: Apache-2.0 */
#include "forward.h"
#include "elf_lookup.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define TORCH_LIBRARY "libtorch_cpu.so"

collective *real_collective(const char *symbol) {
    const char *reason;
    void *found = elf_lookup(TORCH_LIBRARY, symbol, &reason);
    if (found != NULL)
        return found;
    dprintf(STDERR_FILENO,
            "liveshift: a hooked collective was called, but its real function %s can't be found in "
            "%s: %s; stopping\n",
            symbol, TORCH_LIBRARY, reason);
    abort();
}
