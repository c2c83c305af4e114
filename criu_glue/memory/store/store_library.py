# SPDX-License-Identifier: Apache-2.0
"""Declares what the destination calls in memory.so, for cffi (store.h, cold.h, fill.h …)."""

from __future__ import annotations

import functools
from typing import Any

from .. import engine

WHY = 256

DECLARATIONS = """
struct store;
struct extent { uint64_t address; uint32_t pages; uint32_t slot; };
struct image {
    uint32_t pid; uint32_t incarnation; uint32_t extents; uint64_t pages, data;
    struct extent *extent;
};
struct reference { uint64_t hash[2]; uint32_t pid; uint64_t address; };
struct want { uint32_t pid, incarnation; uint64_t address; struct reference reference; };
struct chunk_cursor { uint32_t image, extent, page; };
struct store *store_open(int fd, uint64_t limit, bool keeps, char *why);
void store_close(struct store *s);
int store_write(struct store *s, const uint8_t *raw, size_t length, char *why);
int store_reserve(struct store *s, uint64_t bytes, char *why);
const struct want *store_wants(struct store *s, uint32_t *count, char *why);
void store_images_clear(struct store *s);
int store_image(struct store *s, uint32_t pid, uint32_t incarnation, const uint64_t *runs,
                uint32_t count, char *why);
int store_load_image(struct store *s, uint32_t pid, uint32_t incarnation,
                      const struct extent *extent, uint32_t count, char *why);
const struct image *store_images(struct store *s, uint32_t *count);
uint32_t store_runs(const struct image *image, uint64_t *runs);
size_t store_next_chunk(const struct store *s, const struct image *all, uint32_t images,
                        struct chunk_cursor *at, uint8_t *chunk);
void store_digest(const struct store *s, const struct image *image, uint32_t images,
                  uint64_t out[2]);
bool store_digest_change(const struct store *s, const struct image *before, uint32_t befores,
                         const struct image *image, uint32_t images, uint64_t out[2]);

struct generation {
    uint64_t number; struct image *image; uint32_t images; uint32_t readers; bool dropped;
};
int store_keep(struct store *s, uint64_t number, char *why);
void store_drop(struct store *s, uint64_t number);
int store_revert(struct store *s, uint64_t number, char *why);
struct generation *store_use(struct store *s, uint64_t number);
void store_unuse(struct store *s, struct generation *generation);
uint32_t store_kept(struct store *s, uint64_t numbers[2]);
int store_load_generation(struct store *s, uint64_t number, char *why);
void store_end_load(struct store *s);

struct cold_cursor { uint32_t process, place; };
struct block { uint32_t pid, incarnation; uint64_t address; uint32_t fresh; uint32_t slot[512]; };
struct prefill_discard { uint64_t address, pages; };
struct discards { struct prefill_discard *list; uint32_t used, room; };
bool store_next_cold(struct store *s, struct cold_cursor *at, unsigned int when, struct block *out);
void store_not_copied(struct store *s, uint32_t pid, uint64_t address);
uint32_t store_evict(struct store *s, uint32_t pid, uint32_t incarnation, uint64_t address);
int store_list_outdated(struct store *s, uint32_t pid, uint32_t incarnation, uint64_t start,
                        uint64_t end, struct discards *discards);
bool store_orphaned(struct store *s, const void *plan, uint32_t pid, uint32_t incarnation,
                    uint64_t address, struct block *out);
void store_written_back(struct store *s, const struct block *block);
uint64_t store_lost(struct store *s);
void store_free_after_copy(struct store *s);
int store_apply_table(struct store *s, uint32_t pid, uint64_t start, uint64_t end,
                      struct discards *discards);
int store_apply_plan(struct store *s, const void *plan, uint32_t pid, uint64_t start, uint64_t end,
                     struct discards *discards);
uint64_t store_preplaced(struct store *s);
int store_verify_preplaced(struct store *s, const void *plan, uint32_t pid, int task, char *why);
void free(void *memory);

struct fill;
struct fill_report {
    uint32_t phase, processes;
    uint64_t filled, total;
    uint64_t preplaced;
    char why[256];
};
struct fill *fill_start(struct store *s, int listener, uint32_t threads, const void *plan,
                        char *why);
void fill_all_registered(struct fill *f);
void fill_wait(struct fill *f, uint32_t phase, uint32_t ms, struct fill_report *report);
void fill_stop(struct fill *f);

int pagemap_clear_lazy(uint8_t *raw, size_t length);
"""


@functools.cache
def load() -> tuple[Any, Any]:
    """Return the cffi object and the library."""
    return engine.load(DECLARATIONS)
