# SPDX-License-Identifier: Apache-2.0
"""The words (messages) on a connection while device memory is copied through a ring of slots.

The helper begins with a RingHere, with the ring's memfd. Copy out: the helper sends SlotFilled, and
the client sends Free when it has read the slot. Copy in: the client has all slots at first and
sends SlotFilled, and the helper sends Free. Slots are used in order. TransferEnded is the helper's
last word. Another copy may use the ring only when the client has closed the connection, since until
then the client may still read or write there.
"""

from __future__ import annotations

import os
import select

import msgspec

from ...errors import LiveshiftError, from_wire
from .blocks import Figures
from .channel import Channel


class Word(msgspec.Struct, frozen=True, tag_field="t", tag=True, forbid_unknown_fields=True):
    """Base of all words; the tag is the class name."""


class RingHere(Word, frozen=True):
    """The ring of this copy. If there is nothing to copy: 0 slots and no memfd."""

    slots: int
    slot_bytes: int
    total: int
    """Bytes of the key's blocks."""


class SlotFilled(Word, frozen=True):
    """A slot holds the next ``size`` bytes."""

    slot: int
    size: int


class Free(Word, frozen=True):
    """A slot may be filled again."""

    slot: int


class Finish(Word, frozen=True):
    """The client has sent all bytes."""


class TransferEnded(Word, frozen=True):
    """The copy is over: its figures, or its error as errors.to_wire makes it."""

    figures: Figures | None
    error: tuple[str, str, str | None] | None


Said = RingHere | SlotFilled | Free | Finish | TransferEnded
_decoder: msgspec.msgpack.Decoder[Said] = msgspec.msgpack.Decoder(Said)


def say(channel: Channel, word: Said, *descriptors: int) -> None:
    """Send a word. Raises OSError."""
    channel.send(msgspec.msgpack.encode(word), descriptors)


def hear(channel: Channel) -> Said:
    """Wait for the next word. Raises OSError, EOFError."""
    return _decode(channel.receive())


def hear_ring(channel: Channel) -> tuple[RingHere, int | None]:
    """Wait for the first word and the memfd, which the caller must close. Raises LiveshiftError if
    the helper reports instead why there is no ring; OSError, EOFError."""
    raw, descriptors = channel.receive_all()
    try:
        word = _decode(raw)
        if isinstance(word, TransferEnded) and word.error is not None:
            raise from_wire(*word.error)
        if not isinstance(word, RingHere) or len(descriptors) != (1 if word.slots else 0):
            raise LiveshiftError(f"the GPU helper said {word!r} where a ring was due")
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    return word, descriptors[0] if descriptors else None


def waiting(channel: Channel) -> bool:
    """Whether a word has come or the peer has gone, so that :func:`hear` would not block."""
    poll = select.poll()
    poll.register(channel.socket, select.POLLIN)
    return bool(poll.poll(0))


def _decode(raw: bytes) -> Said:
    try:
        return _decoder.decode(raw)
    except msgspec.MsgspecError as error:
        raise LiveshiftError(f"the message about slots is not understood: {error}") from error
