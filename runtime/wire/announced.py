# SPDX-License-Identifier: Apache-2.0
"""What a destination was told to expect for one migration, and how far it has come."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import xxhash

from ...errors import LiveshiftError
from .compression import restore
from .header import LANES, RATE, RATE_LIMIT, SEAL, WANTS, Header, PageHeader
from .page_lane import ANSWER
from .seal import TAG, Opener, Sealer, in_clear
from .wants import pack_wants

log = logging.getLogger("liveshift.wire")

TEXT = 500
"""Characters of a refusal, at most."""

PageAnswer = tuple[str, int | str]
Answer = tuple[str, int | str | bytes]


class Inlet(Protocol):
    """Where one migration's chunks on lane 0 go at the destination."""

    @property
    def complete(self) -> bool:
        """Whether all of the image is here; nothing is written after that."""

    def write(self, stream: str, data: memoryview) -> None:
        """Put bytes where they belong; empty bytes end the stream."""


class Pages(Protocol):
    """Where the chunks of the other lanes go (PageStreams is one)."""

    def write(self, lane: int, data: memoryview, tag: bytes) -> None:
        """Take one chunk in its lane's order, ``data`` as the source has it and ``tag`` that of its
        seal; empty bytes end the lane's stream."""

    def wants(self) -> Iterable[tuple[int, int, int]]:
        """Which pages were only named and are not here: (inner pid, address, pages)."""


class Seal:
    """The destination's end of one key, and how far each lane is under it.

    ``number``: of the question that brought it. ``speaker``: whose word that was, the public key
    that lane 0 was opened with. Several threads may use it, each for lanes of its own.
    """

    def __init__(self, key: bytes, number: int, speaker: str) -> None:
        self.key, self.number, self.speaker = key, number, speaker
        self.expected = [0] * (1 + LANES)  # number of the next chunk, by lane
        self._opener, self._sealer = Opener(key, "pages"), Sealer(key, "answers")
        self._answers = [_first_answer()] * (1 + LANES)

    def open(
        self, header: PageHeader, beside: memoryview, sealed: memoryview, into: memoryview
    ) -> memoryview:
        """The chunk, at the beginning of ``into``; raises Unsealed."""
        return self._opener.open(header.lane, header.number, beside, sealed, into)

    def answer(self, lane: int, kind: str, value: int | str) -> bytes:
        number = self._answers[lane]
        self._answers[lane] += 1
        said = msgspec.msgpack.encode((kind, value if isinstance(value, int) else value[:TEXT]))
        raw = bytearray(ANSWER.size + len(said) + TAG)
        ANSWER.pack_into(raw, 0, number)
        self._sealer.seal(lane, number, b"", said, memoryview(raw)[ANSWER.size :])
        return bytes(raw)


def _first_answer() -> int:
    """Where the numbers of answers begin, which are their nonces: above all those of an earlier
    agent of this host, since one that was started anew may be told the same key.

    CLOCK_BOOTTIME is set back by nobody (clock_gettime(2)), only by a reboot. After that no key of
    before is taken: the migration was announced to an agent that is gone, with all that had come,
    and every :class:`Lanes` makes a key of its own. No lane answers more than once a nanosecond.
    """
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


@dataclass
class Announced:
    """One migration. ``limit``: bytes that lane 0 may bring; ``lanes``: for pages, how many;
    ``clear``: pages may come in clear (wire.seal).

    One thread takes the chunks of lane 0, others those of pages, each for lanes of its own.
    """

    migration: str
    source: str
    inlet: Inlet
    limit: int
    pages: Pages | None = None
    lanes: int = 0
    seal: Seal | None = None
    clear: bool = False
    refused: str | None = None
    """Why nothing more is taken, once that is so."""
    ordered: int = 0
    """Bytes taken on lane 0, and in ``paged`` on the others."""
    paged: int = 0
    _expected: int = 0
    _measured: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)  # of what lanes share

    def __post_init__(self) -> None:
        if self.inlet.complete:
            self._expected = sys.maxsize

    def take(self, header: Header, data: memoryview) -> Answer:
        """One chunk of lane 0."""
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
        """To a question; raises LiveshiftError for one that is none."""
        if self.pages is None:
            raise LiveshiftError("no pages of memory were announced")
        if header.stream == WANTS and not data:
            wants = () if self.inlet.complete else self.pages.wants()
            return WANTS, pack_wants(header.number, wants)
        if header.stream != SEAL:
            raise LiveshiftError(
                f"the peer asked for {header.stream!a}, which is not answered here"
            )
        if xxhash.xxh3_64_intdigest(data) != header.digest:
            raise LiveshiftError("the key that came is damaged")
        key, seal = bytes(data), self.seal
        if in_clear(key) and not self.clear:
            raise LiveshiftError(
                f'{self.source} sends memory in clear (wire.seal = "off" in its cluster file), and '
                "this host's cluster file does not: make both files equal"
            )
        # One that comes late must not bring an earlier key back: its numbers would begin anew.
        if seal is None or (header.number > seal.number and key != seal.key):
            self.seal = Seal(key, header.number, speaker)
        return SEAL, header.number

    def take_page(self, seal: Seal, header: PageHeader, data: memoryview, tag: bytes) -> PageAnswer:
        """One chunk of another lane that ``seal`` has opened."""
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
        """Whatever stands against it: then no more is taken for this migration."""
        if self.refused is not None:
            return self.refused
        try:
            write()
        except Exception as error:
            if not isinstance(error, LiveshiftError):
                log.exception("cannot take the image of %s", self.migration)
            else:
                log.error("cannot take the image of %s: %s", self.migration, error)
            self.refused = str(error)
        return self.refused

    def _write(self, stream: str, data: memoryview) -> None:
        if self.ordered + len(data) > self.limit:
            raise LiveshiftError(
                f"more has come than the {self.limit} bytes that were announced"
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
                raise LiveshiftError(f"more than {RATE_LIMIT} bytes have come only to measure with")
            return
        assert self.pages is not None  # else no key was taken
        if header.raw:
            data = restore(data, header.raw)
        self.pages.write(header.lane, data, tag)
        with self._lock:
            self.paged += size
