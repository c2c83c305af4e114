/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Element-wise reduction, one member after the other in the order of ranks. 16-bit floats are added
 * in float and rounded to nearest even at each step. No 8-bit floats: they move, but don't reduce.
 */
#include <math.h>
#include <string.h>

#include "sim.h"

size_t type_size(ncclDataType_t type) {
    switch (type) {
    case ncclInt8:
    case ncclUint8:
    case ncclFloat8e4m3:
    case ncclFloat8e5m2:
        return 1;
    case ncclFloat16:
    case ncclBfloat16:
        return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
        return 4;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64:
        return 8;
    default:
        return 0;
    }
}

bool reduction_supported(ncclDataType_t type, const struct reduction *reduction) {
    return type != ncclFloat8e4m3 && type != ncclFloat8e5m2 && reduction->op <= ncclNumOps;
}

static float bits_to_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static uint32_t float_to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static float from_bf16(uint16_t bits) { return bits_to_float((uint32_t)bits << 16); }

static uint16_t to_bf16(float value) {
    uint32_t bits = float_to_bits(value);
    if (isnan(value))
        return 0x7fff;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static float from_half(uint16_t bits) {
    float sign = bits & 0x8000 ? -1.0f : 1.0f;
    int exponent = bits >> 10 & 0x1f;
    float fraction = (float)(bits & 0x3ff);
    if (exponent == 0x1f)
        return fraction != 0 ? NAN : sign * INFINITY;
    return sign * (exponent == 0 ? ldexpf(fraction, -24) : ldexpf(fraction + 1024, exponent - 25));
}

static uint16_t to_half(float value) {
    uint16_t sign = float_to_bits(value) >> 16 & 0x8000;
    float size = fabsf(value);
    int exponent;
    if (isnan(value))
        return 0x7fff;
    if (size >= 65520.0f) /* half way from the largest half to the next power: rounds to infinity */
        return sign | 0x7c00;
    if (size <
        ldexpf(1, -14)) /* subnormal: units of 2^-24; rounding up may reach the first normal */
        return sign | (uint16_t)nearbyintf(ldexpf(size, 24));
    frexpf(size, &exponent); /* size in [2^(exponent-1), 2^exponent) */
    uint32_t fraction = (uint32_t)nearbyintf(ldexpf(size, 11 - exponent));
    return sign | (uint16_t)((((uint32_t)exponent + 13) << 10) + fraction);
}

/* How a type is stored and in what it is computed. */
#define AS_IS(value) (value)
#define EACH_TYPE(X)                                                                               \
    X(ncclInt8, int8_t, int, AS_IS, (int8_t))                                                      \
    X(ncclUint8, uint8_t, int, AS_IS, (uint8_t))                                                   \
    X(ncclInt32, int32_t, int64_t, AS_IS, (int32_t))                                               \
    X(ncclUint32, uint32_t, uint32_t, AS_IS, (uint32_t))                                           \
    X(ncclInt64, int64_t, uint64_t, AS_IS, (int64_t))                                              \
    X(ncclUint64, uint64_t, uint64_t, AS_IS, (uint64_t))                                           \
    X(ncclFloat16, uint16_t, float, from_half, to_half)                                            \
    X(ncclFloat32, float, float, AS_IS, (float))                                                   \
    X(ncclFloat64, double, double, AS_IS, (double))                                                \
    X(ncclBfloat16, uint16_t, float, from_bf16, to_bf16)

static const void *scalar_of(const struct reduction *reduction) {
    return reduction->residence == ncclScalarDevice ? reduction->device_scalar : reduction->scalar;
}

/* Names that the expansions below share: values or result, next, count, reduction, members. */
#define SCALE(enumerator, stored, computed, load, store)                                           \
    case enumerator: {                                                                             \
        stored *into = values;                                                                     \
        stored factor;                                                                             \
        memcpy(&factor, scalar_of(reduction), sizeof factor);                                      \
        for (size_t index = 0; index < count; index++)                                             \
            into[index] = store((computed)load(into[index]) * (computed)load(factor));             \
        break;                                                                                     \
    }

void reduction_scale(const struct reduction *reduction, ncclDataType_t type, void *values,
                     size_t count) {
    switch (type) {
        EACH_TYPE(SCALE)
    default:
        break;
    }
}

#define ADD(enumerator, stored, computed, load, store)                                             \
    case enumerator: {                                                                             \
        stored *into = result;                                                                     \
        const stored *from = next;                                                                 \
        for (size_t index = 0; index < count; index++) {                                           \
            stored old = into[index], one = from[index];                                           \
            switch (reduction->op) {                                                               \
            case ncclProd:                                                                         \
                into[index] = store((computed)load(old) * (computed)load(one));                    \
                break;                                                                             \
            case ncclMax:                                                                          \
                into[index] = load(one) > load(old) ? one : old;                                   \
                break;                                                                             \
            case ncclMin:                                                                          \
                into[index] = load(one) < load(old) ? one : old;                                   \
                break;                                                                             \
            default:                                                                               \
                into[index] = store((computed)load(old) + (computed)load(one));                    \
            }                                                                                      \
        }                                                                                          \
        break;                                                                                     \
    }

void reduction_add(const struct reduction *reduction, ncclDataType_t type, void *result,
                   const void *next, size_t count) {
    switch (type) {
        EACH_TYPE(ADD)
    default:
        break;
    }
}

/* a signed element is divided as such; the 16-bit floats, stored unsigned, as floats */
#define DIVISOR(stored)                                                                            \
    __typeof__(_Generic((stored)0,                                                                 \
                   int64_t: (int64_t)0,                                                            \
                   uint64_t: (uint64_t)0,                                                          \
                   uint32_t: (uint32_t)0,                                                          \
                   double: 0.0,                                                                    \
                   float: 0.0f,                                                                    \
                   default: 0))

#define END(enumerator, stored, computed, load, store)                                             \
    case enumerator: {                                                                             \
        stored *into = result;                                                                     \
        for (size_t index = 0; index < count; index++)                                             \
            into[index] = store(load(into[index]) / (DIVISOR(stored))members);                     \
        break;                                                                                     \
    }

void reduction_end(const struct reduction *reduction, ncclDataType_t type, void *result,
                   size_t count, int members) {
    if (reduction->op != ncclAvg)
        return;
    switch (type) {
        EACH_TYPE(END)
    default:
        break;
    }
}
