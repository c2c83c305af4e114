/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LIVESHIFT_INTERPOSER_EXPORTED_H
#define LIVESHIFT_INTERPOSER_EXPORTED_H

/* Marks what the library exports; all other names are hidden. */
#define EXPORTED __attribute__((visibility("default")))

#endif
