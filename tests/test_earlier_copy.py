# SPDX-License-Identifier: Apache-2.0
"""What a tree has left behind on a host is there for its return, and for no longer than that."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest
import xxhash
from captured import until
from housed import Overlay, Resident, Room, Spec
from lazy_process import LazyProcess
from memory_subject import MANY, Subject, subject
from page_chunks import PAGE

from liveshift.criu_glue.memory import earlier_copy
from liveshift.criu_glue.memory.donors import Donors
from liveshift.criu_glue.memory.earlier_copy import EarlierCopy
from liveshift.errors import StepFailed
from liveshift.runtime import earlier_copies
from liveshift.runtime.earlier_copies import EarlierCopies
from liveshift.waiting import readable

GB = 1 << 30
BYTES = MANY * PAGE
MADV_GUARD_INSTALL = 102  # Linux 6.13

pytestmark = pytest.mark.root


def content(number: int) -> bytes:
    """Of the subject's pages."""
    return (number + 1).to_bytes(8, "little") * 512


def has(pid: int, *numbers: int) -> bool:
    """Whether these pages can be had of a process."""
    donors = Donors(GB)
    try:
        donors.add_process(pid)
        found = [donors.fetch(xxhash.xxh3_128_intdigest(content(n))) for n in numbers]
        assert all(page in (None, content(n)) for n, page in zip(numbers, found, strict=True))
        return None not in found
    finally:
        donors.close()


@pytest.fixture
def held() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def tree(held: ExitStack) -> Subject:
    return held.enter_context(subject())


def test_it_outlives_what_it_was_taken_from(tree: Subject, held: ExitStack) -> None:
    with tree.standing():
        copy = EarlierCopy([tree.pid], GB)
    held.callback(copy.close)
    os.kill(tree.pid, signal.SIGKILL)
    tree.process.wait()
    assert has(copy.pid, *range(MANY))
    assert BYTES < copy.bytes < BYTES + (64 << 20), "the subject's pages, and what Python needs"
    assert psutil.Process(copy.pid).memory_info().rss < copy.bytes + (8 << 20)
    assert copy.alive()
    copy.close()
    assert not copy.alive()
    assert not psutil.pid_exists(copy.pid)


def test_what_is_not_there_or_zero_takes_no_memory(held: ExitStack) -> None:
    process = LazyProcess(20_000)
    held.callback(process.end)
    process("[lazy.set(n, 10**9 + n) for n in range(100, 200)]")
    process("[lazy.set(n, 0) for n in range(300, 900)]")
    few = EarlierCopy([process.pid], GB)
    held.callback(few.close)
    process("[lazy.set(n, 10**9 + n) for n in range(1000, 3000)]")
    more = EarlierCopy([process.pid], GB)
    held.callback(more.close)
    assert 2000 * PAGE <= more.bytes - few.bytes < 2200 * PAGE


def test_of_several_processes_all_is_kept(tree: Subject, held: ExitStack) -> None:
    other = held.enter_context(subject())
    other.do(f"put(3, {MANY + 50})")
    copy = EarlierCopy([tree.pid, other.pid], GB)
    held.callback(copy.close)
    assert has(copy.pid, 0, 3, MANY - 1, MANY + 49)


