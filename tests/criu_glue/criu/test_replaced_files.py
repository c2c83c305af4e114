# SPDX-License-Identifier: Apache-2.0
"""Ranks go on with the libraries and the program that an upgrade has replaced, or removed.

Files of root's, in directories of root's, as pip and apt install them; the capsule is a user's.
"""

from __future__ import annotations

import ctypes
import shutil
import sys
from pathlib import Path

import pytest
from captured import PYTHON, ROOT_PID, Sink, sink
from one_sandbox import said
from sandbox_trees import COUNTER, SandboxMaker, count, criu, goes_on, moved, new_sandboxes, place
from waits import until

from liveshift.criu_glue.capsule import output
from liveshift.criu_glue.capsule.mounts import Placement
from liveshift.criu_glue.capsule.sandboxes import Sandbox
from liveshift.criu_glue.capsule.tree import tasks
from liveshift.criu_glue.criu.tool import Criu
from liveshift.criu_glue.survey.survey import survey
from liveshift.interposer.library import library_path

__all__ = ["criu", "new_sandboxes", "place", "sink"]

USING = """
import ctypes, mmap, os, sys, time, threading
last_page = mmap.mmap(os.open("{data}", os.O_RDONLY), 0, mmap.MAP_SHARED, mmap.PROT_READ)
opened = open("{data}", "rb")
libm = ctypes.CDLL("{libm}"); libm.cos.restype = ctypes.c_double
libm.cos.argtypes = libm.exp.argtypes = [ctypes.c_double]; libm.exp.restype = ctypes.c_double
"""
USED = COUNTER.replace(
    "    os.write(1",
    "    assert libm.cos(0.0) == 1.0 and (n % 200 or libm.exp(0.0) == 1.0)\n"
    "    assert last_page[-1:] == b'!' and os.pread(opened.fileno(), 3, 0) == b'old'\n"
    "    os.write(1",
)


def mapped(stands: Sandbox) -> set[str]:
    """Paths of what its only task has mapped, as far as their names are gone."""
    (task,) = tasks(stands)
    lines = Path(f"/proc/{task.pid}/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if line.endswith(" (deleted)")}


def in_tmp(stands: Sandbox) -> set[str]:
    """What its /tmp holds; a checkout below /tmp is mounted there, too."""
    return {path.name for path in (stands.root / "tmp").iterdir()}


def libm() -> Path:
    assert ctypes.CDLL("libm.so.6")
    lines = Path("/proc/self/maps").read_text().splitlines()
    return Path(next(line.split()[-1] for line in lines if line.endswith("/libm.so.6")))


@pytest.mark.parametrize("uid", [64001, 0])
@pytest.mark.parametrize("upgrade", ["replaced", "removed"])
@pytest.mark.root
def test_a_tree_moves_after_its_libraries_and_its_program_were(
    criu: Criu, new_sandboxes: SandboxMaker, place: Path, sink: Sink, upgrade: str, uid: int
) -> None:
    installed = place.parent / "installed"
    installed.mkdir()
    names: dict[str, str | Path] = {
        "liveshift_interposer.so": library_path(),
        "libm.so.6": libm(),
        "python": PYTHON,
    }
    for name, source in names.items():
        shutil.copy(source, installed / name)
    (installed / "data").write_bytes(b"old" + bytes(20000) + b"!")
    program = USING.format(data=installed / "data", libm=installed / "libm.so.6") + USED
    preload = f"LD_PRELOAD={installed}/liveshift_interposer.so"
    here = new_sandboxes.run(
        [
            "env",
            preload,
            f"PYTHONHOME={sys.base_prefix}",
            str(installed / "python"),
            "-Sc",
            program,
        ],
        uid,
    )
    until(lambda: count(here) > 3 or not here.alive())
    used, own = [*names, "data"], in_tmp(here)
    assert "kept" in own
    assert not own & set(used)
    size = sum((installed / name).stat().st_size for name in used)
    assert survey(here, ROOT_PID, Placement((), ())).nameless < 1 << 20
    if upgrade == "removed":
        shutil.rmtree(installed)
    else:
        for name in used:
            (installed / "new").write_bytes(b"another version")
            (installed / "new").rename(installed / name)
    assert {f"{installed}/{name} (deleted)" for name in used} <= mapped(here)
    looked = survey(here, ROOT_PID, Placement((), ()))
    assert looked.problems == ()
    assert size <= looked.nameless < size + (1 << 20)  # each once, and COUNTER's own small one
    for _ in range(2):
        there = new_sandboxes.empty(uid)
        moved(criu, here, there, place, sink)
        assert goes_on(there), said(there, output.STDERR)
        assert {f"/tmp/{name} (deleted)" for name in used} <= mapped(there)
        assert in_tmp(there) == own, "nothing of those files is left there"
        assert installed.exists() == (upgrade == "replaced")
        assert not installed.exists() or {
            (path.name, path.read_bytes()) for path in installed.iterdir()
        } == {(name, b"another version") for name in used}
        here = there
    assert said(here, output.STDERR) == ""
    lines = [int(n) for n in said(here).split()]
    assert lines == list(range(len(lines)))  # none lost, none doubled
