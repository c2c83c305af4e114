/* SPDX-License-Identifier: Apache-2.0 */
/* A 64-bit checksum of memory that is read in pieces. It finds errors; it does not stop forgery. */
#ifndef LIVESHIFT_INTERPOSER_CHECKSUM_H
#define LIVESHIFT_INTERPOSER_CHECKSUM_H

#include <stddef.h>
#include <stdint.h>

struct checksum {
    uint64_t lanes[4];
};

struct checksum checksum_begin(uint64_t size, uint64_t samples);

/* Adds a piece. The length of every piece but the last must be a multiple of 32. */
void checksum_add(struct checksum *sum, const void *bytes, size_t length);
uint64_t checksum_of(const struct checksum *sum);

/* Sampling, see LIVESHIFT_DEVICE_CHECKSUM. checksum_pieces: how many pieces to read; 0: read all
   bytes, since the samples would cover them. checksum_piece: where piece `which` begins. */
uint64_t checksum_pieces(uint64_t size, uint64_t samples);
uint64_t checksum_piece(uint64_t size, uint64_t pieces, uint64_t which);

#endif