def test_no_more_is_kept_than_may_be(tree: Subject, held: ExitStack) -> None:
    copy = EarlierCopy([tree.pid], BYTES // 2)
    held.callback(copy.close)
    assert copy.bytes == BYTES // 2
    assert psutil.Process(copy.pid).memory_info().rss < BYTES // 2 + (8 << 20)


def test_what_cannot_be_read_is_left_out(held: ExitStack) -> None:
    """Memory that a driver has mapped, or guard pages."""
    before = children()
    process = LazyProcess(2000)
    held.callback(process.end)
    process("[lazy.set(n, 10**9 + n) for n in range(1000)]")
    if tuple(map(int, os.uname().release.split(".")[:2])) >= (6, 13):
        process(f"lazy._call('madvise', lazy.base + 500 * 4096, 100, {MADV_GUARD_INSTALL})")
    copy = EarlierCopy([process.pid], GB)
    held.callback(copy.close)
    assert copy.bytes >= 900 * PAGE
    with pytest.raises((FileNotFoundError, ProcessLookupError)):
        EarlierCopy([process.pid, 1 << 30], GB)
    assert children() == before | {process.pid, copy.pid}


def test_one_that_says_nothing_is_given_up(
    tree: Subject, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = children()
    monkeypatch.setattr(earlier_copy, "PATIENCE_S", 0.2)
    monkeypatch.setattr(earlier_copy, "files", lambda _: tmp_path)
    program = tmp_path / "earlier-copy"
    for does, says in (("exec sleep 60", "within"), ("echo no memory >&2", "kept: no memory")):
        program.write_text(f"#!/bin/sh\n{does}\n")
        program.chmod(0o755)
        with pytest.raises(StepFailed, match=says):
            EarlierCopy([tree.pid], 1 << 20)
        assert children() == before


def test_memory_that_gets_short_is_taken_from_it_first(tree: Subject, held: ExitStack) -> None:
    copy = EarlierCopy([tree.pid], GB)
    held.callback(copy.close)
    with open(f"/proc/{copy.pid}/oom_score_adj") as file:
        assert file.read().strip() == "1000"
    os.kill(copy.pid, signal.SIGKILL)  # as the kernel would
    until(lambda: not copy.alive())
    assert not has(copy.pid, 0)


def test_it_ends_with_whoever_started_it(tree: Subject) -> None:
    ours, theirs = os.pipe()
    starter = os.fork()
    if starter == 0:
        try:
            os.write(theirs, str(EarlierCopy([tree.pid], GB).pid).encode())
            signal.pause()
        finally:
            os._exit(1)
    os.close(theirs)
    with os.fdopen(ours) as said:
        assert readable(20, said)
        pid = int(os.read(ours, 20))
    holder = os.pidfd_open(pid)
    try:
        assert not readable(0.2, holder), "it ends by itself"
        os.kill(starter, signal.SIGKILL)
        os.waitpid(starter, 0)
        assert readable(10, holder) == [holder]
    finally:
        os.close(holder)


# ---- those of a host ----


@dataclass(frozen=True)
class Ask:
    """A reservation."""

    spec: Spec
    book: Overlay
    limit_bytes: int = 0


def resident(job: str, rank: int, vni: int = 7) -> Resident:
    """Its tree is what this process has started."""
    return Resident(Spec(job, f"{job}/{rank}"), Room(os.getpid()), overlay=Overlay(vni))


@pytest.fixture
def copies(held: ExitStack, tree: Subject) -> EarlierCopies:
    copies = EarlierCopies(GB)
    held.callback(let_go, copies)
    assert tree.pid in children()
    return copies


def let_go(copies: EarlierCopies) -> None:
    for job in ("gpt", "bert"):
        copies.drop_job(job)


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


def test_a_job_finds_what_its_own_capsules_have_left(copies: EarlierCopies) -> None:
    one = resident("gpt", 1)
    copies.keep(one)  # type: ignore[arg-type]
    (pid,) = copies.of(Ask(Spec("gpt", "gpt/1"), Overlay(7)))  # type: ignore[arg-type]
    assert has(pid, 0, MANY - 1)
    assert copies.of(Ask(Spec("gpt", "gpt/2"), Overlay(7))) == [pid]  # type: ignore[arg-type]
    copies.keep(resident("gpt", 2))  # type: ignore[arg-type]
    first, second = copies.of(Ask(Spec("gpt", "gpt/2"), Overlay(7)))  # type: ignore[arg-type]
    assert (first != pid, second) == (True, pid), "its own comes first"
    dropped = copies.pop("gpt/2")
    assert dropped is not None
    assert dropped.pid == first
    dropped.close()
    assert copies.of(Ask(Spec("other", "other/1"), Overlay(7))) == []  # type: ignore[arg-type]
    later = Ask(Spec("gpt", "gpt/1"), Overlay(8))
    assert copies.of(later) == [], "a later job of the same name"  # type: ignore[arg-type]
    assert copies.bytes > BYTES

    dropped = copies.pop("gpt/1")
    assert dropped is not None
    dropped.close()
    assert copies.pop("gpt/1") is None
    assert copies.of(Ask(one.spec, one.overlay)) == []  # type: ignore[arg-type]
    assert copies.bytes == 0
    assert not psutil.pid_exists(pid)


def test_there_is_one_of_each_capsule_and_none_of_a_job_that_ended(copies: EarlierCopies) -> None:
    for rank in (0, 1, 1):
        copies.keep(resident("gpt", rank))  # type: ignore[arg-type]
    copies.keep(resident("bert", 0, 9))  # type: ignore[arg-type]
    assert len(copies.of(Ask(Spec("gpt", "gpt/0"), Overlay(7)))) == 2  # type: ignore[arg-type]
    copies.drop_job("gpt")
    assert copies.of(Ask(Spec("gpt", "gpt/0"), Overlay(7))) == []  # type: ignore[arg-type]
    assert len(copies.of(Ask(Spec("bert", "bert/0"), Overlay(9)))) == 1  # type: ignore[arg-type]
    let_go(copies)
    assert copies.bytes == 0


def test_nothing_is_kept_where_it_is_not_allowed_or_of_no_use(
    tree: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = children()
    one = resident("gpt", 1)
    unwanted = EarlierCopies(GB)
    unwanted.keep(one, lambda: False)  # type: ignore[arg-type]
    for kept, of in (
        (unwanted, replace(one, code=1)),
        (unwanted, replace(one, room=Room(os.getpid(), stands=False))),
        (unwanted, replace(one, room=Room(1 << 30))),
        (EarlierCopies(None), one),
    ):
        kept.keep(of)  # type: ignore[arg-type]
        assert kept.bytes == 0
        assert children() == before
    monkeypatch.setattr(earlier_copies, "MEMORY_LIMIT", BYTES // 2)
    for limit in (GB, BYTES // 4):
        some = EarlierCopies(limit)
        some.keep(one)  # type: ignore[arg-type]
        assert some.bytes == min(limit, BYTES // 2)
        let_go(some)
        assert children() == before


def test_a_tree_that_is_to_be_killed_waits_for_no_copy_for_long(
    copies: EarlierCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ValueError("whatever")

    monkeypatch.setattr(earlier_copies, "TURN_S", 0.05)
    monkeypatch.setattr(earlier_copies, "EarlierCopy", broken)
    copies.keep(resident("gpt", 1))  # type: ignore[arg-type]
    with copies._turn:
        copies.keep(resident("gpt", 1))  # type: ignore[arg-type]
    assert copies.bytes == 0


def test_a_capsule_that_needs_the_memory_gets_it_from_other_jobs_first(
    copies: EarlierCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies.keep(resident("gpt", 1))  # type: ignore[arg-type]
    copies.keep(resident("bert", 0, 9))  # type: ignore[arg-type]
    gpt = Ask(Spec("gpt", "gpt/1"), Overlay(7), limit_bytes=GB)
    bert = Ask(Spec("bert", "bert/0"), Overlay(9))

    @dataclass
    class Memory:
        available: int

    left = iter([GB, GB - 1, GB, GB - 1, GB - 1])
    monkeypatch.setattr(earlier_copies.psutil, "virtual_memory", lambda: Memory(next(left)))
    copies.make_room(gpt)  # type: ignore[arg-type]
    assert len(copies.of(bert)) == len(copies.of(gpt)) == 1, "there is enough"  # type: ignore[arg-type]
    copies.make_room(gpt)  # type: ignore[arg-type]
    assert copies.of(bert) == []  # type: ignore[arg-type]
    assert len(copies.of(gpt)) == 1  # type: ignore[arg-type]
    copies.make_room(gpt)  # type: ignore[arg-type]
    assert copies.of(gpt) == []  # type: ignore[arg-type]
