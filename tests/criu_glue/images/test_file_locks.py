# SPDX-License-Identifier: Apache-2.0
"""File locks: which of them stand in the way of a move, and that no restore waits for one."""

from __future__ import annotations

import fcntl
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from captured import PYTHON, ROOT_PID, Sink, numbers, sink
from one_sandbox import Start, netns, plan, said, start
from sandbox_trees import COUNTER, SandboxMaker, criu, dumped, goes_on, new_sandboxes, place
from waits import until

from liveshift.criu_glue.capsule.mounts import Placement
from liveshift.criu_glue.criu.restore import RestoringTree
from liveshift.criu_glue.criu.tool import Criu
from liveshift.criu_glue.files.rights import User
from liveshift.criu_glue.images import file_locks, image_check
from liveshift.criu_glue.images.file_locks import FileLock, parse
from liveshift.criu_glue.survey.survey import changing, survey
from liveshift.errors import StepFailed

__all__ = ["criu", "netns", "new_sandboxes", "place", "plan", "sink", "start"]

TAKE = """
import fcntl, os, struct, time
def take(path, kind, mode, start=0, length=0):
    fd = os.open(path, os.O_RDWR if mode == "ex" else os.O_RDONLY)
    of = fcntl.F_WRLCK if mode == "ex" else fcntl.F_RDLCK
    if kind == "flock": fcntl.flock(fd, fcntl.LOCK_EX if mode == "ex" else fcntl.LOCK_SH)
    elif kind == "lease": fcntl.fcntl(fd, fcntl.F_SETLEASE, of)
    else:
        how = fcntl.F_SETLK if kind == "posix" else 37
        fcntl.fcntl(fd, how, struct.pack("hhqqi4x", of, 0, start, length, 0))
    return fd
"""
EXCLUSIVE = [
    ("flock", "ex", "an exclusive flock(2) lock"),
    ("posix", "ex", "an exclusive fcntl(2) lock"),
    ("ofd", "ex", "an exclusive fcntl(2) lock (OFD)"),
    ("lease", "sh", "a lease"),
    ("lease", "ex", "a lease"),
]
SHARED = [("flock", "sh"), ("posix", "sh"), ("ofd", "sh")]


@pytest.fixture
def files() -> Iterator[Path]:
    path = Path(f"/var/tmp/ls-test-locks-{os.getpid()}-{next(numbers)}")
    path.mkdir()
    for name in ("one", "two"):
        (path / name).write_text("0123456789")
    yield path
    for file in path.iterdir():
        file.unlink()
    path.rmdir()


@pytest.mark.parametrize(("kind", "mode", "words"), EXCLUSIVE)
@pytest.mark.root
def test_what_keeps_others_out_of_a_shared_file_stands_in_the_way(
    start: Start, files: Path, kind: str, mode: str, words: str
) -> None:
    program = f"{TAKE}a = take('{files}/one', '{kind}', '{mode}'); os.write(1, b'ready\\n')\n"
    program += "if not os.fork(): os.close(a); time.sleep(60)\ntime.sleep(60)"
    stands = start(PYTHON, "-Sc", program)
    until(lambda: "ready" in said(stands))
    shared = Placement((str(files),), ())
    ((text, remedy),) = survey(stands, ROOT_PID, shared).problems
    assert text.startswith(f"process {ROOT_PID} (")
    assert text.endswith(f"holds {words} on {files}/one, which no other host can take over")
    assert "release it" in remedy
    assert changing(stands, shared).passing == ((text, remedy),)
    for placement in (Placement((), (str(files),)), Placement((), ())):
        assert survey(stands, ROOT_PID, placement).problems == ()
        assert changing(stands, placement).passing == ()


@pytest.mark.parametrize(("kind", "mode"), SHARED)
@pytest.mark.root
def test_shared_locks_do_not(start: Start, files: Path, kind: str, mode: str) -> None:
    program = f"{TAKE}a = take('{files}/one', '{kind}', '{mode}'); os.write(1, b'ready\\n')\n"
    stands = start(PYTHON, "-Sc", program + "time.sleep(60)")
    until(lambda: "ready" in said(stands))
    shared = Placement((str(files),), ())
    assert survey(stands, ROOT_PID, shared).problems == ()
    assert changing(stands, shared).passing == ()


@pytest.mark.root
def test_locks_that_are_held_for_moments_only_do_not(start: Start, files: Path) -> None:
    program = f"""{TAKE}
while True:
    a = take('{files}/one', 'flock', 'ex'); os.write(1, b'ready\\n'); time.sleep(0.15)
    os.close(a); time.sleep(0.15)
"""
    stands = start(PYTHON, "-Sc", program)
    until(lambda: "ready" in said(stands))
    shared, seen = Placement((str(files),), ()), 0
    for _ in range(100):
        seen += len(changing(stands, shared).passing)
        assert survey(stands, ROOT_PID, shared).problems == ()
        if seen >= 3:
            break
        time.sleep(0.07)
    assert seen >= 3, "it does hold one at times"


@pytest.mark.root
def test_a_program_that_always_holds_some_lock_stands_in_the_way(start: Start, files: Path) -> None:
    """It never holds the same one for long, but there is no moment without. The newest lock that a
    look lists is held for a tenth of a second more: a busy machine may stop a look before it reads
    what is locked."""
    program = f"""{TAKE}
n, held = 0, -1
while True:
    n += 1
    new = take('{files}/' + ('one', 'two')[n % 2], 'ofd', 'ex', n % 7, 1)
    time.sleep(0.1)
    if held >= 0: os.close(held)
    held = new
    os.write(1, b'ready\\n'); time.sleep(0.04)
"""
    stands = start(PYTHON, "-Sc", program)
    until(lambda: "ready" in said(stands))
    problems = survey(stands, ROOT_PID, Placement((str(files),), ())).problems
    assert len(problems) in (1, 2)
    for text, remedy in problems:
        assert "holds an exclusive fcntl(2) lock (OFD) on" in text
        assert remedy == file_locks.REMEDY


