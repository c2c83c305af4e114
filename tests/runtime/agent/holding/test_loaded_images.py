# SPDX-License-Identifier: Apache-2.0
"""A held image is saved in a directory, and another host holds it again, under another number.
Store and pages are real."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from descriptors import no_descriptor_left
from held_scene import BUDGET, MB, Holder, holder, note, some_memory
from memory_parts import BASE, PAGE, digest, page

from liveshift.criu_glue.capsule.mounts import Placement
from liveshift.criu_glue.memory.store.held_store import HeldStore
from liveshift.errors import LiveshiftError, NotFound, Refused, StepFailed
from liveshift.runtime.agent.holding import held_generation, saved_file, saved_image
from liveshift.runtime.agent.holding.held_note import HeldNote
from liveshift.runtime.agent.holding.saved_file import SavedFile
from liveshift.runtime.agent.holding.saved_image import WrittenImage
from liveshift.runtime.messages import LoadHeld

__all__ = ["holder"]

pytestmark = pytest.mark.root

FIRST = some_memory()
CHANGED = {7: {BASE + n * PAGE: page(5000 + n) for n in range(20)}}
SECOND = {7: FIRST[7] | CHANGED[7], 8: FIRST[8]}


@pytest.fixture
def kept() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="liveshift-", dir="/var/lib") as name:
        yield Path(name)


@pytest.fixture
def other() -> Iterator[Holder]:
    """Another host, which loads what the first one has saved."""
    with tempfile.TemporaryDirectory(prefix="ls-held-", dir="/dev/shm") as place:
        made = Holder(Path(place))
        yield made
        made.images.close()


def save(holder: Holder, number: int, kept: Path) -> tuple[Path, WrittenImage]:
    target = kept / "gpt" / f"s{number}.1"
    return target, holder.capsule.save(number, target)


def request(
    written: WrittenImage, saved: str, image: str = "", capsule: str = "gpt/1", epoch: int = 9
) -> LoadHeld:
    return LoadHeld(image or saved, capsule, "/kept", saved, written.digest, epoch, 4)


@pytest.mark.parametrize("number", [3, 17, 400])
def test_another_host_holds_what_was_saved(
    holder: Holder, other: Holder, kept: Path, number: int
) -> None:
    holder.hold(17, FIRST)
    sent = holder.images.generations()[0].manifest
    source, written = save(holder, 17, kept)
    assert written.bytes < holder.capsule.used(), "it is compressed"
    other.images.load(request(written, "s17.1", f"s{number}.1"), source)
    (found,) = other.images.generations()
    assert (found.number, found.kept, found.manifest) == (number, True, sent)
    assert (found.note.migration, found.note.epoch, found.note.rewinds) == (f"s{number}.1", 9, 4)
    assert (found.note.spec, found.note.facts) == (note(17).spec, note(17).facts)
    assert other.memory(number) == FIRST
    state = other.capsule.held(number, digest(FIRST))
    assert (state.number, state.image_bytes) == (number, 7)
    other.again()
    assert other.numbers() == [(number, True)]
    assert other.memory(number) == FIRST
    if number != 17:
        assert not [name for name in other.files() if "17" in name]


def test_what_was_loaded_is_saved_again_under_its_new_number(
    holder: Holder, other: Holder, kept: Path
) -> None:
    holder.hold(17, SECOND)
    source, written = save(holder, 17, kept)
    other.images.load(request(written, "s17.1", "s2.1"), source)
    again, its = save(other, 2, kept)
    holder.images.drop("s17.1")
    holder.images.load(request(its, "s2.1", "s30.1"), again)
    assert holder.numbers() == [(30, True)]
    assert holder.memory(30) == SECOND


def test_a_loaded_image_takes_the_next_snapshot(holder: Holder, other: Holder, kept: Path) -> None:
    holder.hold(17, FIRST)
    source, written = save(holder, 17, kept)
    other.images.load(request(written, "s17.1", "s20.1"), source)
    other.hold(21, SECOND, CHANGED)
    assert other.images.generations()[-1].base == 20
    assert (other.memory(20), other.memory(21)) == (FIRST, SECOND)


def test_of_two_generations_the_newer_one_alone_is_saved(
    holder: Holder, other: Holder, kept: Path
) -> None:
    holder.hold(17, some_memory(9000, 2000))
    holder.hold(18, SECOND)
    source, written = save(holder, 18, kept)
    assert holder.numbers() == [(18, True)]
    assert written.bytes < 1000 * PAGE, "no page of the earlier one"
    assert not [path for path in source.rglob("*") if "17" in path.name]
    other.images.load(request(written, "s18.1"), source)
    assert other.memory(18) == SECOND


def test_one_that_is_not_kept_is_not_saved(holder: Holder, kept: Path) -> None:
    holder.take(17, FIRST)
    with pytest.raises(NotFound, match=r"s17\.1 was not kept"):
        save(holder, 17, kept)
    assert list(kept.iterdir()) == []


def test_an_image_that_is_dropped_while_it_is_saved_is_saved_whole(
    holder: Holder, other: Holder, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its job ends, and the ruling comes: the files stay until the last one is written."""
    holder.hold(17, FIRST)
    write, written_files = saved_file.write, list[str]()

    def meanwhile(path: Path, target: Path) -> SavedFile:
        if not written_files:
            holder.images.drop("s17.1")
        written_files.append(path.name)
        return write(path, target)

    monkeypatch.setattr(saved_file, "write", meanwhile)
    source, written = save(holder, 17, kept)
    assert len(written_files) > 3
    assert (holder.numbers(), holder.left()) == ([], [])
    other.images.load(request(written, "s17.1"), source)
    assert other.memory(17) == FIRST


