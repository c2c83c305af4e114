/* SPDX-License-Identifier: Apache-2.0 */
/* Who on this host uses the simulated GPUs, by the pages of control.h. */
#ifndef SIMCUDA_HOLDERS_H
#define SIMCUDA_HOLDERS_H

#include "device.h"

/* Calls each(pid, its GPUs, argument) for all processes that have called cuInit and that this one has
   a right to read. */
void holders(void (*each)(int pid, const struct inventory *theirs, void *argument), void *argument);

#endif
