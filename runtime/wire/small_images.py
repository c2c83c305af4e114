# SPDX-License-Identifier: Apache-2.0
"""CRIU's small image files travel together, in one stream.

CRIU writes two files for each shared mapping, one for each thread and seven for each process, most
of them of less than 4 KiB. A stream for each file costs two messages on the wire, each acknowledged
and handled on both hosts: 10,000 shared mappings took ten seconds longer. Larger files, such as
pages, keep streams of their own.

A record is the length of the name (u16), the length of the file (u32), the name, the bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from ...errors import StepFailed

STREAM = "images"
SMALL = 64 << 10
"""The largest file, in bytes, that travels in the common stream."""

PACK = 512 << 10
"""When this many bytes of records have collected, the packer sends them."""

_HEAD = struct.Struct("<HI")
_LONGEST_NAME = 100


class SmallImagePacker:
    """The sink of a dump (capture.Sink); it passes ``send`` what goes onto the wire."""

    def __init__(self, send: Callable[[str, bytes], None]) -> None:
        self._send = send
        self._open: dict[str, bytearray] = {}
        self._large: set[str] = set()
        self._records = bytearray()
        self._begun = False

    def __call__(self, name: str, data: bytes) -> None:
        """Take more bytes of an image; empty ``data`` ends the image."""
        if name in self._large:
            self._send("image:" + name, data)
            return
        held = self._open.setdefault(name, bytearray())
        held += data
        if len(held) > SMALL:
            self._large.add(name)
            self._send("image:" + name, bytes(self._open.pop(name)))
        elif not data:
            del self._open[name]
            encoded = name.encode()
            self._records += _HEAD.pack(len(encoded), len(held)) + encoded + held
            # Send the first one at once: it shows the destination that the tree is frozen.
            if len(self._records) >= PACK or not self._begun:
                self._flush()

    def finish(self) -> None:
        """All images have ended: send what is left, and end the common stream."""
        self._flush()
        if self._begun:
            self._send(STREAM, b"")

    def _flush(self) -> None:
        if self._records:
            self._begun = True
            self._send(STREAM, bytes(self._records))
            self._records.clear()


class SmallImageUnpacker:
    """Reads the common stream; calls ``keep`` with each file's name and bytes."""

    def __init__(self, keep: Callable[[str, memoryview], None]) -> None:
        self._keep = keep
        self._rest = bytearray()

    def write(self, data: memoryview | bytes) -> None:
        """Raises StepFailed for bytes that no SmallImagePacker sends, and what ``keep`` raises."""
        self._rest += data
        at = 0
        while len(self._rest) - at >= _HEAD.size:
            name_size, size = _HEAD.unpack_from(self._rest, at)
            if not 0 < name_size <= _LONGEST_NAME or size > SMALL:
                raise StepFailed(
                    "ship",
                    f"the common stream has an image of {size} bytes with a name of {name_size}",
                )
            begin = at + _HEAD.size + name_size
            if len(self._rest) < begin + size:
                break
            name = self._rest[at + _HEAD.size : begin].decode("ascii", "replace")
            at = begin + size
            self._keep(name, memoryview(bytes(self._rest[begin:at])))
        del self._rest[:at]

    def check_ended(self) -> None:
        """Raises StepFailed if the last record was cut off."""
        if self._rest:
            raise StepFailed(
                "ship", f"the last image is cut off: only {len(self._rest)} bytes of it came"
            )
