/* SPDX-License-Identifier: Apache-2.0 */
/* Reading $SIMCUDA_DEVICES and $SIMCUDA_DRIVER. */
#include "device.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define DEFAULT_FILE "/run/simcuda/devices"
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

/* The first `mark` in text, or its end. */
static const char *upto(const char *text, const char *end, char mark) {
    const char *found = memchr(text, mark, (size_t)(end - text));
    return found ? found : end;
}

static bool parse_traits(const char *text, const char *end, uint32_t *traits) {
    static const char *const names[] = {"mig", "mps", "nopersistence"};
    while (text < end) {
        const char *word = text + 1;
        uint32_t found = 0;
        text = upto(word, end, ' ');
        for (uint32_t i = 0; i < sizeof names / sizeof *names; i++)
            if (strlen(names[i]) == (size_t)(text - word) &&
                memcmp(names[i], word, strlen(names[i])) == 0)
                found = 1u << i;
        if (found == 0)
            return false;
        *traits |= found;
    }
    return true;
}

/* UUID:CHIP:SIZE[:PCI address] and words. */
static bool parse_gpu(const char *text, const char *end, struct gpu *gpu) {
    const char *place = upto(text, end, ' ');
    const char *chip = upto(text, place, ':');
    const char *size = chip < place ? upto(chip + 1, place, ':') : place;
    if (size == place || (size_t)(size - chip) > sizeof gpu->chip)
        return false;
    memcpy(gpu->chip, chip + 1, (size_t)(size - chip - 1));
    const char *pci = upto(size + 1, place, ':');
    if (pci < place && sscanf(pci + 1, "%x:%x:", &gpu->domain, &gpu->bus) != 2)
        return false;
    return parse_uuid(text, chip, gpu->uuid) && parse_size(size + 1, pci, &gpu->total) &&
           parse_traits(place, end, &gpu->traits);
}

static void set_driver(struct inventory *inventory, const char *version, size_t length) {
    snprintf(inventory->version, sizeof inventory->version, "%.*s", (int)length, version);
    inventory->driver = (uint32_t)strtoul(inventory->version, NULL, 10);
    if (strchr(inventory->version, '.') == NULL)
        snprintf(inventory->version, sizeof inventory->version, "%u.0", inventory->driver);
}

static bool parse_entry(const char *at, size_t length, struct inventory *inventory) {
    static const char driver[] = "driver=";
    if (length > strlen(driver) && strncmp(at, driver, strlen(driver)) == 0) {
        set_driver(inventory, at + strlen(driver), length - strlen(driver));
        return true;
    }
    if (inventory->count == MAX_DEVICES)
        return false;
    struct gpu *gpu = &inventory->gpus[inventory->count];
    gpu->bus = 0x10 + inventory->count++;
    return parse_gpu(at, at + length, gpu);
}

static bool parse_devices(const char *text, struct inventory *inventory) {
    for (const char *at = text; *at != '\0';) {
        size_t length = strcspn(at, ",\n");
        if (length > 0 && !parse_entry(at, length, inventory)) {
            fprintf(stderr, "simcuda: SIMCUDA_DEVICES holds %.*s, not UUID:CHIP:SIZE\n",
                    (int)length, at);
            return false;
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
        fprintf(stderr, "simcuda: the inventory %s can't be read: %m\n", path);
        return false;
    }
    text[fread(text, 1, size - 1, file)] = '\0';
    fclose(file);
    return true;
}

bool inventory_read(struct inventory *inventory) {
    memset(inventory, 0, sizeof *inventory);
    set_driver(inventory, "580", 3);
    const char *devices = getenv("SIMCUDA_DEVICES");
    char text[MAX_DEVICES * 128];
    if (devices == NULL && access(DEFAULT_FILE, F_OK) == 0)
        devices = DEFAULT_FILE;
    if (devices != NULL && devices[0] == '/') {
        if (!read_file(devices, text, sizeof text))
            return false;
        devices = text;
    }
    if (!parse_devices(devices ? devices : DEFAULT_DEVICES, inventory))
        return false;
    const char *driver = getenv("SIMCUDA_DRIVER");
    if (driver != NULL && *driver != '\0')
        set_driver(inventory, driver, strlen(driver));
    return true;
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
