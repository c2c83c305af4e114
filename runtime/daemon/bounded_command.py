# SPDX-License-Identifier: Apache-2.0
"""Runs a command of the cluster file beside the daemon: for a limited time, without a wait.

A thread of its own does all that may block, also the start: the program may lie on a file system
that hangs. The command leads a process group, so that all of it can be killed. Children that it
leaves behind when it ends are left alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from ...texts import one_line

LOOK_S = 0.2  # seconds between two looks whether the command is to be killed
TAIL = 4096  # the last bytes of stderr that are kept
MOST_TEXT = 200  # characters of the last line


@dataclass(frozen=True)
class CommandEnd:
    """How a command has ended, after ``seconds``. ``code``: its exit code, negative for a signal;
    None if it was killed since its time was over, or if it could not be started, for the reason
    ``error``. ``said``: the last line of its stderr."""

    seconds: float
    code: int | None
    said: str = ""
    error: str = ""


def not_runnable(argv: Sequence[str]) -> str:
    """Say why this machine cannot run a command; "" if it can, or if there is none."""
    if not argv or (os.path.isfile(argv[0]) and os.access(argv[0], os.X_OK)):
        return ""
    return f"{argv[0]} is no program that can be run here"


def outcome(end: CommandEnd, limit_s: float) -> str:
    """Say how a command has ended; the text follows the command's name."""
    said = f": {end.said}" if end.said else ""
    if end.error:
        return f"could not be started: {end.error}"
    if end.code is None:
        return f"was killed, as it had not ended after {limit_s:g} s{said}"
    if end.code:
        how = f"with code {end.code}" if end.code > 0 else f"by signal {-end.code}"
        return f"has ended {how} after {end.seconds:.1f} s{said}"
    return f"has ended with code 0 after {end.seconds:.1f} s"


async def run_bounded(
    argv: Sequence[str], variables: Mapping[str, str], limit_s: float
) -> CommandEnd:
    """Run a command with this daemon's environment and ``variables``; never raises an error of it.

    It is killed, with its process group, after ``limit_s`` seconds, or if the caller is cancelled.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[CommandEnd] = loop.create_future()
    cancelled = threading.Event()

    def tell(end: CommandEnd) -> None:
        if not ended.done():
            ended.set_result(end)

    def work() -> None:
        end = _run(argv, variables, limit_s, cancelled)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(tell, end)

    threading.Thread(target=work, name=f"command {argv[0]}", daemon=True).start()
    try:
        return await ended
    finally:
        cancelled.set()


def _run(
    argv: Sequence[str], variables: Mapping[str, str], limit_s: float, cancelled: threading.Event
) -> CommandEnd:
    began = time.monotonic()
    try:
        process = subprocess.Popen(
            argv,
            env={**os.environ, **variables},
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        return CommandEnd(time.monotonic() - began, None, error=error.strerror or str(error))
    assert process.stderr is not None
    with process.stderr as stderr:
        os.set_blocking(stderr.fileno(), False)
        tail, in_time = _follow(process, stderr, began + limit_s, cancelled)
        if not in_time:
            with contextlib.suppress(ProcessLookupError):  # no process of the group is left
                os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        tail = (tail + _read(stderr)[0])[-TAIL:]
    return CommandEnd(time.monotonic() - began, code if in_time else None, _last_line(tail))


def _follow(
    process: subprocess.Popen[bytes], stderr: IO[bytes], until: float, cancelled: threading.Event
) -> tuple[bytes, bool]:
    """Read stderr until the command has ended. Returns the end of it, and False if the command has
    not ended by then (monotonic seconds), or if it is cancelled."""
    tail, watched = b"", {stderr.fileno()}
    pidfd = os.pidfd_open(process.pid)
    try:
        while (left := until - time.monotonic()) > 0 and not cancelled.is_set():
            ready = select.select([pidfd, *watched], [], [], min(left, LOOK_S))[0]
            if pidfd in ready:
                return tail, True
            if ready:
                data, open_ = _read(stderr)
                tail = (tail + data)[-TAIL:]
                if not open_:
                    watched.clear()
        return tail, False
    finally:
        os.close(pidfd)


def _read(stderr: IO[bytes]) -> tuple[bytes, bool]:
    """What is there, at most a pipe's content; False if there will be no more."""
    try:
        data = os.read(stderr.fileno(), 1 << 20)
    except BlockingIOError:
        return b"", True
    return data, bool(data)


def _last_line(tail: bytes) -> str:
    lines = tail.decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return one_line(last)[:MOST_TEXT]
