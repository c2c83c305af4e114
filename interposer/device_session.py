# SPDX-License-Identifier: Apache-2.0
"""The Python mirror of ``device_session.h``: the fields of its messages, and nothing else.

The header says what they mean; test_device_session_layout.py holds the two equal.
"""

from __future__ import annotations

import enum
import errno
import os
from dataclasses import dataclass

from .layout import CStruct, text_of

PROTOCOL = 1
SAMPLE = 4096
"""One sampled piece of a checksum has this many bytes."""

MAX_ERRNO = 4095
"""The largest errno value of Linux. We limit the number that a process sends to it."""

REQUEST = CStruct(
    (
        ("op", "I"),
        ("device", "i"),
        ("address", "Q"),
        ("size", "Q"),
        ("argument", "Q"),
    )
)

REPLY = CStruct(
    (
        ("op", "I"),
        ("result", "i"),
        ("address", "Q"),
        ("size", "Q"),
        ("value", "Q"),
        ("device", "i"),
        ("kind", "I"),
        ("uuid", "16s"),
        ("message", "96s"),
    )
)


class Op(enum.IntEnum):
    """enum liveshift_device_op."""

    HELLO = 0
    NEXT = 1
    CHECKSUM = 2
    EXPORT = 3
    RELEASE = 4
    MAP = 5
    SYNC = 6
    END = 7
    OWN = 8


@dataclass(frozen=True)
class SessionReply:
    """A process's answer. ``result``: 0, a CUresult, or minus an errno value."""

    op: int
    result: int
    address: int
    size: int
    value: int
    device: int
    kind: int
    uuid: bytes
    message: str

    @property
    def failure(self) -> str:
        """Why ``result`` is not 0, for people; "" if it is 0."""
        if self.result == 0:
            return ""
        error = min(-self.result, MAX_ERRNO)
        code = f"CUDA error {self.result}" if self.result > 0 else os.strerror(error)
        return f"{self.message} ({code})" if self.message else code

    @property
    def ended(self) -> bool:
        """Whether this is the answer to NEXT after the last allocation."""
        return self.result == -errno.ENOENT


def request(op: Op, address: int = 0, size: int = 0, argument: int = 0) -> bytes:
    """One packet that the helper sends."""
    return REQUEST.struct.pack(op, 0, address, size, argument)


def reply(packet: bytes) -> SessionReply:
    """Decode one packet of the process. Raises ValueError if it has another size."""
    if len(packet) != REPLY.size:
        raise ValueError(f"the reply has {len(packet)} bytes, not {REPLY.size}")
    fields = REPLY.unpack(packet)
    return SessionReply(**(fields | {"message": text_of(fields["message"])}))


def socket_name(inner_pid: int) -> str:
    """The socket's name in the directory of pages, for the process with that pid in its capsule."""
    return f".device.{inner_pid}"
