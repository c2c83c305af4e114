// SPDX-License-Identifier: Apache-2.0
//
// A chunk of pages as it comes over the wire, little endian:
//
//     header   magic "LSM1", inner pid, incarnation, round, number of runs    (5 × 32 bits)
//     runs     address (64 bits), pages, kind                                 (16 bytes each)
//     payload  at offset 4096: the payloads of the runs, in the order of the runs
//
// A pid may be used again, and a process may run another program. The incarnation distinguishes
// them. Data from another host is not trusted: chunk_read checks the whole head before anything of
// the chunk is used.

#pragma once

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "page.h"

// For a function that gets why, which has WHY bytes: writes the reason into it and returns -1.
enum { WHY = 256 };
#define FAIL(...) return snprintf(why, WHY, __VA_ARGS__), -1

enum {
    CHUNK_LONGEST = 1 << 20, // bytes on the wire, the head included
    CHUNK_PAYLOAD = CHUNK_LONGEST - PAGE,
    CHUNK_HEAD = 20,
    CHUNK_RUN = 16,
    CHUNK_RUNS = (PAGE - CHUNK_HEAD) / CHUNK_RUN,
    REFERENCE = 28,
};

enum run_kind {
    RUN_DATA = 1,      // pages × 4096 bytes
    RUN_ZERO = 2,      // no payload: the pages read as zeros
    RUN_REFERENCE = 3, // per page: XXH3-128 (low, high), pid and address of an equal page
};

// The highest pid that Linux can use: pids are below PID_MAX_LIMIT, which is 1 << 22.
#define LAST_PID ((1u << 22) - 1)
// All user addresses of x86-64 lie below this, also with five levels of page tables.
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
    uint64_t named; // pages in all runs
    struct run run[CHUNK_RUNS];
};

// Parses and checks a chunk. Returns 0, or -1 with the reason in words in why.
int chunk_read(struct chunk *c, const uint8_t *raw, size_t length, char *why);

struct reference {
    uint64_t hash[2];
    uint32_t pid;
    uint64_t address;
};

struct reference chunk_reference(const struct run *run, uint32_t page);

// Each function writes one part of a chunk and returns where that part ends.
uint8_t *chunk_put_head(uint8_t *at, uint32_t pid, uint32_t incarnation, uint32_t round,
                        uint32_t runs);
uint8_t *chunk_put_run(uint8_t *at, uint64_t address, uint32_t pages, uint32_t kind);
uint8_t *chunk_put_reference(uint8_t *at, struct reference reference);
