# SPDX-License-Identifier: Apache-2.0
"""Trying the interposer in one world: what must be there, running it, comparing the pages."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import liveshift
from liveshift.interposer import page, page_directory
from liveshift.interposer.library import library_path

from .worlds import World

HERE = Path(__file__).resolve().parent
HEADERS = HERE.parent.parent / "interposer"
DEADLINE_S = 300.0


@dataclass
class Result:
    """What one world showed."""

    world: str
    python: str = ""
    libc: str = ""
    hooks: int = 0
    pthread_create: str = ""
    """The library that has it."""
    torch: str = ""
    """Version of the torch that trained, or why none did."""
    torch_trained: bool = False
    identified: bool = False
    """Whether the ranks agreed on who their communicators are, so that they can be quiesced."""
    problems: list[str] = field(default_factory=list)

    def as_data(self) -> dict[str, Any]:
        return asdict(self)


def build(folder: Path) -> None:
    """The libraries and programs that a trial needs, into ``folder``."""
    cc = [
        *os.environ.get("CC", "cc").split(),
        "-std=gnu11",
        "-D_GNU_SOURCE",
        "-O1",
        "-shared",
        "-fPIC",
        f"-I{HEADERS}",
    ]
    subprocess.run(
        [
            *cc,
            "-nostdlib",
            "-Wl,-soname,libtorch_cpu.so",
            "-o",
            folder / "libtorch_cpu.so",
            HERE / "double.c",
        ],
        check=True,
    )
    subprocess.run(
        [
            *cc,
            "-o",
            folder / "lookups.so",
            HERE / "lookups.c",
            HEADERS / "hooks/elf_lookup.c",
            HEADERS / "gate/thread.c",
        ],
        check=True,
    )
    for file in (library_path(), HERE / "probe.py", HERE / "torch_probe.py"):
        shutil.copy(file, folder)


def attempt(world: World, built: Path) -> Result:
    """Everything in one world; problems are in the result, not raised."""
    result = Result(world.name)
    with _settled(world, built) as (outside, inside):
        try:
            _hooks(world, outside, inside, result)
            _training(world, outside, inside, result)
        except (AssertionError, page.PageError, ValueError) as error:
            result.problems.append(str(error))
        except subprocess.TimeoutExpired:
            result.problems.append(f"not done after {DEADLINE_S:.0f} s")
    return result


@contextmanager
def _settled(world: World, built: Path) -> Iterator[tuple[Path, str]]:
    """A copy of what was built inside the world: its path from outside and from inside."""
    if world.root:
        (world.root / "tmp").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=world.root / "tmp" if world.root else None) as name:
        outside = Path(name)
        shutil.copytree(built, outside, dirs_exist_ok=True)
        yield outside, str(Path("/") / outside.relative_to(world.root or "/"))


def _clean_environment(world: World, **more: str) -> dict[str, str]:
    """Python's warnings are about its own future; the double's threads and forks are meant."""
    return {
        "PATH": os.environ.get("PATH", ""),
        "PYTHONPATH": world.path,
        "PYTHONWARNINGS": "ignore",
        "LC_ALL": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
    } | more


def _hooks(world: World, outside: Path, inside: str, result: Result) -> None:
    (outside / "pages").mkdir()
    done = subprocess.run(
        world.argv(f"{inside}/probe.py", inside),
        env=_clean_environment(world),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, _last(done.stderr) or f"probe.py ended with {done.returncode}"
    assert not done.stderr, done.stderr
    seen = json.loads(done.stdout)
    result.python, result.libc, result.hooks = seen["python"], seen["libc"], seen["hooks"]
    result.pthread_create = seen["pthread_create"]
    assert seen["version"] == liveshift.__version__
    pages = {each.pid: each for each in page_directory.pages(outside / "pages")}
    expected = {seen["pid"]: seen["hooks"] + 4000, seen["child"]: 2, seen["execed"]: 1}
    counted = {pid: sum(each.begun.values()) for pid, each in pages.items()}
    assert counted == expected, f"pages count {counted}, expected {expected}"
    assert all(each.started == each.finished for each in pages.values())


def _training(world: World, outside: Path, inside: str, result: Result) -> None:
    """Two ranks, with and without the interposer: same parameters, every all-reduce counted."""
    told = {}
    for name, preload in (("without", ""), ("with", f"{inside}/liveshift_interposer.so")):
        (outside / f"pages-{name}").mkdir()
        program = (f"{inside}/torch_probe.py", f"{inside}/store-{name}")
        ranks = [
            subprocess.Popen(
                _preloading(world, preload, *program),
                env=_clean_environment(
                    world,
                    RANK=str(rank),
                    WORLD_SIZE="2",
                    GLOO_SOCKET_IFNAME="lo",
                    LIVESHIFT_PAGES=f"{inside}/pages-{name}",
                ),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            ends = [rank.communicate(timeout=DEADLINE_S) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        for rank, (_, err) in zip(ranks, ends, strict=True):
            assert rank.returncode == 0, f"torch {name} the interposer: {_last(err)}"
        told[name] = [json.loads(out.splitlines()[-1]) for out, _ in ends]  # gloo prints as well
        if told[name][0]["torch"] is None:
            result.torch = f"none: {told[name][0]['why']}"
            return
    result.torch = told["with"][0]["torch"]
    everyones = {rank["parameters"] for ranks in told.values() for rank in ranks}
    assert len(everyones) == 1, "parameters differ with and without the interposer"
    assert not list((outside / "pages-without").iterdir())
    pages = {each.pid: each for each in page_directory.pages(outside / "pages-with")}
    unidentified = []
    for rank in told["with"]:
        seen = pages[rank["pid"]]
        assert seen.begun["gloo.allreduce"] >= rank["steps"], seen.begun
        assert seen.started == seen.finished
        with page.opened(outside / "pages-with" / str(rank["pid"])) as file:
            unidentified.append(file.answer()["unidentified"])
    result.torch_trained, result.identified = True, not any(unidentified)


def _preloading(world: World, preload: str, *arguments: str) -> list[str]:
    """The variable must be the world's: this machine's own programs don't see the world's files."""
    program = (
        "import os, sys; os.environ['LD_PRELOAD'] = sys.argv[1]; os.execv(sys.executable, "
        "[sys.executable, *sys.argv[2:]])"
    )
    return world.argv("-c", program, preload, *arguments)


def _last(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1] if lines else ""
