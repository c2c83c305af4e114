# SPDX-License-Identifier: Apache-2.0
"""A process that holds one of everything a kernel keeps for it, and says how each came through.

Its parts run side by side, each with its own entry in the report. ``OUT/arm`` starts the timers,
``OUT/enough`` ends it; ``OUT/progress.json`` says how far it is.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import mmap
import os
import pty
import select
import signal
import socket
import struct
import tempfile
import threading
import time
import tty
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.context import BaseContext
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

HEAD = struct.Struct("!QI")
DELAY = 6.0
"""Seconds from ``arm`` to the timers' common deadline; the move lies in between."""

report: dict[str, Any] = {"fired": {}, "signals": 0}
over = threading.Event()


def shared_memory() -> tuple[mmap.mmap, int]:
    """A named object in /dev/shm that this process and a child map; the child counts in it."""
    with Path("/dev/shm/counted").open("w+b") as file:
        file.truncate(1 << 20)
        file.write(os.urandom(1 << 20))
        file.flush()
        shared = mmap.mmap(file.fileno(), 1 << 20)
    report["shm"] = hashlib.sha256(shared[8:]).hexdigest()
    shared[:8] = bytes(8)
    child = os.fork()
    if child == 0:
        while True:
            struct.pack_into("Q", shared, 0, struct.unpack_from("Q", shared)[0] + 1)
            time.sleep(0.005)
    return shared, child


def watch_clocks() -> None:
    """By how much the monotonic clock has surely leapt at once, and how far it has surely fallen
    behind the wall clock in all. The wall clock is read between two looks at the other one: this
    thread may be held up between them."""
    last, leap, behind = time.monotonic(), 0.0, 0.0
    lead = time.time() - last  # of the wall clock: no more than this at first
    least = float("-inf")  # no less than this at the last look
    while not over.is_set():
        time.sleep(0.005)
        before, wall, after = time.monotonic(), time.time(), time.monotonic()
        assert before >= last, "CLOCK_MONOTONIC went back"
        leap = max(leap, least - (wall - before))
        behind = max(behind, wall - after - lead)
        last, least = after, wall - after
    report["leap"], report["behind"] = leap, behind


def arm() -> None:
    """Set a timer of every kind to one deadline, DELAY from now."""
    report["armed"] = now = time.monotonic()
    report["deadline"] = deadline = now + DELAY

    def fired(what: str) -> Callable[..., None]:
        return lambda *_: report["fired"].update({what: time.monotonic()})

    threading.Timer(DELAY, fired("threading.Timer")).start()
    signal.signal(signal.SIGALRM, fired("setitimer"))
    signal.setitimer(signal.ITIMER_REAL, DELAY)

    libc = ctypes.CDLL(None, use_errno=True)

    def timerfd(seconds: float, flags: int) -> int:
        timer = int(libc.timerfd_create(time.CLOCK_MONOTONIC, 0))
        when = (ctypes.c_long * 4)(0, 0, int(seconds), int(seconds % 1 * 1e9))
        assert libc.timerfd_settime(timer, flags, when, None) == 0
        return timer

    relative, absolute = timerfd(DELAY, 0), timerfd(deadline, 1)  # TFD_TIMER_ABSTIME

    def waits(what: str, wait: Callable[[], object]) -> None:
        def run() -> None:
            wait()
            fired(what)()

        threading.Thread(target=run, daemon=True).start()

    waits("timerfd", lambda: os.read(relative, 8))
    waits("timerfd, absolute", lambda: os.read(absolute, 8))
    waits("sleep", lambda: time.sleep(DELAY))
    waits("poll", lambda: select.poll().poll(DELAY * 1000))
    waits("Event.wait", lambda: threading.Event().wait(DELAY))


def count_together(counters: list[int], lock: threading.Lock) -> None:
    """Two threads run this: under the lock all counters are equal, always."""
    while not over.is_set():
        with lock:
            assert len(set(counters)) == 1
            for index in range(len(counters)):
                counters[index] += 1
        time.sleep(0.001)


def converse(address: str, port: int) -> None:
    """Exchange numbered blocks with a server on another host, on one connection."""
    number = 0
    try:
        with socket.create_connection((address, port)) as peer, peer.makefile("rb") as answers:
            while not over.is_set():
                block = hashlib.sha256(str(number).encode()).digest() * (1 + number % 400)
                peer.sendall(HEAD.pack(number, len(block)) + block)
                answer = answers.read(HEAD.size + 32)
                expected = HEAD.pack(number, 32) + hashlib.sha256(block).digest()
                assert answer == expected, f"answer {number} is damaged"
                number += 1
                report["blocks"] = number
                time.sleep(0.002)
            report["conversation"] = "whole"
    except (OSError, AssertionError) as error:
        report["conversation"] = f"broke after block {number}: {error!r}"


def echo(asked: Queue[int | None], answers: Queue[int]) -> None:
    while (number := asked.get()) is not None:
        answers.put(number)


