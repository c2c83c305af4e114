# SPDX-License-Identifier: Apache-2.0
"""Reads protobuf messages by field number, and refuses all that two readers could read differently.

A check protects us only if CRIU (protobuf-c) then reads the same values. So this reader refuses
what CRIU's encoder never writes and its decoder would cut, merge or skip.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

Value = int | memoryview

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_U32, _U64 = 1 << 32, 1 << 64


class Damaged(ValueError):
    """The bytes are no message, or the message lacks fields that it must have."""


class ProtobufMessage:
    """The fields of one message; a field that is asked for must have the type in the schema."""

    def __init__(self, raw: bytes | memoryview) -> None:
        self._fields: dict[int, list[Value]] = {}
        for number, value in fields(memoryview(raw)):
            self._fields.setdefault(number, []).append(value)

    def __contains__(self, number: int) -> bool:
        return number in self._fields

    def uint(self, number: int, default: int | None = None) -> int:
        """A 32-bit number; raises Damaged if it is missing and there is no default."""
        value = self._one(number)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or value >= _U32:
            raise Damaged(f"field {number} is no 32-bit number")
        return value

    def long(self, number: int) -> int:
        """A 64-bit number; raises Damaged if it is missing."""
        value = self._one(number)
        if not isinstance(value, int):
            raise Damaged(f"field {number} is no number")
        return value

    def uints(self, number: int) -> list[int]:
        """A repeated 32-bit number, packed or not."""
        found: list[int] = []
        for value in self._fields.get(number, ()):
            found += [value] if isinstance(value, int) else _packed(value)
        if any(value >= _U32 for value in found):
            raise Damaged(f"field {number} holds more than 32 bits")
        return found

    def raw(self, number: int) -> memoryview | None:
        """Bytes, a string or a message; None if the field is missing."""
        value = self._one(number)
        if isinstance(value, int):
            raise Damaged(f"field {number} is a number")
        return value

    def raws(self, number: int) -> list[memoryview]:
        values = self._fields.get(number, [])
        found = [value for value in values if isinstance(value, memoryview)]
        if len(found) != len(values):
            raise Damaged(f"field {number} is a number")
        return found

    def message(self, number: int) -> ProtobufMessage | None:
        raw = self.raw(number)
        return None if raw is None else ProtobufMessage(raw)

    def _one(self, number: int) -> Value | None:
        values = self._fields.get(number)
        if values is None:
            return None
        if len(values) > 1:
            raise Damaged(f"field {number} occurs {len(values)} times; at most one is allowed")
        return values[0]


def without(raw: memoryview, number: int) -> bytes:
    """The message without the fields of number ``number``."""
    return b"".join(raw[begin:end] for n, _, begin, end in spans(raw) if n != number)


def with_message(raw: memoryview, number: int, inner: bytes) -> bytes:
    """The message, with its field ``number`` replaced by ``inner``; the field holds a message."""
    return with_messages(raw, number, lambda _: inner)


def with_messages(raw: memoryview, number: int, change: Callable[[memoryview], bytes]) -> bytes:
    """The message, with each of its fields ``number`` changed; these fields hold messages."""
    out = []
    for n, value, begin, end in spans(raw):
        if n == number and isinstance(value, memoryview):
            inner = change(value)
            out += [_varint_of(number << 3 | _BYTES), _varint_of(len(inner)), inner]
        else:
            out.append(bytes(raw[begin:end]))
    return b"".join(out)


def with_uint(raw: memoryview, number: int, value: int) -> bytes:
    """The message, with its field ``number`` replaced by ``value``; the field holds a number."""
    field = _varint_of(number << 3 | _VARINT) + _varint_of(value)
    return b"".join(field if n == number else raw[begin:end] for n, _, begin, end in spans(raw))


def fields(raw: memoryview) -> Iterator[tuple[int, Value]]:
    """(number, value) of every field in order; 32-bit and 64-bit fields as bytes."""
    for number, value, _, _ in spans(raw):
        yield number, value


def spans(raw: memoryview) -> Iterator[tuple[int, Value, int, int]]:
    """(number, value, begin, end) of every field in order; begin and end are offsets in ``raw``."""
    at, end = 0, len(raw)
    while at < end:
        begin = at
        key, at = varint(raw, at)
        number, kind = key >> 3, key & 7
        if not 0 < number < 1 << 29:
            raise Damaged(f"field number {number} is invalid")
        if kind == _VARINT:
            value, at = varint(raw, at)
            yield number, value, begin, at
            continue
        if kind == _BYTES:
            size, at = varint(raw, at)
        elif kind in (_FIXED64, _FIXED32):
            size = 8 if kind == _FIXED64 else 4
        else:
            raise Damaged(f"field kind {kind} is unknown")
        if size > end - at:
            raise Damaged(f"field {number} ends beyond its message")
        yield number, raw[at : at + size], begin, at + size
        at += size


def varint(raw: memoryview, at: int) -> tuple[int, int]:
    """(the number at ``at``, the offset where it ends); raises Damaged beyond 64 bits."""
    value = shift = 0
    try:
        while True:
            byte = raw[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
            shift += 7
            if shift > 63:
                raise Damaged("a number has more than 64 bits")
    except IndexError:
        raise Damaged("a number ends beyond its message") from None
    if value >= _U64:
        raise Damaged("a number has more than 64 bits")
    return value, at


def _varint_of(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _packed(raw: memoryview) -> list[int]:
    found, at = [], 0
    while at < len(raw):
        value, at = varint(raw, at)
        found.append(value)
    return found
