# SPDX-License-Identifier: Apache-2.0
"""What a daemon has freed does not stay with it."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from liveshift.runtime.daemon import heap
from liveshift.runtime.wire import page_port

THREADS, BLOCKS, SIZE = 16, 50, 100_000
SELF = 64 << 20
CHUNKS, CHUNK = 60, 1 << 20


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def use_and_free(kept: list[bytes], all_there: threading.Barrier) -> None:
    """As the threads of a move do: the last block keeps malloc from giving back those before it."""
    blocks = [bytes(b"x" * SIZE) for _ in range(BLOCKS)]
    all_there.wait()
    kept.append(blocks.pop())
    del blocks
    all_there.wait()


class Round:
    """Refers to itself, and has memory that is not malloc's."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, SELF)
        self.memory.write(b"x" * SELF)
        self.itself = self


class Idle:
    """Whether the daemon is idle. It is asked again only after malloc has given back."""

    def __init__(self, idle: bool) -> None:
        self.idle, self._asked = idle, 0

    def __call__(self) -> bool:
        self._asked += 1
        return self.idle

    async def asked_again(self) -> None:
        """The first question shows the state of now; the second one comes after what it led to."""
        until = self._asked + 2
        async with asyncio.timeout(60):
            while self._asked < until:
                await asyncio.sleep(0.005)


def heaps() -> int:
    """How many heaps malloc has, the main one included, as it says itself."""
    libc = ctypes.CDLL(None)
    libc.fopen.restype = ctypes.c_void_p
    with tempfile.NamedTemporaryFile() as file:
        stream = ctypes.c_void_p(libc.fopen(file.name.encode(), b"w"))
        libc.malloc_info(0, stream)
        libc.fclose(stream)
        return file.read().count(b"<heap nr=")


def bounded() -> None:
    """In how many heaps threads have allocated, with the bounds and without."""
    if sys.argv[2] == "bound":
        heap.bound()
    all_there = threading.Barrier(THREADS + 1)

    def use() -> None:
        bytes(b"x" * SIZE)
        all_there.wait()
        all_there.wait()

    threads = [threading.Thread(target=use) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    all_there.wait()
    print(heaps())
    all_there.wait()


def main() -> None:
    kept: list[bytes] = []
    all_there = threading.Barrier(THREADS)
    threads = [
        threading.Thread(target=use_and_free, args=(kept, all_there)) for _ in range(THREADS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    async def for_a_moment(idle: bool) -> int:
        daemon = Idle(idle)
        task = asyncio.create_task(heap.give_back(daemon, 0.01))
        await daemon.asked_again()
        task.cancel()
        return resident()

    print(resident(), asyncio.run(for_a_moment(idle=False)), asyncio.run(for_a_moment(idle=True)))


async def received() -> None:
    """What is resident before threads receive images, while they do, and when all are idle."""
    heap.bound()
    page_port.keep_freed_memory()
    task = asyncio.create_task(heap.give_back(daemon := Idle(True), 0.01))
    all_there = threading.Barrier(THREADS + 1)

    def receive() -> None:
        blocks = [bytes(b"x" * CHUNK) for _ in range(CHUNKS // THREADS)]
        all_there.wait()
        all_there.wait()
        del blocks

    await daemon.asked_again()
    before = resident()
    threads = [threading.Thread(target=receive) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    all_there.wait()
    busy = resident()
    all_there.wait()
    for thread in threads:
        thread.join()
    del threads, thread
    await daemon.asked_again()
    task.cancel()
    print(before, busy, resident())


async def never_idle() -> None:
    task = asyncio.create_task(heap.give_back(lambda: False, 0.01, 0.1))
    await asyncio.sleep(0)  # what is there when it begins is never collected
    before, round_ = resident(), Round()
    full = resident()
    del round_
    async with asyncio.timeout(60):
        while resident() > full - SELF // 2:
            await asyncio.sleep(0.01)
    task.cancel()
    print(before, full)


async def rounds() -> None:
    """Idle only in the end."""
    seen, daemon = [], Idle(False)
    task = asyncio.create_task(heap.give_back(daemon, 0.01))
    await daemon.asked_again()
    Round()
    for _ in range(2):
        seen.append(resident())
        await daemon.asked_again()
    daemon.idle = True
    await daemon.asked_again()
    task.cancel()
    print(*seen, resident())


def test_freed_memory_goes_back_to_the_kernel_while_nothing_moves() -> None:
    """In a process of its own, whose memory nobody else uses."""
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, check=True)
    before, busy, idle = map(int, done.stdout.split())
    assert busy > before - 5_000_000, "not while a move is under way"
    assert idle < before - THREADS * BLOCKS * SIZE // 2


def test_what_refers_to_itself_only_is_let_go_of_while_nothing_moves() -> None:
    done = subprocess.run([sys.executable, __file__, "rounds"], capture_output=True, text=True)
    before, busy, idle = map(int, done.stdout.split())
    assert busy > before - SELF // 2, "not while a move is under way"
    assert idle < before - SELF // 2


def test_a_daemon_that_is_never_idle_gives_memory_back_too() -> None:
    done = subprocess.run(
        [sys.executable, __file__, "never_idle"], capture_output=True, text=True, check=True
    )
    before, full = map(int, done.stdout.split())
    assert full > before + SELF // 2


def test_many_threads_have_few_heaps() -> None:
    seen = {}
    for how in ("bound", "free"):
        command = [sys.executable, __file__, "bounded", how]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        seen[how] = int(done.stdout)
    assert seen["bound"] == heap.ARENAS < seen["free"]


def test_the_free_ends_of_heaps_go_back_too() -> None:
    """Whatever the threads that receive images have told malloc to keep for the next one."""
    done = subprocess.run(
        [sys.executable, __file__, "received"], capture_output=True, text=True, check=True
    )
    before, busy, idle = map(int, done.stdout.split())
    assert busy > before + CHUNKS * CHUNK // 2
    assert idle < before + 2 * CHUNK


if __name__ == "__main__":
    if sys.argv[1:2] == ["bounded"]:
        bounded()
    elif sys.argv[1:] == ["received"]:
        asyncio.run(received())
    elif sys.argv[1:] == ["never_idle"]:
        asyncio.run(never_idle())
    else:
        asyncio.run(rounds()) if sys.argv[1:] else main()
