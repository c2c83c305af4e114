# SPDX-License-Identifier: Apache-2.0
"""A copy of the checkout and of the installed package in which one file is another.

Tests run there import that package, and compile that interposer. What is edited in the checkout
meanwhile does not show; files of the package are hard links, as setup never writes into one.
"""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

_found = importlib.util.find_spec("liveshift")
assert _found is not None
assert _found.origin is not None
INSTALLED = Path(_found.origin).parent
ROOT = Path(__file__).resolve().parents[2]
_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(
    ["pytest", "hypothesis", "_hypothesis_pytestplugin", "msgspec", "zmq"]
)
PARTS = ("tests", "integration", "interposer", "examples", "pyproject.toml", "meson.build")


class Shadow:
    """One worker's; ``place`` has to be on the file system of the checkout."""

    def __init__(self, place: Path) -> None:
        self.place = Path(tempfile.mkdtemp(dir=place))
        leave = shutil.ignore_patterns("__pycache__", "*.pyc")
        for part in PARTS:
            source, target = ROOT / part, self.place / part
            if source.is_dir():
                shutil.copytree(source, target, ignore=leave)
            else:
                shutil.copy2(source, target)
        shutil.copytree(INSTALLED, self.place / "site/liveshift", ignore=leave, copy_function=_link)

    def close(self) -> None:
        shutil.rmtree(self.place)

    def put(self, file: str, text: str) -> None:
        """Exchange a file of the package: a new one, for the old one is the checkout's too."""
        for target in (self.place / "site/liveshift" / file, self.place / file):
            if target.exists():
                target.unlink()
                target.write_text(text)

    def passes(self, tests: Sequence[str], timeout_s: float) -> bool | None:
        """Whether all of the tests do; None where they took longer."""
        run = _server.Process(target=_judge, args=(self.place, list(tests)))
        run.start()
        try:
            run.join(timeout_s)
            return run.exitcode == 0 if run.exitcode is not None else None
        finally:
            _kill_group(run.pid or 0)
            run.join()
            run.close()


def _judge(place: Path, tests: list[str]) -> None:
    """In a process of its own, which has pytest already but nothing of the package."""
    os.setsid()
    assert not [name for name in sys.modules if name.split(".")[0] == "liveshift"]
    os.chdir(place)
    os.environ |= {"PYTHONPATH": str(place / "site"), "PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True
    sys.path[:0] = [str(place / "site")]
    sys.argv = ["pytest"]
    silence = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(silence, fd)
    wanted = [f"tests/{test}" for test in tests]
    preloaded = "ignore::pytest.PytestAssertRewriteWarning"
    sys.exit(pytest.main(["-x", "-q", "-W", preloaded, "-m", "not lab and not long", *wanted]))


def _kill_group(leader: int) -> None:
    """What a mutant has left running."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, 9)


def _link(source: str | Path, target: str | Path) -> None:
    os.link(source, target)
