# SPDX-License-Identifier: Apache-2.0
"""Ranks that ``mpirun`` starts in one capsule and that talk by MPI: each adds up what all of them
know, a step after the other.

Open MPI is called by ctypes: its C interface is all that Debian's openmpi-bin brings.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import time
from pathlib import Path


class World:
    """All ranks: MPI_COMM_WORLD."""

    def __init__(self) -> None:
        self._mpi = ctypes.CDLL("libmpi.so.40", ctypes.RTLD_GLOBAL)
        self._all = ctypes.byref(self._handle("comm_world"))
        assert self._mpi.MPI_Init(None, None) == 0
        number = ctypes.c_int()
        self._mpi.MPI_Comm_rank(self._all, ctypes.byref(number))
        self.rank = number.value
        self._mpi.MPI_Comm_size(self._all, ctypes.byref(number))
        self.size = number.value

    def _handle(self, name: str) -> ctypes.c_byte:
        """What mpi.h names MPI_…: a struct of the library's own."""
        return ctypes.c_byte.in_dll(self._mpi, f"ompi_mpi_{name}")

    def sum(self, values: list[int]) -> list[int]:
        """Of each place, over all ranks."""
        mine, everyones = (ctypes.c_int64 * len(values))(*values), (ctypes.c_int64 * len(values))()
        kind, add = (ctypes.byref(self._handle(name)) for name in ("int64_t", "op_sum"))
        assert self._mpi.MPI_Allreduce(mine, everyones, len(values), kind, add, self._all) == 0
        return list(everyones)

    def end(self) -> None:
        self._mpi.MPI_Finalize()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--enough", type=Path, required=True, help="end when this file is there")
    args = parser.parse_args()

    world = World()
    step = 0
    with (args.out / f"rank{world.rank}.jsonl").open("w", buffering=1) as log:
        while True:
            step += 1
            # The second value is large: then Open MPI lets one process read the other's memory.
            sums = world.sum([step * (world.rank + 1), *[int(args.enough.exists())] * 100_000])
            line = {"step": step, "sum": sums[0], "ranks": world.size, "time": time.time()}
            log.write(json.dumps(line) + "\n")
            if sums[1]:  # all ranks see it in the same step
                break
            time.sleep(0.02)
    (args.out / f"final{world.rank}.json").write_text(json.dumps({"steps": step}) + "\n")
    world.end()


if __name__ == "__main__":
    main()
