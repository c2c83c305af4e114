// SPDX-License-Identifier: Apache-2.0

#include "chunk.h"

#include <inttypes.h>
#include <string.h>

static const char magic[4] = "LSM1";

static uint32_t word(const uint8_t *at) {
    uint32_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static uint64_t long_word(const uint8_t *at) {
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static int read_run(struct run *run, const uint8_t *at, char *why) {
    *run = (struct run){.address = long_word(at), .pages = word(at + 8), .kind = word(at + 12)};
    if (run->address % PAGE != 0 || run->address >= ADDRESS_END)
        FAIL("a run of pages begins at %#" PRIx64 ", which is not a page boundary", run->address);
    if (run->pages == 0 || run->pages > (ADDRESS_END - run->address) / PAGE)
        FAIL("a run of %" PRIu32 " pages at %#" PRIx64 " does not fit", run->pages, run->address);
    if (run->kind < RUN_DATA || run->kind > RUN_REFERENCE)
        FAIL("kind %" PRIu32 " of a run is unknown", run->kind);
    return 0;
}

int chunk_read(struct chunk *c, const uint8_t *raw, size_t length, char *why) {
    if (length < CHUNK_HEAD || length > CHUNK_LONGEST || memcmp(raw, magic, sizeof magic) != 0)
        FAIL("%zu bytes are not a chunk of pages", length);
    c->pid = word(raw + 4);
    c->incarnation = word(raw + 8);
    c->round = word(raw + 12);
    c->runs = word(raw + 16);
    c->named = 0;
    if (c->pid == 0 || c->pid > LAST_PID)
        FAIL("%" PRIu32 " is not a valid pid in a chunk", c->pid);
    if (c->runs > CHUNK_RUNS || length < CHUNK_HEAD + c->runs * CHUNK_RUN)
        FAIL("chunk size %zu does not match its %" PRIu32 " runs", length, c->runs);
    uint64_t payload = 0;
    for (uint32_t i = 0; i < c->runs; i++) {
        struct run *run = &c->run[i];
        if (read_run(run, raw + CHUNK_HEAD + i * CHUNK_RUN, why) != 0)
            return -1;
        run->payload = raw + PAGE + payload;
        if (run->kind == RUN_DATA || run->kind == RUN_REFERENCE) {
            payload += run->pages * (uint64_t)(run->kind == RUN_DATA ? PAGE : REFERENCE);
            if (payload > CHUNK_PAYLOAD)
                FAIL("its runs exceed %d bytes", CHUNK_PAYLOAD);
        }
        c->named += run->pages;
    }
    if (payload ? length != PAGE + payload : length > PAGE)
        FAIL("chunk size %zu does not match its %" PRIu32 " runs, which take %" PRIu64, length,
             c->runs, PAGE + payload);
    return 0;
}

struct reference chunk_reference(const struct run *run, uint32_t page) {
    const uint8_t *at = run->payload + (size_t)page * REFERENCE;
    return (struct reference){
        .hash = {long_word(at), long_word(at + 8)},
        .pid = word(at + 16),
        .address = long_word(at + 20),
    };
}

static uint8_t *put(uint8_t *at, const void *value, size_t size) {
    memcpy(at, value, size);
    return at + size;
}

uint8_t *chunk_put_head(uint8_t *at, uint32_t pid, uint32_t incarnation, uint32_t round,
                        uint32_t runs) {
    uint32_t words[] = {pid, incarnation, round, runs};
    return put(put(at, magic, sizeof magic), words, sizeof words);
}

uint8_t *chunk_put_run(uint8_t *at, uint64_t address, uint32_t pages, uint32_t kind) {
    uint32_t words[] = {pages, kind};
    return put(put(at, &address, sizeof address), words, sizeof words);
}

uint8_t *chunk_put_reference(uint8_t *at, struct reference reference) {
    at = put(at, reference.hash, sizeof reference.hash);
    at = put(at, &reference.pid, sizeof reference.pid);
    return put(at, &reference.address, sizeof reference.address);
}
