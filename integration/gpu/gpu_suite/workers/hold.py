# SPDX-License-Identifier: Apache-2.0
"""Holds BYTES of device memory in blocks of random content: "check" → whether they are as before.

With torch where it has CUDA; else by the CUDA runtime, whose functions come from what is preloaded
first, as for a linked program.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import random
import sys
from collections.abc import Callable

from ..cuda import SIZE, TO_DEVICE, TO_HOST, Library
from . import heard, say

BLOCK = 1 << 30
PART = 8 << 20
"""Words that are summed at once."""
GRAIN = 2 << 20
"""Pages of device memory: what does not fill them the arena leaves to the driver."""
Digest = Callable[[], str]


def by_torch(size: int) -> Digest:
    import torch

    device = torch.device("cuda:0")
    chance = torch.Generator(device).manual_seed(size)
    blocks = []
    for at in range(0, size, BLOCK):
        words = min(BLOCK, size - at) // 8
        block = torch.empty(words, dtype=torch.int64, device=device)
        block.random_(generator=chance)
        blocks.append(block)

    def digest() -> str:
        places = torch.arange(1, PART + 1, device=device)  # a word elsewhere makes a difference
        sums = [
            (part * places[: len(part)]).sum().item()
            for block in blocks
            for part in torch.split(block, PART)
        ]
        del places
        torch.cuda.empty_cache()  # nothing but the blocks is held
        return repr(sums)

    return digest


def by_runtime(size: int) -> Digest:
    cuda = Library("libcudart.so.13")
    cuda.cudaSetDevice(0)
    block = min(BLOCK, max(2 << 20, size // 8 // GRAIN * GRAIN))
    blocks: list[tuple[ctypes.c_void_p, int]] = []
    chance = random.Random(size)
    for at in range(0, size, block):
        length = min(block, size - at)
        pointer = ctypes.c_void_p()
        cuda.cudaMalloc(ctypes.byref(pointer), SIZE(length))
        cuda.cudaMemcpy(pointer, chance.randbytes(length), SIZE(length), TO_DEVICE)
        blocks.append((pointer, length))

    def digest() -> str:
        found = hashlib.blake2b()
        for pointer, length in blocks:
            data = ctypes.create_string_buffer(length)
            cuda.cudaMemcpy(data, pointer, SIZE(length), TO_HOST)
            found.update(data)
        return found.hexdigest()

    return digest


def main() -> None:
    size = int(sys.argv[1])
    usable = False
    if importlib.util.find_spec("torch") is not None and "--runtime" not in sys.argv:
        import torch

        usable = torch.cuda.is_available()
    digest = by_torch(size) if usable else by_runtime(size)
    before = digest()
    say({"with": "torch" if usable else "the CUDA runtime"})
    for _ in heard():
        say(digest() == before)


if __name__ == "__main__":
    main()
