/* SPDX-License-Identifier: Apache-2.0 */
/* The storage of the ledger: rows of the page's table of allocations, given out and taken back. */
#ifndef LIVESHIFT_INTERPOSER_LEDGER_ROWS_H
#define LIVESHIFT_INTERPOSER_LEDGER_ROWS_H

#include "ledger.h"

/* A free row, or false: the table is full or has no storage (said once on stderr). */
bool row_take(uint32_t *row);
void row_write(uint32_t row, const struct ledger_made *made, uint64_t serial);
void row_resize(uint32_t row, uint64_t size);
void row_free(uint32_t row);

/* What a row says; false beyond the last one that has been used. `kind` is 0 for a free one. */
bool row_read(uint32_t row, struct ledger_made *found);

void rows_forked(void);

/* Says, once in a process, that something found no room in the page. */
void no_row(const char *what, const char *why);

#endif
