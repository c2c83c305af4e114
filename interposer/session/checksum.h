/* SPDX-License-Identifier: Apache-2.0 */
/* A 64-bit checksum of memory that is looked at in pieces: for comparing, not against forgery. */
#ifndef LIVESHIFT_INTERPOSER_CHECKSUM_H
#define LIVESHIFT_INTERPOSER_CHECKSUM_H

#include <stddef.h>
#include <stdint.h>

struct checksum {
    uint64_t lanes[4];
};

struct checksum checksum_begin(uint64_t size, uint64_t samples);

/* The length of all pieces but the last is a multiple of 32. */
void checksum_add(struct checksum *sum, const void *bytes, size_t length);
uint64_t checksum_of(const struct checksum *sum);

/* Sampling, see LIVESHIFT_DEVICE_CHECKSUM: how many pieces there are to look at, 0: all bytes, since
   the samples would cover them; where piece `which` begins. */
uint64_t checksum_pieces(uint64_t size, uint64_t samples);
uint64_t checksum_piece(uint64_t size, uint64_t pieces, uint64_t which);

#endif
