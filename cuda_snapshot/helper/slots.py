# SPDX-License-Identifier: Apache-2.0
"""What passes on a connection while device memory is copied through a ring of slots.

It begins with a RingHere, whose memfd goes along. Out: the helper says Filled, the client Free when
it is done with a slot. In: the client has all slots, says Filled, and the helper Free. Slots go
round in order. Ended is the helper's last word; the ring is another copy's only when the client has
closed the connection, since until then it may still be reading or writing there.
"""

from __future__ import annotations

import os
import select

import msgspec

from ...errors import LiveshiftError, from_wire
from .blocks import Figures
from .channel import Channel


class Word(msgspec.Struct, frozen=True, tag_field="t", tag=True, forbid_unknown_fields=True):
    """Base of them all; the tag is the class name."""


class RingHere(Word, frozen=True):
    """0 slots and no memfd where there is nothing to copy."""

    slots: int
    slot_bytes: int
    total: int
    """Bytes of the key's blocks."""


class Filled(Word, frozen=True):
    """A slot holds the next ``size`` bytes."""

    slot: int
    size: int


class Free(Word, frozen=True):
    """A slot may be filled again."""

    slot: int


class Finish(Word, frozen=True):
    """The client has said all bytes."""


class Ended(Word, frozen=True):
    """It is over: how it went, or why it failed (as errors.to_wire says it)."""

    figures: Figures | None
    error: tuple[str, str, str | None] | None


Said = RingHere | Filled | Free | Finish | Ended
_decoder: msgspec.msgpack.Decoder[Said] = msgspec.msgpack.Decoder(Said)


def say(channel: Channel, word: Said, *descriptors: int) -> None:
    """Raises OSError."""
    channel.send(msgspec.msgpack.encode(word), descriptors)


def hear(channel: Channel) -> Said:
    """The next word. Raises OSError, EOFError."""
    return _decode(channel.receive())


def hear_ring(channel: Channel) -> tuple[RingHere, int | None]:
    """The first word, and the memfd, the caller's from then on. Raises LiveshiftError where the
    helper says instead why there is none; OSError, EOFError."""
    raw, descriptors = channel.receive_all()
    try:
        word = _decode(raw)
        if isinstance(word, Ended) and word.error is not None:
            raise from_wire(*word.error)
        if not isinstance(word, RingHere) or len(descriptors) != (1 if word.slots else 0):
            raise LiveshiftError(f"the GPU helper said {word!r} where a ring was due")
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    return word, descriptors[0] if descriptors else None


def waiting(channel: Channel) -> bool:
    """Something has come, or the peer is gone: ``hear`` would not block."""
    poll = select.poll()
    poll.register(channel.socket, select.POLLIN)
    return bool(poll.poll(0))


def _decode(raw: bytes) -> Said:
    try:
        return _decoder.decode(raw)
    except msgspec.MsgspecError as error:
        raise LiveshiftError(f"the message about slots is not understood: {error}") from error
