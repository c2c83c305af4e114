# SPDX-License-Identifier: Apache-2.0
"""The same job moved as a person would with CRIU alone.

``criu dump`` to a tmpfs, its files over the same link by several TCP streams (sendfile) into the
other host's tmpfs, ``criu restore`` there. All that can be ready beforehand is: the namespace at
the destination, both ends of the copy, CRIU's cache on a tmpfs. The job has no connections, so
that no network has to be locked or moved; and nobody checks, encrypts or could go back.

CRIU's own pre-dump is not there to be used: it goes by soft-dirty bits, which this kernel, like
most distributions' today, is built without (``criu check --feature mem_dirty_track`` says so).
Nor do a page server or ``--stream`` shorten it: the memory goes once over the same link either way.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from host_programs import emptied, inside, line, on_host, tell

from liveshift.criu_glue.criu.tool import find
from liveshift.launcher.lab import Lab

from .cases import Case, Effort, around
from .machine import PATIENCE_S, PORT, SCRIPT, Sandbox, sandbox, serving, size_of, training
from .moves import QUIET_S, Tell
from .record import ByHand
from .steps import AFTER_S, StepTail, gap, lost

STREAMS = 4
IMAGES = Path("/dev/shm/by-hand")
FIRST_PID, CRIU_PID = 1000, 30000
"""CRIU and its helpers must not take the pids that it is to restore."""

OPTIONS = ("--network-lock", "skip", "--ghost-limit", "1G", "-v1")


def measure(
    lab: Lab, case: Case, effort: Effort, out: Path, kept: Path, tell_of: Tell
) -> list[ByHand]:
    """Move the case's job so often between the first two hosts; its step log goes to ``kept``."""
    hosts = [lab.machine("h0"), lab.machine("h1")]
    emptied(out)
    log = StepTail(out / "rank0.jsonl")
    moves, steps = [], around(case)
    with ExitStack() as at_end:
        here = at_end.enter_context(ExitStack())  # the sandbox in which the job is
        place = here.enter_context(sandbox(hosts[0], FIRST_PID))
        pid = here.enter_context(place.start(inside(out, training(case, effort)), out / "output"))
        log.wait(steps, PATIENCE_S, alive_in(place, pid, out))
        for number in range(effort.hands):
            tell_of(f"by hand {number + 1} of {effort.hands}")
            begin = time.time()
            log.wait_after(begin + QUIET_S, steps, PATIENCE_S, alive_in(place, pid, out))
            there = at_end.enter_context(ExitStack())
            new = there.enter_context(sandbox(hosts[(number + 1) % 2], CRIU_PID))
            asked, dumped, copied, restored, size = _move(place, new, pid)
            here.close()  # nothing runs in it any more
            here, place = there, new
            done = asked + dumped + copied + restored
            log.wait_after(done + AFTER_S + QUIET_S, steps, PATIENCE_S, alive_in(place, pid, out))
            seen = gap(log.times, asked + dumped + copied / 2, asked, begin)
            assert seen.end - seen.start >= copied, "the job went on while its image was copied"
            cost = lost(log.times, asked, done, begin)
            moves.append(ByHand(seen.downtime_s, dumped, copied, restored, size, cost))
        (out / "enough").touch()
        log.wait_end(PATIENCE_S)
    log.keep(kept)
    shutil.rmtree(out)
    return moves


def _move(
    source: Sandbox, destination: Sandbox, pid: int
) -> tuple[float, float, float, float, int]:
    """When it began, the seconds of dump, copy and restore, the bytes of the image."""
    criu = find()
    images = [emptied(each.path(IMAGES)) for each in (source, destination)]
    argv = ("python", str(SCRIPT), "files", destination.machine.address, str(PORT), str(STREAMS))
    with (
        serving(destination.machine),
        on_host(source.machine, [*argv, str(IMAGES), str(IMAGES)]) as sender,
    ):
        assert line(sender) == "connected"
        asked = time.time()
        where = ("--images-dir", str(IMAGES), "--log-file", "criu.log")
        dumped = source.criu(criu, "dump", "--tree", str(pid), *where, *OPTIONS)
        began = time.monotonic()
        tell(sender)
        assert line(sender) == "sent"
        copied = time.monotonic() - began
        size = size_of(images[0])
        # Not before CRIU has begun, and beside it: a machine that is both hosts may not have the
        # memory for two images and the process.
        emptying = threading.Thread(target=shutil.rmtree, args=(images[0],))
        emptying.start()
        restored = destination.criu(criu, "restore", "--restore-detached", *where, *OPTIONS)
        emptying.join()
    shutil.rmtree(images[1])
    return asked, dumped, copied, restored, size


def alive_in(place: Sandbox, pid: int, out: Path) -> Callable[[], None]:
    """Fails, with what it said, once the job has ended."""

    def look() -> None:
        said = (out / "output").read_text()
        assert place.path(Path(f"/proc/{pid}")).exists(), f"the job moved by hand ended:\n{said}"

    return look
