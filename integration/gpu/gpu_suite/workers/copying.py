# SPDX-License-Identifier: Apache-2.0
"""The limit of the link: copies of BLOCK bytes between the GPU and host memory, TIMES each.

Pinned memory by one, two and four streams, and pageable memory; → GB/s, the best of the times.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import time
from collections.abc import Callable

from ..cuda import SIZE, U64, Driver
from . import say

STREAMS = (1, 2, 4)


def main() -> None:
    block, times = int(sys.argv[1]), int(sys.argv[2])
    driver = Driver()
    cu = driver.cu
    device, pinned = U64(), ctypes.c_void_p()
    cu.cuMemAlloc_v2(ctypes.byref(device), SIZE(block))
    driver.fill(device.value, block, 0x5A5A5A5A)
    began = time.perf_counter()
    cu.cuMemHostAlloc(ctypes.byref(pinned), SIZE(block), ctypes.c_uint(1))
    found: dict[str, float] = {"pin_s": time.perf_counter() - began}
    pageable = mmap.mmap(-1, block)
    pageable_at = ctypes.addressof(ctypes.c_char.from_buffer(pageable))
    ctypes.memset(pageable_at, 1, block)
    streams = [ctypes.c_void_p() for _ in range(max(STREAMS))]
    for stream in streams:
        cu.cuStreamCreate(ctypes.byref(stream), ctypes.c_uint(1))

    def rate(copy: Callable[[], None]) -> float:
        best = float("inf")
        for _ in range(times):
            since = time.perf_counter()
            copy()
            driver.wait()
            best = min(best, time.perf_counter() - since)
        return block / 1e9 / best

    def both(host: int, count: int) -> tuple[Callable[[], None], Callable[[], None]]:
        part = block // count // 4096 * 4096

        def out() -> None:
            for index, stream in enumerate(streams[:count]):
                cu.cuMemcpyDtoHAsync_v2(
                    ctypes.c_void_p(host + index * part),
                    U64(device.value + index * part),
                    SIZE(part),
                    stream,
                )

        def back() -> None:
            for index, stream in enumerate(streams[:count]):
                cu.cuMemcpyHtoDAsync_v2(
                    U64(device.value + index * part),
                    ctypes.c_void_p(host + index * part),
                    SIZE(part),
                    stream,
                )

        return out, back

    for count in STREAMS:
        out, back = both(pinned.value or 0, count)
        found[f"pinned, {count} streams, out"] = rate(out)
        found[f"pinned, {count} streams, in"] = rate(back)
    out, back = both(pageable_at, 1)
    found["pageable, out"], found["pageable, in"] = rate(out), rate(back)
    say({name: round(value, 3) for name, value in found.items()})


if __name__ == "__main__":
    main()
