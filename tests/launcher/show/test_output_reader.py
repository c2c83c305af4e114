# SPDX-License-Identifier: Apache-2.0
"""What a reader says where a capsule's output does not go on where it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from liveshift.criu_glue.capsule import output
from liveshift.criu_glue.capsule.output import HEADER, REWIND, STDERR, STDOUT, rewinds_at
from liveshift.launcher.show.output_reader import Reader
from liveshift.runtime.messages import Message, Output, ReadOutput


class Log:
    """A log on disk, which answers as an agent does (CapsuleTable.read_output)."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(exist_ok=True)

    def append(self, begins: int, text: bytes) -> None:
        with output.segment(self.directory, begins).open("ab") as file:
            file.write(HEADER.pack(0, len(text), STDOUT) + text)

    def get(self, _expect: type[Message], request: ReadOutput, _timeout: float) -> Output:
        at, data = output.read(self.directory, request.offset, 1 << 20)
        if not data and rewinds_at(at) == rewinds_at(request.offset):
            at = request.offset
        return Output(data, at + len(data), None, at - request.offset)


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path / "log")


def said(reader: Reader, log: Log) -> list[tuple[int, bytes]]:
    found = []
    while records := reader.read(cast(Any, log)):
        found += [(record.stream, record.data) for record in records]
    return found


def restored(directory: Path, kept: bytes, rewinds: int) -> Log:
    """The log of a copy that a rewind made: what the image has, and room for what follows."""
    output.begin_after_rewind(directory, rewinds)
    copy = Log(directory)
    copy.append(0, kept)
    return copy


@pytest.mark.parametrize("read_before", [0, 1, 2])
def test_a_reader_marks_a_rewind_wherever_it_was(
    log: Log, tmp_path: Path, read_before: int
) -> None:
    lines = [(STDOUT, b"step 1\n"), (STDOUT, b"step 2\n")]
    reader = Reader("gpt/0")
    for n, (_, text) in enumerate(lines):
        log.append(0, text)
        if n < read_before:
            assert said(reader, log) == [lines[n]]
    copy = restored(tmp_path / "copy", b"step 1\n", 3)
    copy.append(3 * REWIND, b"step 2 again\n")
    found = said(reader, copy)
    (mark,) = [data for stream, data in found if stream == STDERR]
    assert mark.startswith(b"[liveshift: gpt/0 went on here from a snapshot: ")
    kept = [] if read_before else lines[:1]
    assert found == [*kept, (STDERR, mark), (STDOUT, b"step 2 again\n")]
    copy.append(3 * REWIND, b"step 3\n")
    assert said(reader, copy) == [(STDOUT, b"step 3\n")]


def test_a_rewind_is_marked_before_the_capsule_prints_again(log: Log, tmp_path: Path) -> None:
    """Training may print seldom, and a person who looks must see what has happened."""
    log.append(0, b"step 1\n")
    reader = Reader("gpt/0")
    assert said(reader, log) == [(STDOUT, b"step 1\n")]
    copy = restored(tmp_path / "copy", b"step 1\n", 1)
    ((stream, mark),) = said(reader, copy)
    assert (stream, "went on here from a snapshot" in mark.decode()) == (STDERR, True)
    assert said(reader, copy) == [], "once"
    copy.append(REWIND, b"step 2\n")
    assert said(reader, copy) == [(STDOUT, b"step 2\n")]


@pytest.mark.parametrize("rewinds", [1, 40_000])
def test_a_reader_goes_on_after_two_rewinds_to_the_same_snapshot(
    log: Log, tmp_path: Path, rewinds: int
) -> None:
    """The log of the second copy has nothing of the first one, where the reader is: so far beyond
    the end of an earlier segment no file system seeks."""
    log.append(0, b"step 1\n")
    reader = Reader("gpt/0")
    assert said(reader, log) == [(STDOUT, b"step 1\n")]
    first = restored(tmp_path / "first", b"step 1\n", rewinds)
    first.append(rewinds * REWIND, b"step 2\n")
    assert said(reader, first)[1:] == [(STDOUT, b"step 2\n")]
    second = restored(tmp_path / "second", b"step 1\n", rewinds + 1)
    ((stream, mark),) = said(reader, second)
    assert (stream, "went on here from a snapshot" in mark.decode()) == (STDERR, True)
    second.append((rewinds + 1) * REWIND, b"step 2 again\n")
    assert said(reader, second) == [(STDOUT, b"step 2 again\n")]


def test_an_offset_beyond_the_end_of_the_log_brings_nothing(log: Log) -> None:
    log.append(0, b"step 1\n")
    for offset in (1000, REWIND - 1, REWIND + 7, 40_000 * REWIND):
        assert output.read(log.directory, offset, 1 << 20) == (offset, b"")


def test_missing_output_is_no_rewind(log: Log) -> None:
    log.append(100, b"late\n")
    (mark, text) = said(Reader("gpt/0"), log)
    assert mark[1].startswith(b"[liveshift: 100 bytes of the output of gpt/0 are missing here: ")
    assert text == (STDOUT, b"late\n")


def test_offsets_after_a_rewind_are_those_of_no_earlier_output(tmp_path: Path) -> None:
    output.begin_after_rewind(tmp_path / "log", 65_534)
    assert output.segments(tmp_path / "log") == [65_534 * REWIND]
    assert output.rewinds_at(65_534 * REWIND) == 65_534
    assert 65_534 * REWIND + REWIND - 1 < output.UNKNOWN
