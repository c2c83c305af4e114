# SPDX-License-Identifier: Apache-2.0
"""Does to a process of its own (rank.py) what a move does on the fast path: ``python -m … UUID``.

It writes the line "rank PID", a line "step WORDS" before each step, and last "works", "fails WHY"
(the next trial will fail, too) or "unable WHY" (the trial could not be made now). Killing a process
in the middle of a driver call leaves the driver in a bad state, so the helper never kills this one.

The order is that of a move (runtime/agent/gpu/devices.py). A thread is inside a CUDA call whenever
threads are held; NVIDIA does not document what such a thread may keep the driver from doing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time

from ...errors import LiveshiftError
from .. import threads
from ..checkpoint import CheckpointApi, CudaState
from ..driver import CudaError, CUresult
from ..hold import ThreadHold, spared_threads
from . import rank
from .memory import FastPathMemory

LOCK_MS = 10_000
HOLD_S = 10.0
MOST_WORDS = 400
HELD = "with its threads held"
"""The names of some steps end in these words. If such a step fails, this host can have no device
sessions on either path."""
SETTLED, SETTLE_S = 5, 2.0
"""A thread has settled if it has not run in SETTLED looks, 10 ms apart; SETTLE_S limits the
wait."""


class Unable(LiveshiftError):
    """The trial could not be made."""


def say(text: str) -> None:
    """Write a line. If no process reads any more, the trial still goes on to its end."""
    with contextlib.suppress(OSError):
        os.write(1, (" ".join(text.split())[:MOST_WORDS] + "\n").encode())


def main(uuid: str, lock_ms: int) -> None:
    """Make the trial and write its result."""
    step = "starting"

    def begin(words: str) -> None:
        nonlocal step
        step = words
        say(f"step {words}")

    ours, theirs = socket.socketpair()
    child = subprocess.Popen(
        [sys.executable, "-m", rank.__spec__.name, uuid, str(theirs.fileno())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        pass_fds=[theirs.fileno()],
    )
    theirs.close()
    say(f"rank {child.pid}")
    pid, hold = child.pid, ThreadHold(child.pid)
    try:
        begin("starting with CUDA")
        driver, memory = CheckpointApi(), FastPathMemory(uuid)
        if not ours.recv(16):
            raise Unable(_last_words(child))
        restore_thread = driver.restore_thread(pid)
        hold = ThreadHold(pid, lambda pid: spared_threads(pid, restore_thread))
        begin("lock")
        driver.lock(pid, lock_ms)
        begin("hold")
        _settle(pid)
        hold.begin(HOLD_S)
        begin(f"unlock {HELD}")
        driver.unlock(pid)
        begin(f"giving memory away {HELD}")
        ours.sendall(b"give")
        word, descriptors, _, _ = socket.recv_fds(ours, 16, 1)
        if not word:
            raise LiveshiftError(_last_words(child))
        # Driver 580 does not export imported memory again: it goes back by the same descriptor.
        handle = memory.cuda.import_descriptor(descriptors[0])
        begin(f"lock {HELD}")
        driver.lock(pid, lock_ms)
        begin("checkpoint")
        hold.end()
        driver.checkpoint(pid)
        if driver.state(pid) is not CudaState.CHECKPOINTED:
            raise LiveshiftError("the driver does not report the process as checkpointed")
        begin("reading given memory")
        here = memory.reserve()
        memory.map(here, handle)
        if not memory.holds(here, rank.GIVEN):
            raise LiveshiftError("memory that was given away has lost its content")
        begin("restore")
        _settle(pid)
        hold.begin(HOLD_S)
        driver.restore(pid)
        begin("unlock")
        driver.unlock(pid)
        begin("taking memory back")
        ours.sendall(b"take")
        _hear(ours, child, b"ready")
        socket.send_fds(ours, [b"back"], descriptors)
        os.close(descriptors[0])
        _hear(ours, child, b"right")
        begin("going on")
        hold.end()
        ours.sendall(b"go on")
        _hear(ours, child, b"right")
        say("works")
    except Unable as error:
        say(f"unable {_tried(step)}: {error}")
    except CudaError as error:
        now = error.result in (CUresult.OUT_OF_MEMORY, CUresult.DEVICE_UNAVAILABLE)
        say(f"unable {_tried(step)}: {error}" if now else f"fails {step}: {error}")
    except (LiveshiftError, OSError) as error:
        say(f"fails {step}: {error}")
    finally:
        child.kill()
        hold.end()
        child.wait()


def _tried(step: str) -> str:
    """The name of a step that could not be tried, without HELD: it says nothing about sessions."""
    return step.removesuffix(f" {HELD}")


def _hear(peer: socket.socket, child: subprocess.Popen[bytes], expected: bytes) -> None:
    """Receive a word from the rank. Raises LiveshiftError if it is not the expected one."""
    word = peer.recv(16)
    if not word:
        raise LiveshiftError(_last_words(child))
    if word != expected:
        raise LiveshiftError("memory holds other bytes than before")


def _settle(tid: int) -> None:
    """Wait until that thread waits in a call, which it soon does: it must not be held while it runs
    Python code."""
    looks, before, until = 0, "", time.monotonic() + SETTLE_S
    while looks < SETTLED and time.monotonic() < until:
        now = threads.switches(tid) if threads.state(tid) == "S" else ""
        looks = looks + 1 if now and now == before else 0
        before = now
        time.sleep(0.01)


def _last_words(child: subprocess.Popen[bytes]) -> str:
    _, said = child.communicate()
    lines = said.decode(errors="replace").strip().splitlines()
    return f"the process ended with {child.returncode}: {lines[-1] if lines else ''}"


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    main(sys.argv[1], int(sys.argv[2]))