@pytest.mark.root
def test_a_tree_with_shared_locks_goes_over_while_its_source_holds_them(
    criu: Criu, new_sandboxes: SandboxMaker, place: Path, sink: Sink, files: Path
) -> None:
    taken = [f"take('{files}/{n}', '{k}', 'sh')" for n in ("one", "two") for k, _ in SHARED]
    taken += [f"take('/dev/shm/shared', '{kind}', 'ex')" for kind in ("flock", "posix")]
    counter = COUNTER.replace("last =", f"held = [{', '.join(taken)}]\nlast =", 1)
    here, there = new_sandboxes.counting(TAKE + counter), new_sandboxes.empty()
    left = dumped(criu, here, there, place, sink)
    began = time.monotonic()
    image_check.prepare(left.images, User(0, 0), there.root)
    tree = RestoringTree(there, left.images)
    tree.bring_up(criu, left.pipes, 60)
    assert time.monotonic() - began < 10
    left.end()  # now only the destination holds them
    tree.let_run(60)
    assert goes_on(there)
    for name in ("one", "two"):
        for take in (_flock, _posix):
            with (files / name).open("r+") as file, pytest.raises(BlockingIOError):
                take(file.fileno())


def _flock(fd: int) -> None:
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _posix(fd: int) -> None:
    fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize("kind", ["flock", "posix", "ofd"])
@pytest.mark.root
def test_a_restore_does_not_wait_for_a_lock(
    criu: Criu, new_sandboxes: SandboxMaker, place: Path, sink: Sink, files: Path, kind: str
) -> None:
    """Of its own source, or of anybody; it is tried once the lock is free."""
    taken = f"held = take('{files}/one', '{kind}', 'ex', 3, 4)\nlast ="
    here, there = (
        new_sandboxes.counting(TAKE + COUNTER.replace("last =", taken, 1)),
        new_sandboxes.empty(),
    )
    left = dumped(criu, here, there, place, sink)
    words = rf"a task has an exclusive .* on {files}/one, and another process has locked it here"
    with pytest.raises(StepFailed, match=words):
        image_check.prepare(left.images, User(0, 0), there.root)
    left.end()
    with (files / "one").open("r+") as other:
        fcntl.fcntl(other, 37, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 3, 0))  # beside it
        image_check.prepare(left.images, User(0, 0), there.root)
        tree = RestoringTree(there, left.images)
        tree.bring_up(criu, left.pipes, 60)
        tree.let_run(60)
        assert goes_on(there)


def test_locks_as_the_kernel_tells_of_them() -> None:
    text = """1: POSIX  ADVISORY  READ 11782 fe:00:2009883 128 128
2: FLOCK  ADVISORY  WRITE 11782 fe:00:2009879 0 EOF
2: -> FLOCK  ADVISORY  WRITE 20791 fe:00:2009879 0 EOF
lock:\t6: OFDLCK ADVISORY  WRITE -1 fe:00:15343617 100 119
9: LEASE  BREAKING  READ 77 00:2f:5 0 EOF
flags:\t02100002
7: DELEG  ACTIVE    READ 77 00:2f:5 0 EOF
"""
    found = list(parse(text))
    assert [(lock.kind, lock.exclusive, lock.inode) for lock in found] == [
        ("POSIX", False, 2009883),
        ("FLOCK", True, 2009879),
        ("OFDLCK", True, 15343617),
        ("LEASE", False, 5),
    ]
    assert (found[2].start, found[2].end, found[2].device) == (100, 119, "fe:00")


@pytest.mark.parametrize(
    ("one", "other", "both"),
    [
        (("FLOCK", True, 0, 9), ("FLOCK", False, 0, 9), True),
        (("FLOCK", False, 0, 9), ("FLOCK", False, 0, 9), False),
        (("FLOCK", True, 0, 9), ("POSIX", True, 0, 9), False),
        (("OFDLCK", True, 0, 9), ("POSIX", False, 9, 12), True),
        (("POSIX", True, 0, 9), ("POSIX", True, 10, 12), False),
        (("LEASE", False, 0, 9), ("LEASE", False, 0, 9), True),
    ],
)
def test_which_locks_exclude_each_other(
    one: tuple[str, bool, int, int], other: tuple[str, bool, int, int], both: bool
) -> None:
    a, b = FileLock(*one, "fe:00", 5), FileLock(*other, "fe:00", 5)
    assert a.conflicts(b) is b.conflicts(a) is both
    assert not a.conflicts(FileLock(*other, "fe:00", 6))


def test_only_what_is_there_at_every_look_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_locks, "LOOK_S", 0.001)
    lock = FileLock("FLOCK", True, 0, 9)
    locks = [file_locks.words("process 7 (x)", lock, path) for path in "abc"]
    looks = iter([locks, locks[:2], locks[1:], *[locks[1:]] * (file_locks.LOOKS - 3)])
    assert file_locks.lasting(locks, lambda: next(looks)) == [locks[1]]
    assert not [*looks], "it has looked as often as it says"
    assert file_locks.lasting([], lambda: locks) == []
    looks = iter([locks[:1], locks[1:2]] * file_locks.LOOKS)
    assert file_locks.lasting(locks[2:], lambda: next(looks)) == locks[1:2], "one at every look"
    looks = iter([locks[:1], locks[1:2], [], locks])
    assert file_locks.lasting(locks[2:], lambda: next(looks)) == [], "a moment without one"
    assert len([*looks]) == 1
