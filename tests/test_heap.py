# SPDX-License-Identifier: Apache-2.0
"""What a daemon has freed does not stay with it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

from liveshift.runtime import heap

THREADS, BLOCKS, SIZE = 16, 50, 100_000


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def use_and_free(kept: list[bytes], all_there: threading.Barrier) -> None:
    """As the threads of a move do: the last block keeps malloc from giving back those before it."""
    blocks = [bytes(b"x" * SIZE) for _ in range(BLOCKS)]
    all_there.wait()
    kept.append(blocks.pop())
    del blocks
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
        task = asyncio.create_task(heap.give_back(lambda: idle, 0.01))
        await asyncio.sleep(0.2)
        task.cancel()
        return resident()

    print(resident(), asyncio.run(for_a_moment(idle=False)), asyncio.run(for_a_moment(idle=True)))


def test_freed_memory_goes_back_to_the_kernel_while_nothing_moves() -> None:
    """In a process of its own, whose memory nobody else uses."""
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, check=True)
    before, busy, idle = map(int, done.stdout.split())
    assert busy > before - 5_000_000, "not while a move is under way"
    assert idle < before - THREADS * BLOCKS * SIZE // 2


if __name__ == "__main__":
    main()
