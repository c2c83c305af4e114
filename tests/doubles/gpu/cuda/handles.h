/* SPDX-License-Identifier: Apache-2.0 */
/* Physical memory of the VMM API, with blocks_lock held throughout. */
#ifndef SIMCUDA_HANDLES_H
#define SIMCUDA_HANDLES_H

#include "cuda_abi.h"

#include <stdbool.h>

/* Whether one was exported or imported. */
bool handles_shared(void);
/* For a checkpoint: content to the host and the memory given back; and the reverse. */
bool handles_save(void);
void handles_bring_back(void);

/* mprotect's bits for an access. */
int protection(CUmemAccess_flags access);

#endif
