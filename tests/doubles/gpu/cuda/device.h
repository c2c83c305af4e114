/* SPDX-License-Identifier: Apache-2.0 */
/* The simulated GPUs: which there are, which of them this process sees, how full they are. */
#ifndef SIMCUDA_DEVICE_H
#define SIMCUDA_DEVICE_H

#include "cuda_abi.h"

#include <stdbool.h>

#define MAX_DEVICES 16

/* One GPU of a host, as $SIMCUDA_DEVICES describes it. Part of the control page: plain data. */
struct gpu {
    unsigned char uuid[16];
    /* Chip, "H200"; the name that programs see is "liveshift simulated GPU H200". */
    char chip[32];
    uint64_t total;
    /* Bytes that this process holds. */
    uint64_t used;
    uint32_t domain, bus;
    /* Of GPU_MIG…. */
    uint32_t traits;
};

enum gpu_trait {
    GPU_MIG = 1,
    GPU_MPS = 2,
    GPU_NO_PERSISTENCE = 4,
};

struct inventory {
    uint32_t count;
    /* Driver branch, such as 580. */
    uint32_t driver;
    /* And its whole version, such as "580.159.03". */
    char version[24];
    struct gpu gpus[MAX_DEVICES];
};

/*
 * Reads $SIMCUDA_DEVICES: entries, separated by commas or line ends, or the path of a file that holds
 * them. Where it isn't set, they are read from /run/simcuda/devices if that exists; else there is one
 * H200 of 16 GiB. An entry is a GPU, "UUID:CHIP:SIZE[:PCI address] [mig] [mps] [nopersistence]", or
 * "driver=580.159.03". $SIMCUDA_DRIVER (default 580), a version too, goes before. false: something
 * can't be understood, said on stderr.
 */
bool inventory_read(struct inventory *inventory);

/* Reads the inventory into the control page and applies CUDA_VISIBLE_DEVICES. */
CUresult devices_initialise(void);
int device_count(void);
bool device_valid(CUdevice device);
/* Index in the inventory, which includes what CUDA_VISIBLE_DEVICES hides. */
int device_gpu(CUdevice device);

/* Takes bytes of a device's memory, or CUDA_ERROR_OUT_OF_MEMORY. */
CUresult device_charge(CUdevice device, size_t bytes);
void device_release(CUdevice device, size_t bytes);
/* A checkpoint: lets go of all memory of all devices. */
void devices_vacate(void);
/* Bytes that GPU number `gpu` of the inventory held before. */
uint64_t gpu_vacated(uint32_t gpu);
/* A restore: each GPU of the inventory becomes another and holds again what it held. */
void devices_move(const struct gpu *const *others, uint32_t driver);

/* CUDA version of a driver branch, such as 13000. */
int cuda_version(uint32_t driver);

#endif
