// SPDX-License-Identifier: Apache-2.0

#pragma once

#include <stddef.h>
#include <stdint.h>

// Clears PE_LAZY in the flags of every entry of a pagemap image (criu: images/pagemap.proto).
// Returns 0, or -1 when raw is not a pagemap image.
int pagemap_clear_lazy(uint8_t *raw, size_t length);
