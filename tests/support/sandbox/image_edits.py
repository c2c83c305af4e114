# SPDX-License-Identifier: Apache-2.0
"""Changes single fields of CRIU's images, as a hostile host would."""

from __future__ import annotations

import struct
from pathlib import Path

from liveshift.criu_glue.images.protobuf import fields

Field = tuple[int, "int | bytes"]


def varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def encode(found: list[Field]) -> bytes:
    out = b""
    for number, value in found:
        if isinstance(value, int):
            out += varint(number << 3) + varint(value)
        else:
            out += varint(number << 3 | 2) + varint(len(value)) + value
    return out


def decode(raw: bytes) -> list[Field]:
    return [(n, v if isinstance(v, int) else bytes(v)) for n, v in fields(memoryview(raw))]


def put(raw: bytes, path: tuple[int, ...], value: int | bytes | None) -> bytes:
    """Set the field at a path of numbers (its first one of that number); None takes all away."""
    found, (number, *below) = decode(raw), path
    at = next((n for n, field in enumerate(found) if field[0] == number), None)
    if below:
        assert at is not None
        inner = found[at][1]
        assert isinstance(inner, bytes)
        found[at] = number, put(inner, tuple(below), value)
    elif value is None:
        found = [field for field in found if field[0] != number]
    elif at is None:
        found.append((number, value))
    else:
        found[at] = number, value
    return encode(found)


def change_first(path: Path, field: tuple[int, ...], value: int | bytes | None) -> None:
    """In a file's first entry; what comes after that stays."""
    raw, at = path.read_bytes(), 8 - 4 * (path.name == "inventory.img")
    end = at + 4 + struct.unpack_from("<I", raw, at)[0]
    entry = put(raw[at + 4 : end], field, value)
    path.write_bytes(raw[:at] + struct.pack("<I", len(entry)) + entry + raw[end:])
