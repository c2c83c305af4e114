# SPDX-License-Identifier: Apache-2.0
"""What daemons use and what lies about on their hosts, looked at from outside of the lab."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import psutil
from whereabouts import on_lab

from liveshift.launcher import lab as labs
from liveshift.launcher.lab import Lab
from liveshift.launcher.lab.plan import CONTROL

COUNTED = {
    # Below these it sees other labs come and go; it shows nothing of its own there.
    "mounts": "awk '$5 !~ \"^(/run/netns|/var/lib/liveshift-lab)/\"' /proc/self/mountinfo",
    "network namespaces": "ls /run/netns",
    "links": "ip -o link",
    "routes": "ip -4 route show table all",
    "neighbours": "ip neigh show nud permanent",
    "bridge entries": "bridge fdb show",
    "nft lines": "nft list ruleset",
}
"""Lines of what these print, on each host."""

OWN = {"state": "state", "temporary": "tmp", "temporary, kept": "var-tmp"}
"""A host's own directories, as the lab keeps them; /run/liveshift is looked at from inside, since
images lie in a file system of their own there."""

JOURNAL = "journal"
"""The orchestrator's state, which grows with every move, as it should."""


class Daemon(msgspec.Struct, frozen=True):
    """One daemon at one moment; ``cpu`` is what it has used so far, in seconds. ``private`` is what
    is resident less files and the images that pass through it, which lie in a tmpfs."""

    pid: int
    resident: int
    descriptors: int
    threads: int
    cpu: float
    private: int = 0


class Sample(msgspec.Struct, frozen=True):
    """``when`` in seconds since the watch began; ``things``: what there is of each kind on all
    hosts together, bytes where the kind says so. ``moves``: ended until then."""

    when: float
    moves: int
    daemons: dict[str, Daemon]
    things: dict[str, int]


class Watch:
    """Takes samples in a thread of its own; looking costs little beside a move."""

    def __init__(self, lab: Lab, every: float, kept: set[str] | None = None) -> None:
        """``kept``: the only hosts whose daemons are looked at, as others may end; all if None."""
        self.lab = lab
        self._kept = kept
        self.every = every
        self.samples: list[Sample] = []
        self.moves = 0  # set by whoever makes them
        self._began = time.monotonic()
        self._running = False
        self._stop = threading.Event()
        self._error: BaseException | None = None

    @contextmanager
    def running(self) -> Iterator[Watch]:
        thread = threading.Thread(target=self._run, name="watch")
        self._running = True
        thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            thread.join()
            self._running = False
        if self._error is not None:
            raise self._error

    def take(self) -> Sample:
        """Look now."""
        sample = Sample(
            time.monotonic() - self._began,
            self.moves,
            daemons(self.lab, self._kept),
            things(self.lab) if self._kept is None or not self._running else {},
        )
        self.samples.append(sample)
        return sample

    def _run(self) -> None:
        try:
            while not self._stop.wait(self.every):
                self.take()
        except BaseException as error:
            self._error = error


def daemons(lab: Lab, kept: set[str] | None = None) -> dict[str, Daemon]:
    """Every daemon of the lab by its host, or those of the hosts ``kept``; raises AssertionError
    when one has ended."""
    found = {}
    for machine in lab.machines:
        if kept is not None and machine.name not in kept:
            continue
        assert machine.daemon is not None
        assert machine.daemon.alive, f"the daemon of {machine.name} has ended"
        seen = psutil.Process(machine.daemon.pid)
        with seen.oneshot():
            spent, memory = seen.cpu_times(), seen.memory_info()
            found[machine.name] = Daemon(
                seen.pid,
                memory.rss,
                seen.num_fds(),
                seen.num_threads(),
                spent.user + spent.system,
                memory.rss - memory.shared,
            )
    return found


def things(lab: Lab) -> dict[str, int]:
    """What there is of each kind on all hosts of the lab together."""
    found: Counter[str] = Counter(processes=len(on_lab(lab)))
    for machine in lab.machines:
        assert machine.init is not None
        done = subprocess.run(
            [*labs.entry(machine), "sh", "-c", "; ".join(f"{c} | wc -l" for c in COUNTED.values())],
            capture_output=True,
            check=True,
        )
        found.update(dict(zip(COUNTED, map(int, done.stdout.split()), strict=True)))
        below = {"run": Path(f"/proc/{machine.init.pid}/root/run/liveshift")}
        below |= {name: lab.directory / machine.name / place for name, place in OWN.items()}
        for name, place in below.items():
            kind = JOURNAL if (name, machine.name) == ("state", CONTROL) else name
            files, size = _below(place)
            found.update({f"{kind}, files": files, f"{kind}, bytes": size})
    return dict(found)


def _below(top: Path) -> tuple[int, int]:
    """Files below a directory, and their bytes; what goes meanwhile does not count."""
    files = size = 0
    for folder, _, names in os.walk(top):
        for name in names:
            with suppress(OSError):
                size += os.lstat(os.path.join(folder, name)).st_size
                files += 1
    return files, size
