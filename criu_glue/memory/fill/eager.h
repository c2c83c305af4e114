// SPDX-License-Identifier: Apache-2.0

#pragma once

#include <stddef.h>
#include <stdint.h>

// Take PE_LAZY from the flags of every entry of a pagemap image (criu: images/pagemap.proto).
// 0, or -1 when it is no such image.
int eager_pagemap(uint8_t *raw, size_t length);
