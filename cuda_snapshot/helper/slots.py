# SPDX-License-Identifier: Apache-2.0
"""The messages on a connection while device memory is copied through a ring of slots.

The helper begins with a RingHere, with the ring's memfd. Copy out: the helper sends SlotFilled, and
the client sends Free when it has read the slot. Copy in: the client has all slots at first and
sends SlotFilled, and the helper sends Free. The bytes come in their order, in any
slots. TransferEnded is the helper's
last message. Another copy may use the ring only when the client has closed the connection, since
until then the client may still read or write there.
"""

from __future__ import annotations

import os

import msgspec

from ...errors import LiveshiftError, from_wire
from .blocks import Figures
from .channel import Channel


class RingMessageBase(
    msgspec.Struct, frozen=True, tag_field="t", tag=True, forbid_unknown_fields=True
):
    """Base of all messages; the tag is the class name."""


class RingHere(RingMessageBase, frozen=True):
    """The ring of this copy."""

    slots: int
    slot_bytes: int
    total: int
    """Bytes of the key's blocks."""


class SlotFilled(RingMessageBase, frozen=True):
    """A slot holds the next ``size`` bytes."""

    slot: int
    size: int


class Free(RingMessageBase, frozen=True):
    """A slot may be filled again."""

    slot: int


class Finish(RingMessageBase, frozen=True):
    """The client has sent all bytes."""


class TransferEnded(RingMessageBase, frozen=True):
    """The copy is over: its figures, or its error as errors.to_wire makes it."""

    figures: Figures | None
    error: tuple[str, str, str | None] | None


RingMessage = RingHere | SlotFilled | Free | Finish | TransferEnded
_decoder: msgspec.msgpack.Decoder[RingMessage] = msgspec.msgpack.Decoder(RingMessage)


def send_message(channel: Channel, message: RingMessage, *descriptors: int) -> None:
    """Send a message. Raises OSError."""
    channel.send(msgspec.msgpack.encode(message), descriptors)


def receive_message(channel: Channel) -> RingMessage:
    """Wait for the next message. Raises OSError, EOFError."""
    return _decode(channel.receive())


def receive_ring(channel: Channel) -> tuple[RingHere, int]:
    """Wait for the first message and the memfd, which the caller must close. Raises LiveshiftError
    if the helper reports instead why there is no ring; OSError, EOFError."""
    raw, descriptors = channel.receive_all()
    try:
        message = _decode(raw)
        if isinstance(message, TransferEnded) and message.error is not None:
            raise from_wire(*message.error)
        if not isinstance(message, RingHere) or len(descriptors) != 1:
            raise LiveshiftError(f"the GPU helper sent {message!r} where a ring was due")
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    return message, descriptors[0]


def _decode(raw: bytes) -> RingMessage:
    try:
        return _decoder.decode(raw)
    except msgspec.MsgspecError as error:
        raise LiveshiftError(f"the message about slots is not understood: {error}") from error
