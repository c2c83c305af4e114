# SPDX-License-Identifier: Apache-2.0
"""Every function of NCCL that is given a communicator or a window is stood in front of: the real
one could do nothing with a handle of ours but crash."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import NamedTuple

from checkout import INTERPOSER, SUPPORT

from liveshift.interposer.elf import shared_library
from liveshift.interposer.library import library_path

REAL = INTERPOSER / "nccl/nccl_real.h"


class Export(NamedTuple):
    name: str
    since: str
    takes: str
    until: str = ""


def exports() -> list[Export]:
    lines = (SUPPORT / "gpu" / "nccl_adapter" / "exports.txt").read_text().splitlines()
    return [Export(*line.split()) for line in lines if not line.startswith("#")]


def ours() -> set[str]:
    done = subprocess.run(
        ["nm", "-D", "--defined-only", library_path()], check=True, capture_output=True, text=True
    )
    return set(re.findall(r" T (nccl\w+)$", done.stdout, re.MULTILINE))


def test_whatever_takes_a_handle_passes_here() -> None:
    taking = {export.name for export in exports() if export.takes != "-"}
    assert len(taking) == 73
    assert taking == ours()


def test_those_that_are_left_alone_take_neither() -> None:
    """Named one by one: who adds one has looked at its parameters."""
    left = {export.name for export in exports() if export.takes == "-"}
    params = {name for name in left if name.startswith("ncclParam")}
    assert left - params == {
        "ncclGetErrorString",
        "ncclGetUniqueId",
        "ncclGetVersion",
        "ncclGinInboxA2ACreateRequirement",
        "ncclGinOutboxCreateRequirement",
        "ncclLLA2ACalcSlots",
        "ncclLLA2ACreateRequirement",
        "ncclLsaBarrierCreateRequirement",
        "ncclResetDebugInit",
        "ncclResetDebugInitInternal",
    }


def test_the_real_ones_are_known_by_the_same_names() -> None:
    text = REAL.read_text()
    lists = text[text.index("#define NCCL_REAL_FUNCTIONS") : text.index("enum nccl_function")]
    known = {f"nccl{name}" for name in re.findall(r"\bX\((\w+)[,)]", lists)}
    assert ours() <= known
    assert known - ours() == {"ncclGetUniqueId"}  # called, and not stood in front of


def test_an_installed_nccl_exports_nothing_new() -> None:
    """requirements-test.lock has it; without it this test fails."""
    import nvidia.nccl

    path = Path(nvidia.nccl.__path__[0]) / "lib" / "libnccl.so.2"
    names = {export.name for export in exports()}
    done = subprocess.run(["nm", "-D", "--defined-only", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert set(re.findall(r" (nccl\w+)$", done.stdout, re.MULTILINE)) <= names
    with shared_library(path) as library:
        for name in ours():
            if library.address_of(name) is not None:
                assert library.address_of(f"p{name}") is not None, name
