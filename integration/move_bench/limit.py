# SPDX-License-Identifier: Apache-2.0
"""What no move can be faster than: the bytes that changed at the rate of a bare copy, and CRIU's
fixed cost on a process that does nothing.

The copy has neither protocol nor hash nor encryption, goes from warm memory into warm memory, and
the best of some counts. The fixed cost is that of two processes: ``sleep``, which has hardly
anything, and an interpreter that has imported torch and waits, with its threads and mappings and
its own memory, which a training job cannot do without. The first gives the strict limit.

The CPU limit is what must be done with each byte on both sides: it is copied, hashed and sealed,
then opened, hashed and copied, a chunk at a time while it is in the cache, and goes nowhere.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import xxhash
from host_programs import emptied, line, on_host, tell

from liveshift.criu_glue.criu.tool import find
from liveshift.launcher.lab import Lab
from liveshift.runtime.wire import CHUNK
from liveshift.runtime.wire.seal import TAG, Opener, Sealer, make_key

from .by_hand import CRIU_PID, FIRST_PID, IMAGES, OPTIONS, STREAMS
from .machine import PORT, SCRIPT, Sandbox, sandbox, serving, size_of
from .record import Fixed

COPIES = 3
COPY_S = 0.7
CHUNKS = 256
"""Of the loop: more memory than the cache has."""

IDLE = """
import time, torch
torch.set_num_threads({threads})
torch.randn(512, 512) @ torch.randn(512, 512)
print("ready", flush=True)
time.sleep(1e6)
"""


def rate(lab: Lab) -> float:
    """Bytes per second that a bare copy over several streams reaches from h0 to h1."""
    source, destination = lab.machine("h0"), lab.machine("h1")
    argv = ["python", str(SCRIPT), "fill", destination.address, str(PORT), str(STREAMS)]
    rates = []
    for _ in range(COPIES):
        with serving(destination) as server, on_host(source, [*argv, str(COPY_S)]) as sender:
            assert line(sender) == "connected"
            tell(sender)
            seen = [json.loads(line(server)) for _ in range(STREAMS)]
            took = max(each["last"] for each in seen) - min(each["first"] for each in seen)
            rates.append(float(sum(each["bytes"] for each in seen) / took))
    return max(rates)


def cpu() -> float:
    """CPU seconds per GB of that loop, the best of some."""
    here, there = bytearray(os.urandom(CHUNK)) * CHUNKS, bytearray(b"\1") * (CHUNKS * CHUNK)
    source, destination = memoryview(here), memoryview(there)
    chunk, wire = memoryview(bytearray(CHUNK)), memoryview(bytearray(CHUNK + TAG))
    best = float("inf")
    for number in range(COPIES):
        key = make_key()
        sealer, opener = Sealer(key, "pages"), Opener(key, "pages")
        began = time.thread_time()
        for at in range(CHUNKS):
            chunk[:] = source[at * CHUNK : (at + 1) * CHUNK]
            digest = xxhash.xxh3_64_intdigest(chunk)
            sealed = sealer.seal(1, at, b"", chunk, wire)
            opened = opener.open(1, at, b"", sealed, chunk)
            assert xxhash.xxh3_64_intdigest(opened) == digest
            destination[at * CHUNK : (at + 1) * CHUNK] = opened
        best = min(best, time.thread_time() - began)
        assert there == here, f"round {number}"
    return best * 1e9 / (CHUNKS * CHUNK)


def fixed(lab: Lab, place: Path, threads: int, count: int) -> Fixed:
    """CRIU's dump and restore of idle processes on h0, without any copy."""
    emptied(place)
    asleep = [_once(lab, ["sleep", "1000000"], place)[0] for _ in range(count)]
    torch = ["python", "-c", IDLE.format(threads=threads)]
    idle = [_once(lab, torch, place, "ready") for _ in range(count)]
    return Fixed(median(asleep), median(s for s, _ in idle), int(median(b for _, b in idle)))


def _once(lab: Lab, argv: list[str], place: Path, ready: str = "") -> tuple[float, int]:
    criu, log = find(), place / "output"
    where = ("--images-dir", str(IMAGES), "--log-file", "criu.log")
    with ExitStack() as sandboxes:
        source = sandboxes.enter_context(sandbox(lab.machine("h0"), FIRST_PID))
        destination = sandboxes.enter_context(sandbox(lab.machine("h0"), CRIU_PID))
        log.write_text("")
        pid = sandboxes.enter_context(source.start(argv, log))
        _wait(source, pid, argv[0], log, ready)
        images = emptied(source.path(IMAGES))
        seconds = source.criu(criu, "dump", "--tree", str(pid), *where, *OPTIONS)
        seconds += destination.criu(criu, "restore", "--restore-detached", *where, *OPTIONS)
        assert destination.path(Path(f"/proc/{pid}")).exists(), "nothing was restored"
        size = size_of(images)
        emptied(images)
        images.rmdir()
    return seconds, size


def _wait(place: Sandbox, pid: int, name: str, log: Path, ready: str) -> None:
    until = time.monotonic() + 60
    while True:
        command = place.path(Path(f"/proc/{pid}/comm")).read_text().strip()
        if command == name and ready in log.read_text():
            return
        assert time.monotonic() < until, f"{name} does not get ready: {log.read_text()}"
        time.sleep(0.01)
