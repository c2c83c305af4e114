# SPDX-License-Identifier: Apache-2.0
"""The pages of a capsule's living processes are found, and no others, with real processes."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from page_bytes import page_bytes

from liveshift import proc_text
from liveshift.criu_glue.capsule import sandboxes
from liveshift.criu_glue.capsule.tree import tasks
from liveshift.interposer import layout
from liveshift.interposer.library import library_path
from liveshift.interposer.page import PageError
from liveshift.runtime.agent.host import mapped_pages
from liveshift.runtime.agent.host.finished_operations import pages_of
from liveshift.runtime.agent.host.rank_deaths import RankEnd
from liveshift.runtime.agent.host.rank_pages import ordered_pages
from liveshift.runtime.agent.host.running_capsule import RunningCapsule

RANK = """
import ctypes, mmap, platform, sys, threading
path, fate = sys.stdin.readline().split()
if fate != "stranger":
    with open(path, "r+b") as file:
        page = mmap.mmap(file.fileno(), 0)
print("mapped", flush=True)
if fate == "without-its-main-thread":
    threading.Thread(target=sys.stdin.readline).start()
    ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)  # exit(2)
sys.stdin.readline()
"""


class Capsule:
    """Its processes are children of this one; its pages lie on a tmpfs, as in a sandbox."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.pages = root / sandboxes.PAGES.lstrip("/")
        self.pages.mkdir(parents=True)
        self.processes: list[subprocess.Popen[str]] = []
        self.errors: dict[str, str] = {}

    def start(self, fate: str = "rank", raw: bytes | None = None, pid: int = 0) -> int:
        """A process with a file of its pid, which it maps unless it is a stranger to that file."""
        process = subprocess.Popen(
            [sys.executable, "-c", RANK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.processes.append(process)
        path = self.pages / str(process.pid)
        path.write_bytes(page_bytes(pid=pid or process.pid) if raw is None else raw)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{path} {fate}\n")
        process.stdin.flush()
        assert process.stdout.readline() == "mapped\n"
        return process.pid

    def found(self) -> list[int]:
        sandbox = SimpleNamespace(root=self.root, init=os.getpid())
        resident: Any = SimpleNamespace(sandbox=sandbox)
        seen = []
        for page, pid in ordered_pages(resident, on_error=self._note):
            assert page.pid == pid
            seen.append(pid)
            page.close()
        return seen

    def _note(self, path: Path, error: PageError) -> None:
        self.errors[path.name] = error.message


@pytest.fixture
def capsule() -> Iterator[Capsule]:
    root = Path(tempfile.mkdtemp(dir="/dev/shm"))
    made = Capsule(root)
    yield made
    for process in made.processes:
        process.kill()
        process.communicate()
    shutil.rmtree(root)


def test_files_of_ended_processes_hide_no_living_rank(
    capsule: Capsule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not even listed, however many there are: a list would need an end."""
    rank = capsule.start()
    listed: list[Any] = []
    real = os.listdir

    def listdir(path: Any = ".") -> list[str]:
        listed.append(path)
        return real(path)

    monkeypatch.setattr(os, "listdir", listdir)
    assert capsule.found() == [rank]
    assert not [path for path in listed if not os.fsdecode(path).startswith("/proc")]


def test_the_page_of_an_ended_rank_is_not_that_of_a_stranger_with_its_pid(
    capsule: Capsule,
) -> None:
    capsule.start("stranger")
    rank = capsule.start()
    assert capsule.found() == [rank]
    assert not capsule.errors


@pytest.mark.parametrize("fate", ["rank", "stranger"])
def test_the_end_of_a_stranger_is_not_that_of_the_rank_whose_pid_it_has(
    capsule: Capsule, fate: str
) -> None:
    pid = capsule.start(fate)
    sandbox: Any = SimpleNamespace(root=capsule.root, init=os.getpid())
    resident = RunningCapsule(cast(Any, None), 1, cast(Any, None), sandbox)
    resident.exit_code = lambda: None  # type: ignore[method-assign]

    async def story() -> None:
        seen = pages_of(sandbox, tasks(sandbox))
        assert [page.finished for page in seen] == [8]
        gc.collect()  # it would close what earlier tests of this process have left
        before = len(os.listdir("/proc/self/fd"))
        resident.deaths.find([pid], seen, resident._open_page)
        resident.deaths.follow()
        os.kill(pid, signal.SIGKILL)
        if fate == "stranger":
            assert len(os.listdir("/proc/self/fd")) == before
        async with asyncio.timeout(20):
            while fate == "rank" and resident.deaths.first is None:
                await asyncio.sleep(0.01)

    asyncio.run(story())
    assert resident.deaths.first == (RankEnd(signal.SIGKILL, 8) if fate == "rank" else None)


def test_a_rank_whose_main_thread_has_exited_is_found(capsule: Capsule) -> None:
    rank = capsule.start("without-its-main-thread")
    while proc_text.read(f"/proc/{rank}/stat").rpartition(")")[2].split()[0] != "Z":
        pass
    assert not mapped_pages._mappings(f"/proc/{rank}/maps"), "the kernel says nothing there"
    assert capsule.found() == [rank]


def test_a_living_ranks_page_that_cannot_be_used_is_named(capsule: Capsule) -> None:
    """No boundary could hold such a rank, so the attempt must learn of it."""
    other = capsule.start(pid=1)
    short = capsule.start(raw=bytes(layout.HEADER_SIZE))
    assert capsule.found() == []
    assert "it is the page of process 1" in capsule.errors[str(other)]
    assert "begins with" in capsule.errors[str(short)]


def test_where_it_cannot_be_said_whether_a_page_is_mapped_no_rank_is_left_out(
    capsule: Capsule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the agent has no descriptor left."""
    rank = capsule.start()
    real = proc_text.read

    def read(path: Any) -> str:
        if str(path).endswith("/maps"):
            raise OSError(24, "Too many open files")
        return real(path)

    monkeypatch.setattr(proc_text, "read", read)
    assert capsule.found() == []
    assert "Too many open files" in capsule.errors[str(rank)]


FORKS = """
import os, sys, torch, torch.distributed as dist
def collective(store):
    dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{store}")
    dist.barrier()
    dist.destroy_process_group()
collective(sys.argv[1] + "/parent")
child = os.fork()
if child:
    os.waitpid(child, 0)
    os._exit(0)
print("forked", flush=True)
sys.stdin.readline()
collective(sys.argv[1] + "/child")
print("has a page", flush=True)
sys.stdin.readline()
os._exit(0)
"""


def test_a_rank_of_torch_and_its_forked_child_are_found(capsule: Capsule, tmp_path: Path) -> None:
    """A child has a copy of its parent's mappings until it begins, and makes a page of its own."""
    with subprocess.Popen(
        [sys.executable, "-c", FORKS, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "LD_PRELOAD": str(library_path()),
            "LIVESHIFT_PAGES": str(capsule.pages),
            "GLOO_SOCKET_IFNAME": "lo",
        },
    ) as rank:
        assert rank.stdin is not None
        assert rank.stdout is not None
        assert rank.stdout.readline() == "forked\n"
        assert capsule.found() == [rank.pid]
        rank.stdin.write("\n")
        rank.stdin.flush()
        assert rank.stdout.readline() == "has a page\n"
        child = int(proc_text.read(f"/proc/{rank.pid}/task/{rank.pid}/children"))
        assert sorted(capsule.found()) == sorted([rank.pid, child])
        rank.stdin.close()
        assert rank.wait(60) == 0
    assert capsule.found() == []
    assert not capsule.errors
