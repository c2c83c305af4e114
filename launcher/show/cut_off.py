# SPDX-License-Identifier: Apache-2.0
"""What a rewind has cut off a capsule's output, for ``logs --with-repeated``: the capsule had
printed it after the snapshot, and prints it again."""

from __future__ import annotations

import time
from dataclasses import replace

from ...criu_glue.capsule.output import STDERR, STDOUT, OutputRecord, rewinds_at, split
from ...runtime.messages import Output, ReadRepeated, Repeated
from ..client.client import Client


def begins(answer: Output) -> int:
    """The offset at which the answer's output begins."""
    return answer.next - len(answer.data)


def rewound(answer: Output) -> bool:
    """Whether the capsule was rewound between the offset that was asked for and this output."""
    return rewinds_at(begins(answer)) > rewinds_at(begins(answer) - answer.dropped)


def marked(answer: Output | Repeated, text: str, otherwise_ns: int = 0) -> OutputRecord:
    """A line for stderr, of the time of the answer's first record. If it has none, that is
    ``otherwise_ns`` (time.time_ns()), by default now."""
    when = next((record.realtime_ns for record in split(answer.data)), otherwise_ns)
    return OutputRecord(when or time.time_ns(), STDERR, f"[liveshift: {text}]\n".encode())


class CutOff:
    """A place in what was cut off before ``after``, the answer with what the capsule has printed
    since. ``offset``: where the capsule's log breaks off."""

    def __init__(self, capsule: str, offset: int, after: Output) -> None:
        self.after = after
        self._capsule = capsule
        self._at = offset
        self._until = begins(after)
        self._said = -1  # the last rewind that was announced

    @property
    def over(self) -> bool:
        return self._at >= self._until

    def read(self, client: Client, timeout: float) -> list[OutputRecord]:
        """Return the next records, also marks. Raises what Client.get raises; nothing is skipped
        then."""
        asked = ReadRepeated(self._capsule, self._at, self._until)
        answer = client.get(Repeated, asked, timeout)
        self._at = answer.next
        after_ns = next((record.realtime_ns for record in split(self.after.data)), 0)
        found = [marked(answer, text, after_ns) for text in self._texts(answer, asked.offset)]
        shown = (each for each in split(answer.data) if each.stream in (STDOUT, STDERR))
        return found + [replace(each, repeated=True) for each in shown]

    def _texts(self, answer: Repeated, offset: int) -> list[str]:
        there = f" on {answer.host}" if answer.host else ""
        if answer.gone:
            return [
                f"what {self._capsule} printed{there} before it went back to a snapshot is gone:"
                f" {answer.gone}"
            ]
        texts = []
        if answer.data and self._said != (rewind := rewinds_at(offset)):
            self._said = rewind
            texts.append(
                f"{self._capsule} printed what follows{there}, and then went back to a snapshot: it"
                " prints it again below"
            )
        if answer.data and answer.dropped:
            texts.append(
                f"{answer.dropped} bytes of that are missing here: a host keeps twice logs.max"
            )
        return texts
