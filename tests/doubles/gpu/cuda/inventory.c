/* SPDX-License-Identifier: Apache-2.0 */
/* Reading $SIMCUDA_DEVICES and $SIMCUDA_DRIVER. */
#include "device.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DEFAULT_DEVICES "GPU-51c0da00-0000-4000-8000-000000000001:H200:16GiB"

/* "GPU-" and hexadecimal digits, dashes anywhere; missing ones are 0, which keeps tests readable. */
static bool parse_uuid(const char *text, const char *end, unsigned char uuid[16]) {
    memset(uuid, 0, 16);
    if (end - text < 5 || strncmp(text, "GPU-", 4) != 0)
        return false;
    unsigned int digits = 0;
    for (text += 4; text < end; text++) {
        if (*text == '-')
            continue;
        if (!isxdigit((unsigned char)*text) || digits == 32)
            return false;
        unsigned int digit = isdigit((unsigned char)*text)
                                 ? (unsigned int)(*text - '0')
                                 : (unsigned int)(tolower((unsigned char)*text) - 'a' + 10);
        uuid[digits / 2] |= (unsigned char)(digits % 2 == 0 ? digit << 4 : digit);
        digits++;
    }
    return true;
}

static bool parse_size(const char *text, const char *end, uint64_t *size) {
    char *unit;
    *size = strtoull(text, &unit, 10);
    size_t length = (size_t)(end - unit);
    if (unit == text)
        return false;
    if (length == 0)
        return true;
    if (length != 3 || unit[1] != 'i' || unit[2] != 'B')
        return false;
    switch (unit[0]) {
    case 'G':
        *size <<= 30;
        return true;
    case 'M':
        *size <<= 20;
        return true;
    case 'K':
        *size <<= 10;
        return true;
    default:
        return false;
    }
}

static bool parse_gpu(const char *text, const char *end, struct gpu *gpu) {
    const char *chip = memchr(text, ':', (size_t)(end - text));
    const char *size = chip ? memchr(chip + 1, ':', (size_t)(end - chip - 1)) : NULL;
    if (size == NULL || (size_t)(size - chip) > sizeof gpu->chip)
        return false;
    memcpy(gpu->chip, chip + 1, (size_t)(size - chip - 1));
    return parse_uuid(text, chip, gpu->uuid) && parse_size(size + 1, end, &gpu->total);
}

static bool parse_devices(const char *text, struct inventory *inventory) {
    for (const char *at = text; *at != '\0';) {
        size_t length = strcspn(at, ",\n");
        if (length > 0) {
            if (inventory->count == MAX_DEVICES ||
                !parse_gpu(at, at + length, &inventory->gpus[inventory->count])) {
                fprintf(stderr, "simcuda: SIMCUDA_DEVICES holds %.*s, not UUID:CHIP:SIZE\n",
                        (int)length, at);
                return false;
            }
            inventory->count++;
        }
        at += length + (at[length] != '\0');
    }
    return true;
}

/* A host's inventory may be a file, which differs between the hosts of a lab where their environment
   doesn't. */
static bool read_file(const char *path, char *text, size_t size) {
    FILE *file = fopen(path, "re");
    if (file == NULL) {
        fprintf(stderr, "simcuda: SIMCUDA_DEVICES names %s, which can't be read: %m\n", path);
        return false;
    }
    text[fread(text, 1, size - 1, file)] = '\0';
    fclose(file);
    return true;
}

bool inventory_read(struct inventory *inventory) {
    memset(inventory, 0, sizeof *inventory);
    const char *driver = getenv("SIMCUDA_DRIVER");
    inventory->driver = driver && *driver ? (uint32_t)strtoul(driver, NULL, 10) : 580;
    const char *devices = getenv("SIMCUDA_DEVICES");
    char text[MAX_DEVICES * 128];
    if (devices != NULL && devices[0] == '/') {
        if (!read_file(devices, text, sizeof text))
            return false;
        devices = text;
    }
    return parse_devices(devices ? devices : DEFAULT_DEVICES, inventory);
}

int cuda_version(uint32_t driver) {
    static const struct {
        uint32_t driver;
        int cuda;
    } versions[] = {{615, 13040}, {610, 13030}, {590, 13010}, {580, 13000}, {575, 12090},
                    {570, 12080}, {565, 12070}, {560, 12060}, {555, 12050}, {550, 12040}};
    for (size_t i = 0; i < sizeof versions / sizeof *versions; i++)
        if (driver >= versions[i].driver)
            return versions[i].cuda;
    return 12000;
}
