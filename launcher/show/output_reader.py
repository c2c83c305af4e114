# SPDX-License-Identifier: Apache-2.0
"""Reads a capsule's output by offset, so that a move neither loses nor doubles a byte.

The offset counts in the record log, which moves with its capsule (criu_glue/capsule/output.py). A
reader that lost contact asks again from where it was. Any agent may answer then.

A rewind cuts the log back. A reader ``with_repeated`` first hands on what was cut off, if a host
still has it, and then what the capsule has printed since.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ...criu_glue.capsule.output import (
    STDERR,
    STDOUT,
    OutputRecord,
    split,
    whole,
)
from ...errors import LiveshiftError, NotFound, NotPermitted
from ...runtime.messages import Output, ReadOutput
from ..client.client import Client
from ..client.context import Place
from .cut_off import CutOff, marked, rewound

POLL_S = 10.0  # seconds that a request waits for output if there is none
SLACK_S = 20.0  # seconds for its answer on top of that: the capsule may be on the move
RETRY_S = 0.2, 2.0  # seconds: first and longest pause after a failed request


class Reader:
    """A place in one capsule's output. ``code``: its exit code, once all of the output was read."""

    def __init__(self, capsule: str, *, with_repeated: bool = False) -> None:
        self.capsule = capsule
        self.offset = 0
        self.code: int | None = None
        self._cut = b""
        self._with_repeated = with_repeated
        self._cut_off: CutOff | None = None

    def read(self, client: Client, wait: float = 0.0) -> list[OutputRecord] | None:
        """Return the next records, or None if there are none yet within ``wait`` seconds.

        Raises what Client.get raises; nothing is skipped then.
        """
        if self._cut_off is None:
            request = ReadOutput(self.capsule, self.offset, wait)
            answer = client.get(Output, request, wait + SLACK_S)
            if not (self._with_repeated and rewound(answer)):
                return self._take(answer)
            self._cut_off = CutOff(self.capsule, self.offset, answer)
        repeated = self._cut_off.read(client, SLACK_S)
        if self._cut_off.over:
            repeated += self._take(self._cut_off.after) or []
            self._cut_off = None
        return repeated

    def _take(self, answer: Output) -> list[OutputRecord] | None:
        self.offset = answer.next
        self.code = answer.code
        missing = [self._gap(answer)] if answer.dropped else []
        raw = self._cut + answer.data
        end = whole(raw)
        self._cut = raw[end:]
        if not answer.data:
            return missing or None
        return missing + [r for r in split(raw[:end]) if r.stream in (STDOUT, STDERR)]

    def _gap(self, answer: Output) -> OutputRecord:
        """Return a record for stderr that says why output does not go on where it was."""
        self._cut = b""
        if rewound(answer):
            return marked(
                answer,
                f"{self.capsule} went on here from a snapshot: it prints again what it had printed"
                " since",
            )
        return marked(
            answer,
            f"{answer.dropped} bytes of the output of {self.capsule} are missing here: old output"
            " goes by logs.max and logs.keep; with a full disk new output is lost",
        )

    def history(self, client: Client) -> Iterator[OutputRecord]:
        """Yield everything up to now, without waiting for more."""
        while self.code is None and (records := self.read(client)) is not None:
            yield from records


@dataclass(frozen=True)
class ReadProblem:
    """Output cannot be read for the moment; each attempt that fails is reported. ``error`` None:
    it can be read again."""

    capsule: str
    error: LiveshiftError | None = None


@dataclass(frozen=True)
class OutputEnded:
    """The output of a capsule was handed on to its end."""

    capsule: str
    code: int


@dataclass(frozen=True)
class OutputStopped:
    """Following a capsule cannot go on."""

    capsule: str
    error: BaseException


Report = ReadProblem | OutputEnded | OutputStopped


class Follower(threading.Thread):
    """Hands on the output of one capsule as it comes, over a connection of its own.

    This thread calls ``put`` with every record, and ``report`` with all else; the last report is
    OutputEnded or OutputStopped. It is a daemon thread: it does not keep the program from ending.
    """

    def __init__(
        self,
        place: Place,
        reader: Reader,
        put: Callable[[OutputRecord], None],
        report: Callable[[Report], None],
    ) -> None:
        super().__init__(name=f"output of {reader.capsule}", daemon=True)
        self._place = place
        self._reader = reader
        self._put = put
        self._report = report

    def run(self) -> None:
        reader = self._reader
        try:
            with Client(self._place) as client:
                while reader.code is None:
                    for record in self._next(client):
                        self._put(record)
            self._report(OutputEnded(reader.capsule, reader.code))
        except BaseException as error:  # reported to the thread that waits
            self._report(OutputStopped(reader.capsule, error))

    def _next(self, client: Client) -> list[OutputRecord]:
        pause, failing = RETRY_S[0], False
        while True:
            try:
                # After a failure no answer is held back: any answer shows that reading works again.
                records = self._reader.read(client, 0.0 if failing else POLL_S)
            except (NotFound, NotPermitted):
                raise
            except LiveshiftError as error:  # the capsule goes on, so try again
                self._report(ReadProblem(self._reader.capsule, error))
                failing = True
                time.sleep(pause)
                pause = min(2 * pause, RETRY_S[1])
                continue
            if failing:
                self._report(ReadProblem(self._reader.capsule))
            return records or []
