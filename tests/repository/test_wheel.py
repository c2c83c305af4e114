# SPDX-License-Identifier: Apache-2.0
"""`make wheel`: what a host installs that has no compiler."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkout import ROOT

pytestmark = pytest.mark.timeout(900)  # the first of them compiles the package

PROGRAM = """\
import os
from liveshift import __file__ as package
from liveshift.criu_glue.memory import engine
from liveshift.interposer import library
engine.load("")
found = library.library_path()
assert str(found).startswith(os.path.dirname(package)), found
os.environ["LD_PRELOAD"] = str(found)
os.execv("/bin/sh", ["sh", "-c", "grep -o liveshift_interposer.so /proc/self/maps | head -n 1"])
"""


KEPT = ROOT / "build" / "wheel"
LEFT_OUT = ("build", "dist", "__pycache__")
"""Besides what begins with a dot: caches, environments, and what people keep in a checkout."""


def files_of(folder: Path) -> Iterator[Path]:
    """Relative to the folder."""

    def of_a_build(name: str) -> bool:
        return not name.startswith(".") and name not in LEFT_OUT

    for at, folders, names in os.walk(folder):
        folders[:] = filter(of_a_build, folders)
        yield from (Path(at, name).relative_to(folder) for name in filter(of_a_build, names))


def bring_up_to_date(copy: Path) -> None:
    """Make ``copy`` like the checkout. Files that are alike stay as they are: a build compiles what
    is newer than its last one."""
    wanted = set(files_of(ROOT))
    for name in set(files_of(copy)) - wanted:
        (copy / name).unlink()
    for name in wanted:
        there = copy / name
        if not there.exists() or there.read_bytes() != (ROOT / name).read_bytes():
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, there)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the sources, as a build leaves files behind. The copy, and what is
    compiled from it, are kept for later runs."""
    dist = tmp_path_factory.mktemp("dist")
    KEPT.mkdir(parents=True, exist_ok=True)
    with open(KEPT / "lock", "w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        bring_up_to_date(KEPT / "source")
        command = [KEPT / "source/scripts/wheel.sh", dist, KEPT / "build"]
        environment = {**os.environ, "VENV": sys.prefix}
        subprocess.run(command, env=environment, check=True, cwd=dist.parent)
    (made,) = dist.iterdir()
    return made


def test_its_tag_asks_for_no_python_version_and_an_old_glibc(wheel: Path) -> None:
    tag = re.fullmatch(r"liveshift-.+-py3-none-manylinux_2_(\d+)_x86_64\.whl", wheel.name)
    assert tag is not None, wheel.name
    assert int(tag[1]) <= 34, "docs/operations.md promises glibc 2.34"


def test_it_installs_without_a_compiler_and_its_libraries_load(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python = environment / "bin/python"
    site = next(environment.glob("lib/python*/site-packages"))
    # What it depends on is this environment's; no compiler is on PATH.
    bare = {"PATH": str(environment / "bin"), "HOME": str(tmp_path)}
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-qq", "--no-deps"]
    subprocess.run([*pip, "--disable-pip-version-check", wheel], env=bare, check=True)
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    for name in ("criu_glue/capsule/capsule-init", "criu_glue/criu/criu-hook"):
        assert os.access(site / "liveshift" / name, os.X_OK), f"{name} cannot be executed"
    shown = subprocess.run(
        [environment / "bin/liveshift", "version"], env=bare, capture_output=True, text=True
    )
    assert shown.stdout.startswith("liveshift "), shown
    loaded = subprocess.run(
        [python, "-c", PROGRAM], env={**bare, "PATH": os.defpath}, capture_output=True, text=True
    )
    assert loaded.stdout == "liveshift_interposer.so\n", loaded
