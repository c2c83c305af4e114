/* SPDX-License-Identifier: Apache-2.0 */
/* Device memory's content going to the host and coming back, with nothing running. */
#ifndef SIMCUDA_CONTENT_H
#define SIMCUDA_CONTENT_H

#include <stdbool.h>
#include <stddef.h>

/* What a checkpoint can't take along. */
enum obstacle { OBSTACLE_NONE, OBSTACLE_MANAGED, OBSTACLE_IPC };
enum obstacle content_obstacle(void);

/* Copies all device memory to host memory and unmaps the device side: from then on its addresses
   fault. false: the host has too little memory. */
bool content_save(void);
/* Puts everything back where it was. */
void content_bring_back(void);

/* Copies the pages that hold something; NULL: no memory. */
void *pages_saved(const void *base, size_t bytes);
void pages_bring_back(void *base, void *saved, size_t bytes);

#endif