# ---- what is refused ---------------------------------------------------------------------------


def test_a_request_that_comes_again_loads_nothing(
    holder: Holder, other: Holder, kept: Path
) -> None:
    holder.hold(17, FIRST)
    source, written = save(holder, 17, kept)
    other.images.load(request(written, "s17.1"), source)
    (source / saved_image.SUMS).unlink()
    other.images.load(request(written, "s17.1"), source)
    assert other.numbers() == [(17, True)]


def test_a_part_of_a_copy_is_no_image(holder: Holder, other: Holder, kept: Path) -> None:
    """The images of the job were being copied to a second host when they were saved."""
    holder.hold(17, FIRST)
    source, written = save(holder, 17, kept)
    other.images.expect(note(17))
    assert [each.kept for each in other.images.generations()] == [False]
    other.images.load(request(written, "s17.1"), source)
    (found,) = other.images.generations()
    assert found.kept
    assert other.memory(17) == FIRST


def test_what_does_not_fit_or_is_another_capsules_is_refused(
    holder: Holder, other: Holder, kept: Path
) -> None:
    holder.hold(17, FIRST)
    source, written = save(holder, 17, kept)
    with pytest.raises(NotFound, match=r"s17\.1 of gpt/1, not of gpt/0"):
        other.images.load(request(written, "s17.1", "s17.0", "gpt/0"), source)
    with pytest.raises(LiveshiftError, match='cannot have the name "m1"'):
        other.images.load(request(written, "s17.1", "m1"), source)
    with pytest.raises(NotFound, match="has no whole image"):
        other.images.load(request(written, "s18.1"), kept / "gpt")
    other.images.expect(note(1, size=BUDGET - MB, index=2))
    with pytest.raises(Refused, match="h1 cannot hold the image of gpt/1: it takes 8"):
        other.images.load(request(written, "s17.1"), source)
    assert other.left() == ["gpt.2"]
    other.images.drop("s1.2")

    def no_rights(found: HeldNote) -> None:
        assert found.migration == "s17.1"
        raise Refused("no such CPU here")

    with pytest.raises(Refused, match="no such CPU here"):
        other.images.load(request(written, "s17.1"), source, no_rights)
    assert other.left() == []
    other.hold(5, FIRST)
    with pytest.raises(Refused, match="holds another image of gpt/1"):
        other.images.load(request(written, "s17.1"), source)
    assert other.memory(5) == FIRST


@pytest.mark.parametrize("part", ["memory.zst", "index", "manifest"])
def test_a_damaged_image_leaves_nothing_at_its_holder(
    holder: Holder, other: Holder, kept: Path, part: str
) -> None:
    holder.hold(17, FIRST)
    source, written = save(holder, 17, kept)
    (file,) = (path for path in source.rglob("*.zst") if part in path.name)
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with no_descriptor_left(), pytest.raises(StepFailed, match="is damaged"):
        other.images.load(request(written, "s17.1"), source)
    assert (other.numbers(), other.left()) == ([], [])
    other.hold(18, SECOND)
    assert other.memory(18) == SECOND


class _Killed(BaseException):
    """The agent is killed here, and cleans up nothing."""


