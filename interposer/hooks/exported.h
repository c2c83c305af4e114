/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LIVESHIFT_INTERPOSER_EXPORTED_H
#define LIVESHIFT_INTERPOSER_EXPORTED_H

/* Marks a function that the library exports; all others are hidden. */
#define EXPORTED __attribute__((visibility("default")))

#endif
