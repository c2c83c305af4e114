/* SPDX-License-Identifier: Apache-2.0 */
#include "nccl_real.h"
#include "hooks/elf_lookup.h"

#include <stdio.h>
#include <unistd.h>

#define NCCL_LIBRARY "libnccl.so.2"

_Atomic(void *) nccl_reals[NCCL_FUNCTIONS];
__thread struct nccl_thread nccl_thread __attribute__((tls_model("initial-exec")));

static const char *const names[] = {
#define X(name, parameters) "pnccl" #name,
    NCCL_REAL_FUNCTIONS(X)
#undef X
#define X(name) "pnccl" #name,
        NCCL_OTHER_FUNCTIONS(X)
#undef X
};

void *nccl_find(enum nccl_function which) {
    static atomic_flag warned[NCCL_FUNCTIONS]; /* clear */
    const char *why = "";
    /* Not RTLD_NEXT: Python loads libnccl RTLD_LOCAL, and RTLD_NEXT would not search there. pncclX,
       because our own functions stand in front of ncclX. */
    void *found = elf_lookup(NCCL_LIBRARY, names[which], &why);
    if (found != NULL)
        atomic_store_explicit(&nccl_reals[which], found, memory_order_relaxed);
    else if (!atomic_flag_test_and_set(&warned[which]))
        dprintf(STDERR_FILENO, "liveshift: %s was called, but there is no %s in %s: %s\n",
                names[which] + 1, names[which], NCCL_LIBRARY, why);
    return found;
}