def question(method: str) -> None:
    """Ask a worker that was started so one number after the other: its queues' locks are POSIX
    named semaphores."""
    context: BaseContext = get_context(method)
    asked: Queue[int | None] = context.Queue()
    answers: Queue[int] = context.Queue()
    worker = context.Process(target=echo, args=(asked, answers))  # type: ignore[attr-defined]
    worker.start()
    number = 0
    while not over.is_set():
        asked.put(number)
        assert answers.get() == number
        number += 1
        report[f"echoed by {method}"] = number
        time.sleep(0.002)
    asked.put(None)
    worker.join()


def forgotten() -> tuple[select.epoll, int, int]:
    """An epoll set with a pipe that this process has closed; a child, which is returned too, has it
    still, and writes into it at SIGUSR1."""
    out, into = os.pipe()
    watched = select.epoll()
    watched.register(out, select.EPOLLIN)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGUSR1, lambda *_: os.write(into, b"x"))
        while True:
            signal.pause()
    os.close(out)
    os.close(into)
    return watched, out, child


class HalfClosed:
    """Connections over loopback whose other end was closed: no process has that end open."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            self.ends = [self._end(listening, sent) for sent in (b"", b"sent before the close")]
        self.poll = select.poll()
        for end in self.ends:
            self.poll.register(end, select.POLLIN | select.POLLRDHUP)

    @staticmethod
    def _end(listening: socket.socket, sent: bytes) -> socket.socket:
        here = socket.create_connection(listening.getsockname())
        there, _ = listening.accept()
        there.sendall(sent)
        there.close()
        return here

    def events(self) -> list[int]:
        return [event for _, event in sorted(self.poll.poll(1000))]

    def rest(self) -> list[str]:
        return [end.makefile().read() for end in self.ends]


def reserve() -> mmap.mmap:
    """Reserve 1 TiB of addresses: no host has so much memory, and no access is allowed yet."""
    return mmap.mmap(-1, 1 << 40, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0)


def talk_over_a_terminal() -> None:
    """Write lines to a program on a pseudo-terminal of its own, and read what it says."""
    child, master = pty.fork()
    if child == 0:
        os.execvp("cat", ["cat"])
    tty.setraw(master)  # what is on its way when CRIU comes goes through its modes once more
    with os.fdopen(master, "r+b", buffering=0) as terminal:
        number = 0
        while not over.is_set():
            line = b"%d\n" % number
            terminal.write(line)
            seen = b""
            while len(seen) < len(line):
                seen += terminal.read(100)
            assert seen == line, seen
            number += 1
            report["typed"] = number
            time.sleep(0.002)
        os.kill(child, signal.SIGTERM)
        os.waitpid(child, 0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--server", default="", help="ADDRESS:PORT; else it talks to none")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    def heard(*_: object) -> None:
        report["signals"] += 1

    watched, number, writer = forgotten()
    signal.signal(signal.SIGUSR1, heard)
    shared, child = shared_memory()
    unlinked = tempfile.TemporaryFile(dir="/tmp")  # noqa: SIM115 (open to the end)
    unlinked.write(b"never had a name")
    unlinked.flush()
    Path("/tmp/named").write_text("private to this capsule")
    pipe_out, pipe_in = os.pipe()
    os.write(pipe_in, b"in flight")
    ours, theirs = socket.socketpair()
    ours.send(b"in a socket")
    half_closed, reserved = HalfClosed(), reserve()
    report["half closed"] = half_closed.events()

    counters, lock = [0, 0, 0], threading.Lock()
    threads = [threading.Thread(target=count_together, args=(counters, lock)) for _ in range(2)]
    threads.append(threading.Thread(target=watch_clocks))
    threads.append(threading.Thread(target=talk_over_a_terminal))
    methods = ("spawn", "forkserver")
    threads += [threading.Thread(target=question, args=(method,)) for method in methods]
    if args.server:
        address, port = args.server.split(":")
        threads.append(threading.Thread(target=converse, args=(address, int(port))))
    for thread in threads:
        thread.start()
    armed = False
    while not (args.out / "enough").exists():
        if not armed and (args.out / "arm").exists():
            arm()
            armed = True
        now = {**report, "counted": counters[0], "shared": struct.unpack_from("Q", shared)[0]}
        (args.out / ".progress").write_text(json.dumps(now))
        (args.out / ".progress").rename(args.out / "progress.json")
        time.sleep(0.05)
    over.set()
    for thread in threads:
        thread.join()
    os.kill(child, signal.SIGTERM)
    os.waitpid(child, 0)

    os.kill(writer, signal.SIGUSR1)
    report["epoll"] = [n == number for n, _ in watched.poll(10)]
    os.kill(writer, signal.SIGKILL)
    os.waitpid(writer, 0)
    unlinked.seek(0)
    report["unlinked"] = unlinked.read().decode()
    report["tmp"] = Path("/tmp/named").read_text()
    report["pipe"] = os.read(pipe_out, 100).decode()
    report["socketpair"] = theirs.recv(100).decode()
    report["half closed after"], report["rest"] = half_closed.events(), half_closed.rest()
    report["reserved"] = len(reserved)
    report["shm_after"] = hashlib.sha256(Path("/dev/shm/counted").read_bytes()[8:]).hexdigest()
    report["counters"] = counters
    report["shared"] = struct.unpack_from("Q", shared)[0]
    (args.out / "report.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
