# SPDX-License-Identifier: Apache-2.0
"""Runs the contract programs, on the doubles or on real libraries.

    python integration/gpu/contract/run.py [NAME ...] [--libcuda FILE --libcudart FILE]
                                           [--flags=-fsanitize=thread] [--build FOLDER]

Without libraries the doubles are built and used. With real ones, both files are needed (on a GPU
machine libcuda.so.1 comes with the driver, libcudart.so.13 with the toolkit or PyTorch). Ends with
1 if a program found a difference.
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

from doubles.gpu import build  # noqa: E402

# abi.c is no contract program: it prints, and its output is compared. run_nccl.py has NCCL's.
PROGRAMS = tuple(
    sorted(p.stem for p in HERE.glob("*.c") if p.stem != "abi" and not p.stem.startswith("nccl_"))
)


@dataclass(frozen=True)
class Result:
    name: str
    code: int
    output: str

    @property
    def passed(self) -> tuple[str, ...]:
        """What the program found to be so."""
        return tuple(
            line.removeprefix("ok ") for line in self.output.splitlines() if line.startswith("ok ")
        )


def run(
    name: str,
    folder: Path,
    libraries: Sequence[Path],
    flags: Sequence[str] = (),
    environment: dict[str, str] | None = None,
    timeout: float = 120,
) -> Result:
    """Compiles one program into `folder`, links it with the libraries and runs it with them.

    Raises subprocess.CalledProcessError where it doesn't compile, subprocess.TimeoutExpired.
    """
    program = build.program(HERE / f"{name}.c", folder / name, libraries, flags)
    paths = dict.fromkeys(str(library.parent) for library in libraries)
    env = {**os.environ, **(environment or {}), "LD_LIBRARY_PATH": ":".join(paths)}
    done = subprocess.run(
        [str(program)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=env,
        timeout=timeout,
        check=False,
    )
    return Result(name, done.returncode, done.stdout)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PROGRAMS))
    parser.add_argument("--libcuda", type=Path, help="real libcuda.so.1")
    parser.add_argument("--libcudart", type=Path, help="real libcudart.so.13")
    parser.add_argument("--flags", default="", help="for the compiler, as -fsanitize=thread")
    parser.add_argument("--build", type=Path, help="where the doubles are kept between runs")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for each program")
    given = parser.parse_args(argv)
    if (given.libcuda is None) != (given.libcudart is None):
        parser.error("--libcuda and --libcudart go together")
    unknown = set(given.names) - set(PROGRAMS)
    if unknown:
        parser.error(f"no program is called {', '.join(sorted(unknown))}")
    flags = given.flags.split()
    failed = 0
    with tempfile.TemporaryDirectory(prefix="liveshift-contract-") as scratch:
        if given.libcuda is not None:
            libraries = [given.libcuda.absolute(), given.libcudart.absolute()]
        else:
            doubles = build.build(given.build or Path(scratch), flags)
            libraries = [doubles.libcuda, doubles.libcudart]
        for name in given.names or PROGRAMS:
            result = run(name, Path(scratch), libraries, flags, timeout=given.timeout)
            print(f"{name}: {'passed' if result.code == 0 else f'FAILED ({result.code})'}")
            print("  " + result.output.rstrip().replace("\n", "\n  "), flush=True)
            failed += result.code != 0
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
