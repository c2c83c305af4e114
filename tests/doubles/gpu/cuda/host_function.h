/* SPDX-License-Identifier: Apache-2.0 */
/* cuLaunchHostFunc's functions as work. */
#ifndef SIMCUDA_HOST_FUNCTION_H
#define SIMCUDA_HOST_FUNCTION_H

#include "stream.h"

struct work host_function(CUhostFn function, void *data);

#endif
