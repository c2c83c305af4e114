# SPDX-License-Identifier: Apache-2.0
"""Both passes over a carried path while a real process writes to its files through mappings."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from liveshift.criu_glue.files import trees
from liveshift.criu_glue.files.sparing import Sparing
from liveshift.criu_glue.files.unpacking import Unpacker
from liveshift.criu_glue.survey.survey import Changing, mapped_writable
from liveshift.runtime.agent.departure import outgoing_files
from liveshift.runtime.agent.departure.outgoing_files import OutgoingFiles

WRITER = """
import mmap, sys
for line in sys.stdin:
    what, name = line.split()
    if what == "map":
        with open(name, "r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
    elif what == "unmap":
        memory.close()
    else:
        memory[: len(what)] = what.encode()
    print("done", flush=True)
"""


class Carried:
    """A job with a carried path, and that path at the destination, where others use it too."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: Any) -> None:
        self.here, self.there = tmp_path / "here", tmp_path / "there"
        for top in (self.here, self.there):
            top.mkdir()
        self._job = job
        self._sparing = Sparing()
        plan = SimpleNamespace(tmp=tmp_path / "tmp", log=tmp_path / "log")
        sandbox: Any = SimpleNamespace(plan=plan, init=os.getpid(), root=tmp_path)
        placement: Any = SimpleNamespace(carried=[str(self.here)])
        resident: Any = SimpleNamespace(sandbox=sandbox)
        factory: Any = SimpleNamespace(placement=placement)
        monkeypatch.setattr(
            outgoing_files, "changing", lambda *_: Changing((), tuple(mapped_writable(sandbox)))
        )
        self.files = OutgoingFiles(resident, factory)
        self.files._output = SimpleNamespace(send_new=lambda _send: None)  # type: ignore[assignment]  # a stand-in

    def tell(self, what: str, name: str = "-") -> None:
        """Let the job do something with a file: map, unmap, or another word to write that word."""
        print(what, name, file=self._job.stdin, flush=True)
        assert self._job.stdout.readline() == "done\n"

    def first(self) -> None:
        self._passed(lambda send: self.files.send_ahead(send))

    def second(self) -> dict[str, list[str]]:
        removed: dict[str, list[str]] = self._passed(lambda send: self.files._send_changes(send))
        return removed

    def _passed(self, run: Any) -> Any:
        sent: list[bytes] = []
        result = run(lambda stream, data: sent.append(data) if "carried" in stream else None)
        unpacker = Unpacker(self.there, self._sparing)
        unpacker.write(b"".join(sent))
        unpacker.finish()
        return result


@pytest.fixture
def carried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Carried]:
    job = subprocess.Popen(
        [sys.executable, "-Sc", WRITER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with job:
        yield Carried(tmp_path, monkeypatch, job)


def test_what_is_written_through_a_mapping_that_is_gone_before_the_freeze_is_sent(
    carried: Carried,
) -> None:
    """The page is writable since the first store. So the second one changes no time, unless the
    kernel has written the page to the disk in between."""
    for name in ("mapped", "deleted", "not mapped"):
        (carried.here / name).write_bytes(b"before" * 1000)
    carried.tell("map", str(carried.here / "mapped"))
    carried.tell("first")
    carried.first()
    assert (carried.there / "mapped").read_bytes().startswith(b"firste")
    carried.tell("second")
    carried.tell("unmap")
    (carried.there / "not mapped").write_bytes(b"another job's")
    (carried.here / "deleted").unlink()
    removed = carried.second()
    assert (carried.there / "mapped").read_bytes().startswith(b"second")
    assert (carried.there / "not mapped").read_bytes() == b"another job's"
    assert removed[f"carried:{carried.here}"] == ["deleted"]


def test_what_is_written_twice_in_one_tick_of_the_kernel_is_sent(
    carried: Carried, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second time after pass one has read it. Before Linux 6.13 its times do not tell."""
    (carried.here / "old").write_bytes(b"some day")
    time.sleep(2 * outgoing_files.TICK_NS / 1e9)
    file = carried.here / "file"
    file.write_bytes(b"before")
    seen = file.stat()
    # Pass one begins in the tick in which the file was written, also on a machine that is busy.
    then = SimpleNamespace(time_ns=lambda: seen.st_ctime_ns + 1)
    monkeypatch.setattr(outgoing_files, "time", then)
    carried.first()
    file.write_bytes(b"second")
    os.utime(file, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    stamps = carried.files._listed[f"carried:{carried.here}"]
    real = trees.listing
    monkeypatch.setattr(
        trees, "listing", lambda tree: stamps if tree.source == carried.here else real(tree)
    )
    (carried.there / "old").unlink()
    carried.second()
    assert (carried.there / "file").read_bytes() == b"second"
    assert not (carried.there / "old").exists(), "what is older is not sent again"


def test_a_file_system_with_whole_seconds_does_not_tell_either() -> None:
    """On ext4 with inodes of 128 bytes, two writes within a second give a file the same time."""
    second, began = 1_000_000_000, 1_700_000_000_900_000_000
    same = outgoing_files._may_be_the_same
    assert same(began - began % second, began)
    assert same(began - began % second - second, began)
    assert not same(began - began % second - 2 * second, began)
    assert same(began - outgoing_files.TICK_NS // 2, began)
    assert not same(began - 2 * outgoing_files.TICK_NS, began)


def test_a_file_that_was_mapped_and_is_deleted_before_the_freeze_is_removed(
    carried: Carried,
) -> None:
    (carried.here / "mapped").write_bytes(b"before")
    carried.tell("map", str(carried.here / "mapped"))
    carried.first()
    carried.tell("unmap")
    (carried.here / "mapped").unlink()
    assert carried.second()[f"carried:{carried.here}"] == ["mapped"]


@pytest.mark.parametrize("still", [True, False], ids=["mapped", "unmapped"])
def test_a_mapped_file_stays_one_file_under_all_its_names(carried: Carried, still: bool) -> None:
    """In a directory that others use too, where names that are as new as what comes are spared."""
    (carried.here / "a").write_bytes(b"before")
    os.link(carried.here / "a", carried.here / "b")
    (carried.here / "sub").mkdir()
    os.link(carried.here / "a", carried.here / "sub" / "c")
    carried.tell("map", str(carried.here / "b"))
    carried.tell("first")
    carried.first()
    carried.tell("second")
    if not still:
        carried.tell("unmap")
    carried.second()
    names = [carried.there / name for name in ("a", "b", "sub/c")]
    assert [name.read_bytes() for name in names] == [b"second"] * 3
    assert len({name.stat().st_ino for name in names}) == 1


def test_the_other_name_of_a_mapped_file_has_its_content_when_the_mapped_one_is_gone(
    carried: Carried,
) -> None:
    (carried.here / "a").write_bytes(b"before")
    os.link(carried.here / "a", carried.here / "b")
    carried.tell("map", str(carried.here / "a"))
    carried.tell("first")
    carried.first()
    carried.tell("second")
    carried.tell("unmap")
    (carried.here / "a").unlink()
    assert carried.second()[f"carried:{carried.here}"] == ["a"]
    assert (carried.there / "b").read_bytes() == b"second"