@pytest.mark.parametrize("files", range(1, 8))
def test_an_agent_that_is_killed_while_it_loads_holds_nothing(
    holder: Holder, other: Holder, kept: Path, monkeypatch: pytest.MonkeyPatch, files: int
) -> None:
    """However many files have come: an image with a part of them must not pass for the whole."""
    holder.hold(17, FIRST)
    source, written = save(holder, 17, kept)
    read, came = saved_file.read, list[str]()

    def some(path: Path, target: Path, saved: SavedFile) -> None:
        if target.is_relative_to(other.directory):
            if len(came) == files:
                raise _Killed
            came.append(path.name)
        read(path, target, saved)

    with monkeypatch.context() as patched:
        patched.setattr(saved_file, "read", some)
        patched.setattr("shutil.rmtree", lambda *_, **__: None)
        patched.setattr(held_generation, "write_note", _kill)
        with contextlib.suppress(_Killed):
            other.images.load(request(written, "s17.1"), source)
    assert came
    other.again()
    assert (other.numbers(), other.left()) == ([], [])
    other.images.load(request(written, "s17.1"), source)
    assert other.memory(17) == FIRST


def _kill(*_: object) -> None:
    raise _Killed


# ---- numbers -----------------------------------------------------------------------------------


def test_a_number_that_cannot_be_written_is_an_error(
    holder: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder.hold(17, FIRST)
    directory = holder.directory / "gpt.1"
    holder.images.close()
    with pytest.raises(StepFailed, match=r"\.16 cannot be read"):
        HeldStore.renumber(directory, 16, 20)

    def full(*_: object, **__: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "rename", full)
    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(StepFailed, match="cannot be written: no space left"):
        HeldStore.renumber(directory, 17, 20)


def test_the_files_that_a_job_was_writing_are_known_without_its_capsule(holder: Holder) -> None:
    holder.hold(17, FIRST)
    found = holder.capsule.describe(17, Placement((), ()))
    assert (found.survey, found.facts) == (note(17).survey, note(17).facts)
    assert (found.written, found.identities, found.appended) == ({}, {}, [])
    assert found.image_bytes > 300 * PAGE


def test_copies_of_the_hosts_own_capsules_make_room(
    holder: Holder, other: Holder, kept: Path
) -> None:
    """Those of other jobs, and one of the same capsule, from before its job was suspended."""
    holder.hold(17, FIRST)
    source, written = save(holder, 17, kept)
    for number, index in ((3, 2), (5, 1)):
        copy = msgspec.structs.replace(note(number, index=index, size=60 * MB), own=True)
        other.images.expect(copy)
        other.images.load(request(written, "s17.1", f"s{20 + number}.1"), source)
        names = [generation.note.migration for generation in other.images.generations()]
        assert names == [f"s{20 + number}.1"]
        other.images.drop(names[0])


# ---- while a server hangs ----------------------------------------------------------------------


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_else_waits_for_a_load(
    holder: Holder, other: Holder, kept: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """It takes minutes; snapshots of other jobs come meanwhile, and memory may be short."""
    holder.hold(17, FIRST)
    source, written = save(holder, 17, kept)
    began, goes_on, load = threading.Event(), threading.Event(), saved_image.load

    def hangs(*about: Any, **more: Any) -> None:
        began.set()
        assert goes_on.wait(10)
        if fails:
            raise StepFailed("restore", "the server is gone")
        load(*about, **more)

    monkeypatch.setattr(saved_image, "load", hangs)
    copy = msgspec.structs.replace(note(3, index=2), own=True)
    other.images.expect(copy)
    with ThreadPoolExecutor(2) as threads:
        loading = threads.submit(other.images.load, request(written, "s17.1"), source)
        try:
            assert began.wait(10)
            assert other.images.budget_left() == BUDGET - 2 * note(17).needed
            meanwhile = threads.submit(_meanwhile, other)
            assert meanwhile.result(5) == ["gpt/2"]
            with pytest.raises(Refused, match="h1 is loading another image of gpt/1"):
                other.images.expect(note(18))
            with pytest.raises(Refused, match="h1 cannot hold the image of gpt/3: it takes"):
                other.images.expect(note(18, size=BUDGET - note(17).needed + MB, index=3))
        finally:
            goes_on.set()
        error = loading.exception(10)
    assert (str(error) if error else "") == ("restore: the server is gone" if fails else "")
    assert other.numbers() == [] if fails else other.memory(17) == FIRST
    assert other.images.budget_left() == BUDGET - (0 if fails else note(17).needed)
    other.images.drop("s17.1")
    assert other.left() == []


def _meanwhile(other: Holder) -> list[str]:
    """What other jobs, and the processes of this host, need of it."""
    dropped = other.images.drop_own()
    other.images.expect(note(18, index=4))
    other.images.drop("s18.4")
    return dropped
