// SPDX-License-Identifier: Apache-2.0
//
// Writes the chunk that a thread of pull.c makes.

#include "pull.h"

#include <stdlib.h>
#include <string.h>

struct pull_chunk *pull_chunk_new(void) { return calloc(1, sizeof(struct pull_chunk)); }

void pull_chunk_free(struct pull_chunk *chunk) { free(chunk); }

void pull_chunk_begin(struct pull_chunk *chunk, void *at) {
    chunk->at = at;
    chunk->pages = chunk->runs = chunk->reference_runs = chunk->references = 0;
}

static uint8_t *put_runs(uint8_t *at, const struct run *run, size_t count) {
    for (size_t i = 0; i < count; i++)
        at = chunk_put_run(at, run[i].address, run[i].pages, run[i].kind);
    return at;
}

size_t pull_chunk_end(struct pull_chunk *chunk, const struct pull *pull) {
    size_t runs = chunk->runs + chunk->reference_runs;
    if (runs == 0)
        return 0;
    uint8_t *at =
        chunk_put_head(chunk->at, pull->inner, pull->incarnation, pull->round, (uint32_t)runs);
    at = put_runs(at, chunk->run, chunk->runs);
    at = put_runs(at, chunk->reference_run, chunk->reference_runs);
    size_t pages = chunk->pages * PAGE, references = chunk->references * REFERENCE;
    if (pages + references == 0)
        return (size_t)(at - chunk->at);
    memset(at, 0, (size_t)(chunk->at + PAGE - at)); // clears what an earlier chunk left there
    memcpy(chunk->at + PAGE + pages, chunk->reference, references);
    return PAGE + pages + references;
}
