# SPDX-License-Identifier: Apache-2.0
"""The source's half, in this process, and one measurement of both."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import msgspec
from free_ports import free_port

from liveshift.criu_glue.memory.source.tracker import MemoryTracker
from liveshift.errors import LiveshiftError
from liveshift.runtime.control import keys
from liveshift.runtime.wire import Lanes, Sender

HERE = Path(__file__).parent
STREAMS = 4


class Measured(msgspec.Struct, frozen=True):
    """One pass over ``gb`` (1e9 bytes) of memory, with ``threads`` threads at each end.

    ``read_by``: threads that did read and seal at the source; ``stored_by``: threads that did open
    and store at the destination. ``ready``: whether the store had its memory before. ``clear``:
    whether memory went in clear (wire.seal). CPU time in seconds per GB.
    """

    threads: int
    ready: bool
    clear: bool
    gb: float
    seconds: float
    cpu_s_per_gb_source: float
    cpu_s_per_gb_destination: float
    read_by: int
    stored_by: int

    @property
    def rate(self) -> float:
        """GB per second."""
        return self.gb / self.seconds


def measure(size: int, threads: int, ready: bool, clear: bool = False) -> Measured:
    """Send ``size`` bytes of another process's memory once; raises LiveshiftError."""
    with _a_place() as place:
        keys.init(place / "keys", ["h0", "h1"])
        data, pages = (f"127.0.0.1:{free_port()}" for _ in range(2))
        there = ["-m", "engine_bench.destination", str(place), data, pages, str(size), str(threads)]
        with (
            _program([str(HERE / "subject.py"), str(size)]) as (pid, _, _),
            _program([*there, "ready" if ready else "fresh"]) as (_, tell, told),
        ):
            return _send(place, data, pages, pid, threads, ready, clear, tell, told)


def _send(
    place: Path,
    data: str,
    pages: str,
    pid: int,
    threads: int,
    ready: bool,
    clear: bool,
    tell: IO[str],
    told: IO[str],
) -> Measured:
    sender = Sender("m1", f"tcp://{data}", place / "keys", "h0", "h1", patience=10.0)
    lanes = Lanes(sender, f"tcp://{pages}", STREAMS, clear=clear)
    tracker = MemoryTracker(lambda: [pid], threads=threads)
    read_by: set[int] = set()

    def sink(chunk: memoryview, release: Callable[[], None]) -> None:
        read_by.add(threading.get_ident())
        lanes.pages(chunk, release)

    try:
        lanes.measure()
        _say(tell, told)
        began, cpu = time.monotonic(), time.process_time()
        sent = tracker.round(sink).sent_bytes
        lanes.finish()
        seconds, cpu = time.monotonic() - began, time.process_time() - cpu
        there = json.loads(_say(tell, told))
    finally:
        tracker.close()
        lanes.close()
        sender.close()
    if there["bytes"] != sent:
        raise LiveshiftError(f"{sent} bytes were sent, and {there['bytes']} have come")
    gb = sent / 1e9
    return Measured(
        threads,
        ready,
        clear,
        gb,
        seconds,
        cpu / gb,
        there["cpu_s"] / gb,
        len(read_by),
        there["threads"],
    )


def _say(tell: IO[str], told: IO[str]) -> str:
    tell.write("\n")
    tell.flush()
    if not (line := told.readline()):
        raise LiveshiftError("the destination's program has ended; it has said why above")
    return line


@contextmanager
def _program(words: list[str]) -> Iterator[tuple[int, IO[str], IO[str]]]:
    """A Python program that is ready: its pid, standard input and output."""
    process = subprocess.Popen(
        [sys.executable, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(HERE.parent)},
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            if process.stdout.readline() != "ready\n":
                raise LiveshiftError(f"{words[0]} has ended; it has said why above")
            yield process.pid, process.stdin, process.stdout
        finally:
            process.kill()


@contextmanager
def _a_place() -> Iterator[Path]:
    """A directory in memory, with room for a store."""
    place = Path(tempfile.mkdtemp(prefix="ls-engine-", dir="/dev/shm"))
    (place / "store").mkdir()
    try:
        yield place
    finally:
        shutil.rmtree(place)
