# SPDX-License-Identifier: Apache-2.0
"""Writes what capsules print to this terminal: unchanged for one, line by line for several."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import BinaryIO

from ...criu_glue.capsule.output import STDOUT, OutputRecord

LONGEST = 64 << 10  # bytes; a longer line is written in pieces
REPEATED = "(repeated) "
"""Before each line that a capsule printed before a rewind and prints again after it."""
COLOURS = (36, 33, 35, 32, 34, 31)  # ANSI foreground colours; each capsule gets the next one


Started = dict[int, tuple[int, bytes]]
"""By stream: a line that has begun, with the time of its first byte (time.time_ns())."""


class Streams:
    """The stdout and stderr of this program, shared by all that write to them.

    ``tolerant``: if a reader went away, ``gone`` remembers the stream, and its output goes to
    /dev/null. Otherwise BrokenPipeError ends the program, as it should for `logs | head`.
    """

    def __init__(self, out: BinaryIO, err: BinaryIO, *, tolerant: bool = False) -> None:
        self._streams = {True: out, False: err}
        self._tolerant = tolerant
        self._lock = threading.Lock()
        self.gone: set[int] = set()

    def write(self, stream: int, data: bytes) -> None:
        to = self._streams[stream == STDOUT]
        with self._lock:
            try:
                to.write(data)
                to.flush()
            except BrokenPipeError:
                if not self._tolerant:
                    raise
                self.gone.add(stream)
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, to.fileno())
                os.close(nowhere)

    def coloured(self, stream: int) -> bool:
        plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
        return not plain and self._streams[stream == STDOUT].isatty()


class Verbatim:
    """Writes the bytes as they came: for a capsule that is alone."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams

    def put(self, record: OutputRecord) -> None:
        self._streams.write(record.stream, record.data)

    def end(self) -> None:
        pass


class OutputLines:
    """Writes whole lines, each after its time and its capsule's name if these are wanted. A line
    that has begun is held back until it ends.

    Repeated output is marked line by line. A line that had begun before it is both repeated and
    printed again, so it is written both times.
    """

    def __init__(
        self, streams: Streams, name: str | None, number: int = 0, *, timestamps: bool = False
    ) -> None:
        self._streams = streams
        self._name = name
        self._colour = COLOURS[number % len(COLOURS)]
        self._timestamps = timestamps
        self._started: Started = {}
        self._repeated: Started | None = None  # the same of repeated output, while it comes

    def put(self, record: OutputRecord) -> None:
        if record.repeated and self._repeated is None:
            self._repeated = dict(self._started)
        if not record.repeated:
            self._end_repeated()
        held_back = self._started if self._repeated is None else self._repeated
        began, held = held_back.pop(record.stream, (record.realtime_ns, b""))
        *lines, rest = (held + record.data).split(b"\n")
        whole = b""
        for line in lines:
            whole += self._line(record.stream, began, line)
            began = record.realtime_ns
        if len(rest) > LONGEST:
            whole += self._line(record.stream, began, rest)
            rest = b""
        if whole:
            self._write(record.stream, whole)
        if rest:
            held_back[record.stream] = began, rest

    def end(self) -> None:
        """Write what is held back. There will be no more records."""
        self._end_repeated()
        self._write_begun(self._started)
        self._started.clear()

    def _end_repeated(self) -> None:
        if self._repeated is not None:
            before = self._started
            own = {s: held for s, held in self._repeated.items() if held != before.get(s)}
            self._write_begun(own)
            self._repeated = None

    def _write_begun(self, started: Started) -> None:
        for stream, (began, rest) in sorted(started.items()):
            self._write(stream, self._line(stream, began, rest))

    def _write(self, stream: int, data: bytes) -> None:
        self._streams.write(stream, data)

    def _line(self, stream: int, realtime_ns: int, line: bytes) -> bytes:
        """What to write for a line that began at this time."""
        return self._prefix(stream, realtime_ns) + line + b"\n"

    def _prefix(self, stream: int, realtime_ns: int) -> bytes:
        text = f"{instant(realtime_ns)} " if self._timestamps else ""
        if self._name:
            label = f"{self._name}:"
            if self._streams.coloured(stream):
                label = f"\x1b[{self._colour}m{label}\x1b[0m"
            text += label + " "
        if self._repeated is not None:
            text += REPEATED
        return text.encode()


@dataclass(frozen=True)
class OutputLine:
    """A line that a capsule has printed. `time`: when it began; `stream`: stdout or stderr, also
    stderr for what liveshift says in between, as `[liveshift: …]`; `repeated`: the job was taken
    back to before it, and prints it again."""

    capsule: str
    time: float
    stream: str
    text: str
    repeated: bool


class JsonLines(OutputLines):
    """Writes each line to stdout as an OutputLine in JSON."""

    def __init__(self, streams: Streams, capsule: str) -> None:
        super().__init__(streams, capsule)
        self._capsule = capsule

    def _write(self, stream: int, data: bytes) -> None:
        self._streams.write(STDOUT, data)

    def _line(self, stream: int, realtime_ns: int, line: bytes) -> bytes:
        shown = OutputLine(
            capsule=self._capsule,
            time=realtime_ns / 1e9,
            stream="stdout" if stream == STDOUT else "stderr",
            text=line.decode(errors="replace"),
            repeated=self._repeated is not None,
        )
        return json.dumps(asdict(shown), ensure_ascii=False).encode() + b"\n"


Writer = Verbatim | OutputLines
"""Takes the records of one capsule."""


def writers(
    streams: Streams,
    capsules: Sequence[str],
    *,
    timestamps: bool = False,
    with_repeated: bool = False,
    as_json: bool = False,
) -> dict[str, Writer]:
    """Return a writer for each capsule. If there are several, their names begin the lines."""
    if as_json:
        return {capsule: JsonLines(streams, capsule) for capsule in capsules}
    if len(capsules) == 1 and not timestamps and not with_repeated:
        return {capsules[0]: Verbatim(streams)}
    several = len(capsules) > 1
    return {
        capsule: OutputLines(streams, capsule if several else None, number, timestamps=timestamps)
        for number, capsule in enumerate(capsules)
    }


def instant(realtime_ns: int) -> str:
    """Write a moment in UTC to the millisecond: ``2026-05-04T12:00:00.123Z``."""
    moment = datetime.fromtimestamp(realtime_ns // 1_000_000_000, UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{realtime_ns // 1_000_000 % 1000:03}Z"
