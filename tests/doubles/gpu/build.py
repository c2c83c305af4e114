# SPDX-License-Identifier: Apache-2.0
"""Compiles the simulated CUDA and NVML (and whatever else is a double of the GPU's libraries)."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
INCLUDE = HERE / "include"
CFLAGS = (
    "-std=gnu11",
    "-D_GNU_SOURCE",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-g",
    "-O1",
    "-fno-omit-frame-pointer",
    "-pthread",
)
NVML_TOO = ("inventory.c", "holders.c")
"""Of the simulated libcuda.so.1: both libraries see the same GPUs and the same processes."""


@dataclass(frozen=True)
class Doubles:
    """A folder with libcuda.so.1, libnvidia-ml.so.1, libcudart.so.13 and libcudart.so.12 in it."""

    folder: Path
    flags: tuple[str, ...]

    @property
    def libcuda(self) -> Path:
        return self.folder / "libcuda.so.1"

    @property
    def libcudart(self) -> Path:
        return self.folder / "libcudart.so.13"


def compiler() -> list[str]:
    return shlex.split(os.environ.get("CC", "cc"))


def build(folder: Path, flags: Sequence[str] = ()) -> Doubles:
    """Builds below `folder`, or finds what was built there from the same sources with the same
    compiler and flags (such as ["-fsanitize=thread"]; the program that loads a library with a
    sanitizer must be built with it too).

    Raises subprocess.CalledProcessError; the compiler has said why on stderr.
    """
    folders = ("cuda", "cudart", "nvml")
    sources = [*(f for name in folders for f in HERE.glob(f"{name}/*")), *INCLUDE.glob("*.h")]
    shared = [f"-I{HERE / 'cuda'}", *(str(HERE / "cuda" / f) for f in NVML_TOO)]

    def make(part: Path) -> None:
        _library(part, "libcuda.so.1", HERE / "cuda", "libcuda.map", flags)
        nvml = HERE / "nvml"
        _library(part, "libnvidia-ml.so.1", nvml, "libnvidia-ml.map", [*flags, *shared])
        for version in (13, 12):
            soname = f"libcudart.so.{version}"
            defines = [f"-DCUDART_MAJOR={version}"]
            _library(part, soname, HERE / "cudart", f"{soname}.map", [*flags, *defines])

    return Doubles(kept(folder, "doubles", sources, tuple(flags), make), tuple(flags))


def kept(
    folder: Path, name: str, sources: Iterable[Path], key: object, make: Callable[[Path], None]
) -> Path:
    """A folder below `folder` that `make` has filled, now or earlier from the same sources, with
    the same compiler and the same key. Whoever comes while it is being filled waits."""
    digest = hashlib.sha256(repr((compiler(), CFLAGS, key)).encode())
    for source in sorted(sources):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    made = folder / f"{name}-{digest.hexdigest()[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f".{made.name}.lock", "w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        if not made.exists():
            part = made.with_suffix(".part")
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            make(part)
            part.rename(made)
    return made


def _library(folder: Path, soname: str, sources: Path, symbols: str, flags: Sequence[str]) -> None:
    subprocess.run(
        [
            *compiler(),
            *CFLAGS,
            *flags,
            "-fPIC",
            "-shared",
            f"-I{INCLUDE}",
            f"-I{sources}",
            f"-Wl,-soname,{soname}",
            f"-Wl,--version-script={sources / symbols}",
            "-Wl,-Bsymbolic",
            "-o",
            str(folder / soname),
            *map(str, sorted(sources.glob("*.c"))),
            "-ldl",
        ],
        check=True,
    )


def program(
    source: Path, target: Path, libraries: Sequence[Path], flags: Sequence[str] = ()
) -> Path:
    """Compiles one C program against our declarations and links it with `libraries`, the doubles'
    or the real ones."""
    subprocess.run(
        [
            *compiler(),
            *CFLAGS,
            *flags,
            f"-I{INCLUDE}",
            "-o",
            str(target),
            str(source),
            *map(str, libraries),
            "-ldl",
        ],
        check=True,
    )
    return target
