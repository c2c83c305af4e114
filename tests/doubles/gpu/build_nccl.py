# SPDX-License-Identifier: Apache-2.0
"""Compiles the simulated NCCL, as any version from 2.26 to 2.32."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from .build import CFLAGS, HERE, INCLUDE, compiler, kept

SOURCES = HERE / "nccl"
VERSIONS = (22604, 22703, 22803, 22807, 22907, 23004, 23203)
"""Those at which functions were added; what a version lacks is left out of its build."""

DEFAULT = 22907
"""2.29.7, of torch 2.13 with CUDA 13."""


def build_nccl(folder: Path, version: int = DEFAULT, flags: Sequence[str] = ()) -> Path:
    """The library of this version, built below `folder` or found there from the same sources,
    compiler and flags. It finds libcuda.so.1 by dlopen: put the simulated one on the library path.

    Raises subprocess.CalledProcessError; the compiler has said why on stderr.
    """
    sources = [*sorted(SOURCES.glob("*.[ch]")), SOURCES / "exports.map", INCLUDE / "nccl_abi.h"]

    def make(part: Path) -> None:
        _compile(part / "libnccl.so.2", version, flags)

    key = (version, tuple(flags))
    return kept(folder, f"nccl-{version}", sources, key, make) / "libnccl.so.2"


def _compile(target: Path, version: int, flags: Sequence[str]) -> None:
    subprocess.run(
        [
            *compiler(),
            *CFLAGS,
            *flags,
            "-fPIC",
            "-shared",
            "-fvisibility=hidden",
            f"-DSIMNCCL_VERSION={version}",
            f"-I{INCLUDE}",
            "-Wl,-soname,libnccl.so.2",
            f"-Wl,--version-script={SOURCES / 'exports.map'}",
            "-o",
            str(target),
            *map(str, sorted(SOURCES.glob("*.c"))),
            "-ldl",
            "-lm",
        ],
        check=True,
    )
