# SPDX-License-Identifier: Apache-2.0
"""The orchestrator under load: the real daemon, what it costs, and how long it takes to answer."""

from __future__ import annotations

import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from liveshift.errors import LiveshiftError
from liveshift.runtime.messages import GetStatus, encode_request

_LENGTH = struct.Struct("<I")
STOP_S = 20.0


@dataclass(frozen=True)
class Cost:
    """A process at one moment: CPU seconds used so far, bytes, numbers."""

    when: float
    cpu: float
    resident: int
    descriptors: int
    threads: int

    def since(self, before: Cost) -> float:
        """Cores that were busy since."""
        return (self.cpu - before.cpu) / (self.when - before.when)


class Daemon:
    """``liveshift orchestrator``; ``under`` are words before it, such as a profiler's."""

    def __init__(self, config: Path, under: Sequence[str] = ()) -> None:
        self.config = config
        self.log = config.with_name("orchestrator.log")
        self._under = tuple(under) or (sys.executable,)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        words = ("-m", "liveshift.launcher.cli", "orchestrator", "--config", str(self.config))
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self._under, *words], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def kill(self) -> None:
        """As a crash would end it."""
        process = self._running()
        process.kill()
        process.wait()

    def stop(self) -> None:
        """As systemd would; raises LiveshiftError when it does not end, or not well."""
        process = self._running()
        process.send_signal(signal.SIGTERM)
        try:
            code = process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise LiveshiftError(f"the orchestrator did not end in {STOP_S:g} s") from None
        if code != 0:
            raise LiveshiftError(f"the orchestrator ended with {code}\n{self.last_words()}")

    def discard(self) -> None:
        """End it in any case."""
        if self._process is not None and self._process.poll() is None:
            self.kill()

    def cost(self) -> Cost:
        seen = psutil.Process(self._running().pid)
        with seen.oneshot():
            spent = seen.cpu_times()
            return Cost(
                time.monotonic(),
                spent.user + spent.system,
                seen.memory_info().rss,
                seen.num_fds(),
                seen.num_threads(),
            )

    def last_words(self, lines: int = 20) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def _running(self) -> subprocess.Popen[bytes]:
        process = self._process
        if process is None or process.poll() is not None:
            raise LiveshiftError(f"the orchestrator does not run\n{self.last_words()}")
        return process


@dataclass(frozen=True)
class Machine:
    """All processors at one moment: seconds that they were busy so far, and of it the crowds and
    this process itself. What others do at the same time makes every answer slower."""

    when: float
    busy: float
    crowd: float

    @classmethod
    def now(cls, crowd: float) -> Machine:
        spent = psutil.cpu_times()
        busy = sum(spent) - spent.idle - spent.iowait - spent.guest - spent.guest_nice
        return cls(time.monotonic(), busy, crowd + sum(os.times()[:2]))

    def crowd_since(self, before: Machine) -> float:
        """Cores that the harness itself kept busy."""
        return (self.crowd - before.crowd) / (self.when - before.when)

    def others_since(self, before: Machine, cores: float) -> float:
        """Cores that were busy with neither the harness nor the orchestrator (``cores``)."""
        busy = (self.busy - before.busy) / (self.when - before.when)
        return max(0.0, busy - cores - self.crowd_since(before))


class StatusClock:
    """Asks for the status again and again; ``seconds``: from each ask to its whole answer.

    What came is not decoded: that is the asker's cost, and here both share the processors.
    """

    def __init__(self, path: Path, every: float) -> None:
        self._path = path
        self._every = every
        self._stop = threading.Event()
        self.seconds: list[float] = []
        self.bytes = 0

    @contextmanager
    def running(self) -> Iterator[StatusClock]:
        thread = threading.Thread(target=self._run, name="status")
        thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            thread.join()

    def _run(self) -> None:
        frame = encode_request(1, GetStatus())
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
            line.connect(str(self._path))
            while not self._stop.wait(self._every):
                began = time.monotonic()
                line.sendall(_LENGTH.pack(len(frame)) + frame)
                (self.bytes,) = _LENGTH.unpack(_exactly(line, _LENGTH.size))
                _exactly(line, self.bytes)
                self.seconds.append(time.monotonic() - began)


def eventually(look: Callable[[], bool], what: str, timeout: float, every: float = 0.1) -> float:
    """Wait until ``look`` is true, and say how many seconds that took; raises LiveshiftError."""
    began = time.monotonic()
    while True:
        with suppress(ConnectionError):
            if look():
                return time.monotonic() - began
        if time.monotonic() - began > timeout:
            raise LiveshiftError(f"{what}: not within {timeout:g} s")
        time.sleep(every)


def enough_descriptors(wanted: int) -> None:
    """Raise the soft limit for us and our children; raises LiveshiftError when that won't do."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise LiveshiftError(
            f"{wanted} descriptors are needed, the limit is {hard}", hint="ulimit -Hn shows it"
        )
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _exactly(line: socket.socket, length: int) -> bytearray:
    got = bytearray()
    while len(got) < length:
        part = line.recv(min(length - len(got), 1 << 20))
        if not part:
            raise LiveshiftError("the orchestrator hung up")
        got += part
    return got
