# SPDX-License-Identifier: Apache-2.0
"""Names in /proc are bytes that a job chooses: none of them may stop an agent."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkout import ROOT

from liveshift import proc_text
from liveshift.criu_glue.capsule.sandboxes import started
from liveshift.criu_glue.capsule.tree import inner_pid
from liveshift.criu_glue.criu.dead_tasks import DeadTasks
from liveshift.criu_glue.survey import gpu_tasks, lost_names, survey
from liveshift.cuda_snapshot import threads
from liveshift.runtime.agent.heartbeats import Heartbeats
from liveshift.runtime.agent.host.run_time import RunTime, ran_s

ODD = b"data-\xe5\x8a\xa0\xe8\xbd\x0b\xff"
"""Cut in the middle of a character, and with one at which str.splitlines would split."""
PROGRAM = f"""
import ctypes, mmap, os, sys, threading, time
name, path = {ODD!r}, os.fsencode(sys.argv[1]) + b"/caf\\xe9.bin"
with open(path, "w+b") as file:
    file.truncate(4096)
    memory = mmap.mmap(file.fileno(), 4096)
def odd():
    ctypes.CDLL(None).prctl(15, name)
    sys.stdout.write("named\\n"); sys.stdout.flush()
    time.sleep(600)
ctypes.CDLL(None).prctl(15, name)
threading.Thread(target=odd).start()
"""


@pytest.fixture
def odd(tmp_path: Path) -> Iterator[int]:
    """The pid of a process with an odd name, a thread with one, and a file with one mapped."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, tmp_path], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"named\n"
        try:
            yield process.pid
        finally:
            process.kill()


def test_a_name_is_kept_and_splits_no_line(odd: int) -> None:
    assert proc_text.read(f"/proc/{odd}/comm").encode("utf-8", "surrogateescape") == ODD + b"\n"
    first, *others = proc_text.lines(f"/proc/{odd}/status")
    assert first.encode("utf-8", "surrogateescape") == b"Name:\t" + ODD
    assert others[0].startswith("Umask:")
    with pytest.raises(FileNotFoundError):
        proc_text.read("/proc/0/status")


def test_the_file_of_an_ended_task_has_no_lines() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        assert proc_text.lines(f"/proc/{ended.pid}/maps") == []


@pytest.mark.parametrize(
    "look",
    [
        inner_pid,
        started,
        lambda pid: RunTime(lambda: (pid,)).progress() + ran_s([pid]),
        lambda pid: DeadTasks([pid]).waited_for(),
        lambda pid: (threads.tracer(pid), threads.name(pid), threads.stopped(pid)),
        lambda pid: gpu_tasks.look(pid, pid, "odd"),
        lost_names.nameless,
        lambda pid: survey._look_at_maps(pid, survey._Findings()),
    ],
    ids=["inner pid", "started", "run time", "dead", "threads", "gpus", "lost names", "maps"],
)
def test_whoever_reads_it_goes_on(odd: int, look: Callable[[int], object]) -> None:
    look(odd)


def test_nobody_reads_such_files_as_utf_8() -> None:
    """Each file of a process, as psutil's own readers do: bytes, or as names of files."""
    plain = re.compile(r"/proc/\{[^\n]*\.read_text\(\)|open\(f?\"/proc/\{[^\n\"]*\"\)")
    numbers_only = re.compile(r"/(children|syscall|smaps_rollup|ns/\w+|net/\{name\})\"")
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for folder in ("criu_glue", "cuda_snapshot", "interposer", "launcher", "runtime")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line in path.read_text().splitlines()
        if plain.search(line) and not numbers_only.search(line)
    ]
    assert found == [], "proc_text reads them"


def test_a_capsule_that_cannot_be_read_keeps_no_other_from_the_heartbeat() -> None:
    def broken(_: object) -> Any:
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")

    heartbeats: Any = Heartbeats.__new__(Heartbeats)
    heartbeats._gpus = SimpleNamespace(used_by=None)
    bad: Any = SimpleNamespace(spec=SimpleNamespace(name="odd/0"), state=broken)
    good: Any = SimpleNamespace(spec=SimpleNamespace(name="gpt/0"), state=lambda _: "fine")
    assert [heartbeats.state_of(each) for each in (bad, good)] == [None, "fine"]
