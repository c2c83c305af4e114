/* SPDX-License-Identifier: Apache-2.0 */
/* What the restore thread does when a checkpoint operation names this process. */
#ifndef SIMCUDA_SERVED_H
#define SIMCUDA_SERVED_H

#include "control.h"

CUresult serve_request(const struct control_request *request);

#endif
