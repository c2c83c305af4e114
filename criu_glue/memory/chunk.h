// SPDX-License-Identifier: Apache-2.0
//
// A chunk of pages as it comes over the wire, little endian:
//
//     header   magic "LSM1", inner pid, incarnation, round, number of runs    (5 × 32 bits)
//     runs     address (64 bits), pages, kind                                 (16 bytes each)
//     payload  at offset 4096, that of each run after that of the one before
//
// An incarnation tells one process, or one program of a process, from an earlier one that had the
// same pid. What comes from another host is not trusted: nothing of a chunk is used before all of
// its head was found sound.

#pragma once

#include <stddef.h>
#include <stdint.h>

#include "page.h"

enum {
    CHUNK_LONGEST = 1 << 20, // with its head, as the wire has it
    CHUNK_PAYLOAD = CHUNK_LONGEST - PAGE,
    CHUNK_HEAD = 20,
    CHUNK_RUN = 16,
    CHUNK_RUNS = (PAGE - CHUNK_HEAD) / CHUNK_RUN,
    REFERENCE = 28,
};

enum run_kind {
    RUN_DATA = 1,      // pages × 4096 bytes
    RUN_ZERO = 2,      // nothing: the pages read as zeros
    RUN_REFERENCE = 3, // per page: XXH3-128 (low, high), pid and address of a page of that content
};

// One below the highest pid that Linux can be told to use (PID_MAX_LIMIT).
#define LAST_PID ((1u << 22) - 1)
// Beyond any user address of x86-64 with five levels of page tables.
#define ADDRESS_END (UINT64_C(1) << 56)

struct run {
    uint64_t address;
    uint32_t pages;
    uint32_t kind;
    const uint8_t *payload;
};

struct chunk {
    uint32_t pid;
    uint32_t incarnation;
    uint32_t round;
    uint32_t runs;
    uint64_t named;  // pages that any run names
    uint64_t copied; // pages that have a payload of their own
    struct run run[CHUNK_RUNS];
};

// 0, or -1 with the reason in words in why.
int chunk_read(struct chunk *c, const uint8_t *raw, size_t length, char *why, size_t room);

struct reference {
    uint64_t hash[2];
    uint32_t pid;
    uint64_t address;
};

struct reference chunk_reference(const struct run *run, uint32_t page);

// What a chunk is made of; each returns where it ends.
uint8_t *chunk_put_head(uint8_t *at, uint32_t pid, uint32_t incarnation, uint32_t round,
                        uint32_t runs);
uint8_t *chunk_put_run(uint8_t *at, uint64_t address, uint32_t pages, uint32_t kind);
uint8_t *chunk_put_reference(uint8_t *at, struct reference reference);
