/* SPDX-License-Identifier: Apache-2.0 */
/* The storage of the ledger: gives out and takes back rows of the page's table of allocations. */
#ifndef LIVESHIFT_INTERPOSER_LEDGER_ROWS_H
#define LIVESHIFT_INTERPOSER_LEDGER_ROWS_H

#include "ledger.h"

/* Takes a free row. False: the table is full or has no storage (one line on stderr says so). */
bool row_allocate(uint32_t *row);
void row_write(uint32_t row, const struct ledger_record *made, uint64_t serial);
void row_resize(uint32_t row, uint64_t size);
void row_free(uint32_t row);

/* Reads a row; false: no row from here on has been used. `kind` is 0 if the row is free. */
bool row_read(uint32_t row, struct ledger_record *found);

void rows_forked(void);

/* Prints once in a process that the page has no room for something. */
void warn_no_row(const char *what, const char *why);

#endif
