# SPDX-License-Identifier: Apache-2.0
"""A program that does everything at once to its memory, from a seed, until it is ended.

Threads write, map, unmap, move and drop pages; the main thread forks children which do the same for
a while. Run with: seed, how many threads.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import sys
import threading
import time

PAGE = 4096
PRIVATE = 0x22  # MAP_PRIVATE | MAP_ANONYMOUS
FAILED = (1 << 64) - 1
MAYMOVE, FIXED, NO_HUGE, HUGE, FREE = 1, 2, 15, 14, 8

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = libc.mremap.restype = ctypes.c_void_p
_INTS = [ctypes.c_int] * 3
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *_INTS, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.madvise.argtypes = libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.mremap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_void_p,
]


class Area:
    """A mapping of a thread's own."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self.at: int = libc.mmap(None, pages * PAGE, 3, PRIVATE, -1, 0)

    def write(self, chance: random.Random) -> None:
        start = chance.randrange(self.pages)
        for page in range(start, min(self.pages, start + chance.randrange(1, 64))):
            value = chance.choice((0, 1, chance.randrange(256)))
            ctypes.memset(self.at + page * PAGE, value, chance.choice((8, PAGE)))

    def drop(self, chance: random.Random) -> None:
        start = chance.randrange(self.pages)
        length = chance.randrange(1, self.pages - start + 1)
        libc.madvise(self.at + start * PAGE, length * PAGE, chance.choice((4, FREE, HUGE, NO_HUGE)))

    def move(self, chance: random.Random) -> None:
        pages = chance.randrange(1, 400)
        moved = libc.mremap(self.at, self.pages * PAGE, pages * PAGE, MAYMOVE, None)
        if moved != FAILED:  # which is the case where it is several mappings by now
            self.at, self.pages = moved, pages

    def take_place(self, other: Area) -> bool:
        """Of a part of another one, which is no more.

        Where it fails nothing is known of either: Linux 6.17 moves several mappings at once, of
        which one with a userfaultfd ends it with EFAULT in the middle. Older ones move but one.
        """
        size = self.pages * PAGE
        if libc.mremap(self.at, size, size, MAYMOVE | FIXED, other.at) == FAILED:
            return False
        if self.pages < other.pages:
            libc.munmap(other.at + size, other.pages * PAGE - size)
        self.at = other.at
        return True

    def forbid(self, chance: random.Random) -> None:
        start = chance.randrange(self.pages)
        libc.mprotect(self.at + start * PAGE, (self.pages - start) * PAGE, 0)
        libc.mprotect(self.at + start * PAGE, (self.pages - start) * PAGE, 3)


def churn(seed: int, seconds: float) -> None:
    chance = random.Random(seed)
    areas = [Area(chance.randrange(1, 400)) for _ in range(12)]
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        which = chance.randrange(len(areas))
        action = chance.randrange(12)
        if action < 7:
            areas[which].write(chance)
        elif action == 7:
            areas[which].drop(chance)
        elif action == 8:
            areas[which].move(chance)
        elif action == 9:
            areas[which].forbid(chance)
        elif action == 10:
            libc.munmap(areas[which].at, areas[which].pages * PAGE)
            areas[which] = Area(chance.randrange(1, 400))
        else:
            other = chance.randrange(len(areas))
            if other != which and areas[which].pages <= areas[other].pages:
                if not areas[which].take_place(areas[other]):
                    areas[which] = Area(chance.randrange(1, 400))
                areas[other] = Area(chance.randrange(1, 400))


def main(seed: int, threads: int) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for number in range(threads):
        threading.Thread(target=churn, args=(seed + number, 1e9), daemon=True).start()
    chance = random.Random(seed)
    print("ready", flush=True)
    while True:
        time.sleep(chance.random() * 0.05)
        if os.fork() == 0:
            churn(chance.randrange(1 << 30), chance.random() * 0.3)
            if chance.random() < 0.3:
                os.execv("/bin/sleep", ["sleep", "0.2"])
            os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
