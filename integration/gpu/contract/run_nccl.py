# SPDX-License-Identifier: Apache-2.0
"""Runs the NCCL contract programs, on the doubles or on the real libraries.

python integration/gpu/contract/run_nccl.py                   the doubles, NCCL 2.29.7
python integration/gpu/contract/run_nccl.py --version 23203   another version of the double
python integration/gpu/contract/run_nccl.py --libcuda FILE --libnccl FILE     the real ones
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[2] / "tests"))

from doubles.gpu.build import build, program  # noqa: E402
from doubles.gpu.build_nccl import DEFAULT, build_nccl  # noqa: E402

PROGRAMS = tuple(sorted(source.stem for source in HERE.glob("nccl_*.c")))
TIMEOUT_S = 120.0
"""A program that takes longer hangs; the real NCCL takes seconds for a communicator."""


@dataclass(frozen=True)
class Libraries:
    """libcuda.so.1 and libnccl.so.2, doubles or real, and the flags for programs on them."""

    libcuda: Path
    libnccl: Path
    flags: tuple[str, ...] = ()

    @property
    def environment(self) -> dict[str, str]:
        """What lets a program find them, and libnccl find libcuda."""
        return {"LD_LIBRARY_PATH": f"{self.libcuda.parent}:{self.libnccl.parent}"}


def doubles(folder: Path, version: int = DEFAULT, flags: Sequence[str] = ()) -> Libraries:
    """Built below `folder`."""
    libcuda = build(folder, flags).libcuda
    return Libraries(libcuda, build_nccl(folder, version, flags), tuple(flags))


def run_program(name: str, libraries: Libraries, folder: Path, sources: Path = HERE) -> list[str]:
    """The lines that a program printed, which says on stderr what went wrong. `folder` is for what
    is built; its source is in `sources`.

    Raises subprocess.CalledProcessError and TimeoutExpired.
    """
    target = program(
        sources / f"{name}.c",
        folder / name,
        [libraries.libnccl, libraries.libcuda],
        [f"-I{HERE}", *libraries.flags],
    )
    environment = {**os.environ, **libraries.environment}
    done = subprocess.run(
        [str(target)], env=environment, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S
    )
    done.check_returncode()
    return done.stdout.splitlines()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--libcuda", type=Path)
    parser.add_argument("--libnccl", type=Path)
    parser.add_argument("--version", type=int, default=DEFAULT)
    parser.add_argument("--flag", action="append", default=[], help="for the compiler")
    parser.add_argument("programs", nargs="*", default=PROGRAMS)
    arguments = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as made:
        if arguments.libcuda and arguments.libnccl:
            libraries = Libraries(arguments.libcuda, arguments.libnccl)
        else:
            libraries = doubles(Path(made), arguments.version, arguments.flag)
        for name in arguments.programs:
            print(f"{name}:", flush=True)
            try:
                print("\n".join(run_program(name, libraries, Path(made))), flush=True)
            except subprocess.SubprocessError as error:
                failed += 1
                print(f"FAILED: {error}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
