# SPDX-License-Identifier: Apache-2.0
"""Inputs made from others: the engine for where no coverage-guided one is installed."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence

NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 63, (1 << 64) - 1)
TOKENS = (
    b"\x00",
    b"\xff",
    b"../",
    b"/",
    b"..",
    b".",
    b"\n",
    b'"',
    b"[",
    b"{",
    b"\x0a",
    b"\x91",
    b"\x81",
    b"\xc1",
    b"\xc6\xff\xff\xff\xff",
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"nan",
    b"9" * 40,
    b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
    b"\xed\xa0\x80",
    b"inf",
    b"-1",
)


def mutated(rng: random.Random, corpus: Sequence[bytes], largest: int) -> bytes:
    """One of the corpus with one to six changes."""
    data = bytearray(rng.choice(corpus))
    for _ in range(rng.randint(1, 6)):
        rng.choice(_CHANGES)(rng, data, corpus)
    return bytes(data[:largest])


def _at(rng: random.Random, data: bytearray) -> int:
    return rng.randrange(len(data) + 1)


def _flip(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _set(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    if data:
        data[rng.randrange(len(data))] = rng.randrange(256)


def _number(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    form = rng.choice(("<B", "<H", "<I", "<Q", ">H", ">I", ">Q"))
    raw = struct.pack(form, rng.choice(NUMBERS) & (1 << 8 * struct.calcsize(form)) - 1)
    at = _at(rng, data)
    data[at : at + len(raw) * rng.randrange(2)] = raw


def _insert(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    at = _at(rng, data)
    data[at:at] = rng.choice(TOKENS) * rng.choice((1, 1, 1, 2, 50, 2000))


def _delete(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    at = _at(rng, data)
    del data[at : at + rng.choice((1, 2, 4, 16, 512))]


def _cut(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    del data[_at(rng, data) :]


def _repeat(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    at, size = _at(rng, data), rng.choice((1, 4, 16, 512, 1024))
    data[at:at] = data[at : at + size] * rng.choice((1, 1, 2, 30))


def _splice(rng: random.Random, data: bytearray, corpus: Sequence[bytes]) -> None:
    other = rng.choice(corpus)
    start = rng.randrange(len(other) + 1)
    at = _at(rng, data)
    data[at : at + rng.choice((0, 8, len(data)))] = other[start : start + rng.choice((8, 64, 4096))]


_CHANGES = (_flip, _flip, _set, _set, _number, _number, _insert, _delete, _cut, _repeat, _splice)
