# SPDX-License-Identifier: Apache-2.0
"""What the orchestrator announced to a destination for one migration, and how much of it has
come."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import xxhash

from ...errors import LiveshiftError
from .compression import restore
from .header import DEVICE, LANES, RATE, RATE_LIMIT, SEAL, WANTS, Header, PageHeader
from .page_lane import ANSWER
from .page_streams import PageStreams
from .seal import TAG, Opener, Sealer, in_clear
from .wants import pack_wants

log = logging.getLogger("liveshift.wire")

TEXT = 500
"""A refusal has at most this many characters."""

PageAnswer = tuple[str, int | str]
Answer = tuple[str, int | str | bytes]


class Inlet(Protocol):
    """The destination's consumer of the chunks that one migration sends on lane 0."""

    @property
    def complete(self) -> bool:
        """Whether the whole image is here; the receiver writes nothing after that."""

    def write(self, stream: str, data: memoryview) -> None:
        """Store the bytes of a stream; empty bytes end the stream."""


class IncomingSeal:
    """The destination's end of one key, and the next number of each lane under it.

    ``number``: the number of the question that brought the key. ``speaker``: the public key that
    lane 0 was opened with, which proves who sent it. Several threads may use one, each for its own
    lanes.
    """

    def __init__(self, key: bytes, number: int, speaker: str) -> None:
        self.key, self.number, self.speaker = key, number, speaker
        self.expected = [0] * (1 + LANES)  # number of the next chunk, by lane
        self.opener, self._sealer = Opener(key, "pages"), Sealer(key, "answers")
        self._answers = [_first_answer()] * (1 + LANES)

    def answer(self, lane: int, kind: str, value: int | str) -> bytes:
        number = self._answers[lane]
        self._answers[lane] += 1
        said = msgspec.msgpack.encode((kind, value if isinstance(value, int) else value[:TEXT]))
        raw = bytearray(ANSWER.size + len(said) + TAG)
        ANSWER.pack_into(raw, 0, number)
        self._sealer.seal(lane, number, b"", said, memoryview(raw)[ANSWER.size :])
        return bytes(raw)


def _first_answer() -> int:
    """The number of a lane's first answer. Numbers of answers are nonces of the seal.

    They must be above all numbers of an earlier agent of this host, because a new agent may get
    the same key. CLOCK_BOOTTIME only grows until a reboot (clock_gettime(2)), and no lane answers
    more than once per nanosecond. A reboot is safe too: the migration was announced to an agent
    that is gone, and each new :class:`Lanes` makes a key of its own.
    """
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


@dataclass
class Announced:
    """One migration that this destination expects.

    ``limit``: bytes that lane 0 may bring. ``lanes``: the number of lanes for pages. ``clear``:
    pages may come in clear (wire.seal). One thread takes the chunks of lane 0. Other threads take
    the chunks of pages, each for its own lanes.
    """

    migration: str
    source: str
    inlet: Inlet
    limit: int
    pages: PageStreams | None = None
    lanes: int = 0
    seal: IncomingSeal | None = None
    clear: bool = False
    refused: str | None = None
    """Why the destination takes nothing more for this migration; None while it takes chunks."""
    ordered: int = 0
    """Bytes taken on lane 0; ``paged`` counts the bytes taken on the other lanes."""
    paged: int = 0
    _expected: int = 0
    _measured: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)  # guards what the lanes share

    def __post_init__(self) -> None:
        if self.inlet.complete:
            self._expected = sys.maxsize

    def accept(self, header: Header, data: memoryview) -> Answer:
        """Take one chunk of lane 0 and return the answer."""
        expected = self._expected
        if header.number < expected:
            return "ack", expected - 1
        if header.number > expected or xxhash.xxh3_64_intdigest(data) != header.digest:
            return "again", expected
        if (why := self._refuses(lambda: self._write(header.stream, data))) is not None:
            return "refused", why
        self._expected += 1
        return "ack", header.number

    def reply(self, header: Header, data: memoryview, speaker: str) -> Answer:
        """Answer a question on lane 0; raises LiveshiftError for an unknown or damaged one."""
        if self.pages is None:
            raise LiveshiftError("no pages of memory were announced")
        if header.stream == WANTS and not data:
            wants = () if self.inlet.complete else self.pages.wants()
            return WANTS, pack_wants(header.number, wants)
        if header.stream != SEAL:
            raise LiveshiftError(
                f"the peer asked for {header.stream!a}, which this host does not answer"
            )
        if xxhash.xxh3_64_intdigest(data) != header.digest:
            raise LiveshiftError("the key for pages of memory is damaged")
        key, seal = bytes(data), self.seal
        if in_clear(key) and not self.clear:
            raise LiveshiftError(
                f'{self.source} sends memory in clear (wire.seal = "off" in its cluster file), and '
                "this host's cluster file does not: make both files equal"
            )
        # A late question must not bring an earlier key back: that key's numbers would begin again.
        if seal is None or (header.number > seal.number and key != seal.key):
            self.seal = IncomingSeal(key, header.number, speaker)
        return SEAL, header.number

    def take_page(
        self, seal: IncomingSeal, header: PageHeader, data: memoryview, tag: bytes
    ) -> PageAnswer:
        """Take one chunk of another lane, which ``seal`` has opened, and return the answer."""
        expected, lane = seal.expected[header.lane], header.lane
        if self.refused is not None:
            return "refused", self.refused
        if lane > self.lanes:
            return "refused", f"lane {lane} of {self.migration} was not announced"
        if header.number < expected:
            return "ack", expected - 1
        if header.number > expected:
            return "again", expected
        if (why := self._refuses(lambda: self._write_page(header, data, tag))) is not None:
            return "refused", why
        seal.expected[lane] += 1
        return "ack", header.number

    def _refuses(self, write: Callable[[], None]) -> str | None:
        """Write, and return why that failed; after a failure this migration takes nothing more."""
        if self.refused is not None:
            return self.refused
        try:
            write()
        except Exception as error:
            if not isinstance(error, LiveshiftError):
                log.exception("cannot take the image of %s", self.migration)
            else:
                log.error("cannot take the image of %s: %s", self.migration, error)
            self.refused = self.refused or str(error)  # another lane may have failed before
        return self.refused

    def _write(self, stream: str, data: memoryview) -> None:
        if self.ordered + len(data) > self.limit:
            raise LiveshiftError(
                f"the source sent more than the {self.limit} bytes that were announced"
                f" for {self.migration}"
            )
        self.inlet.write(stream, data)
        self.ordered += len(data)

    def _write_page(self, header: PageHeader, data: memoryview, tag: bytes) -> None:
        size = header.raw or len(data)
        if header.kind == RATE:
            with self._lock:
                self._measured += size
            if self._measured > RATE_LIMIT:
                raise LiveshiftError(f"more than {RATE_LIMIT} bytes came only to measure the link")
            return
        assert self.pages is not None  # without pages, reply() takes no key
        if header.raw:
            data = restore(data, header.raw)
        if header.kind == DEVICE:
            self.pages.write_device(header.lane, header.process, header.at, data, tag)
        else:
            self.pages.write(header.lane, data, tag)
        with self._lock:
            self.paged += size
