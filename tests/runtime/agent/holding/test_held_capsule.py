# SPDX-License-Identifier: Apache-2.0
"""A capsule's generations at its holder: one stays whole while the next one comes, whatever becomes
of that one."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from descriptors import no_descriptor_left
from held_scene import CORE, LOG, MB, Holder, Source, holder, note, some_memory
from memory_parts import BASE, PAGE, digest, page

from liveshift.criu_glue.memory.store.held_store import HeldStore
from liveshift.errors import NotFound, Refused, StepFailed
from liveshift.runtime.agent.arrival import inbox as inboxes
from liveshift.runtime.agent.holding import held_place

__all__ = ["holder"]

FIRST = some_memory()
CHANGED = {7: {BASE + n * PAGE: page(5000 + n) for n in range(20)}}
SECOND = {7: FIRST[7] | CHANGED[7], 8: FIRST[8]}


def test_a_generation_stays_whole_while_the_next_one_comes(holder: Holder) -> None:
    holder.hold(17, FIRST)
    assert holder.numbers() == [(17, True)]
    inbox = holder.images.expect(note(18))
    source = Source(inbox)
    source.send(CORE, b"others")
    source.send_pages(CHANGED)
    assert holder.numbers() == [(17, True), (18, False)]
    assert holder.memory(17) == FIRST
    source.end_memory(SECOND)
    source.finish()
    assert holder.memory(17) == FIRST
    holder.capsule.held(18, digest(SECOND))
    assert holder.numbers() == [(17, True), (18, True)]
    assert (holder.memory(17), holder.memory(18)) == (FIRST, SECOND)
    holder.images.drop("s17.1")
    assert holder.numbers() == [(18, True)]
    assert holder.memory(18) == SECOND
    assert not [name for name in holder.files() if "17" in name]


def test_only_what_has_changed_takes_memory_twice(holder: Holder) -> None:
    memory = some_memory(count=2000)
    holder.hold(17, memory)
    once = holder.capsule.used()
    assert once > 2000 * PAGE
    holder.hold(18, {7: memory[7] | CHANGED[7], 8: memory[8]}, CHANGED)
    assert 20 * PAGE <= holder.capsule.used() - once < 100 * PAGE
    holder.images.drop("s17.1")
    assert holder.capsule.used() - once < 30 * PAGE


def test_each_generation_begins_with_the_one_before(holder: Holder) -> None:
    """It says which one that is: only a source that has sent for just that one may leave pages
    out."""
    holder.images.expect(note(16))
    assert holder.images.generations()[-1].base == 0
    holder.hold(17, FIRST)
    holder.images.expect(note(18))
    assert holder.images.generations()[-1].base == 17
    holder.images.drop("s18.1")
    holder.hold(19, SECOND, CHANGED)
    holder.images.drop("s17.1")
    holder.images.expect(note(20))
    assert holder.images.generations()[-1].base == 19


# ---- a generation that fails -------------------------------------------------------------------


def test_memory_that_is_not_the_sources_is_not_kept(holder: Holder) -> None:
    holder.hold(17, FIRST)
    lost = {7: dict(list(CHANGED[7].items())[1:])}
    holder.take(18, SECOND, lost)
    with pytest.raises(StepFailed, match="not what its source has sent"):
        holder.capsule.held(18, digest(SECOND))
    assert holder.numbers() == [(17, True)]
    assert holder.memory(17) == FIRST
    with pytest.raises(NotFound, match="s18 is not in"):
        holder.capsule.held(18, digest(SECOND))
    holder.hold(19, SECOND)
    assert holder.memory(19) == SECOND


def test_the_first_generation_that_fails_leaves_nothing(holder: Holder) -> None:
    with no_descriptor_left():
        holder.take(17, FIRST)
        with pytest.raises(StepFailed, match="not what its source has sent"):
            holder.capsule.held(17, bytes(16))
    assert holder.numbers() == []
    assert holder.left() == []
    holder.hold(18, FIRST)


def test_an_image_without_a_table_of_memory_is_not_kept(holder: Holder) -> None:
    """The store would take the table of the generation before for its own."""
    holder.hold(17, FIRST)
    source = Source(holder.images.expect(note(18)))
    source.send(CORE, b"registers")
    source.finish()
    with pytest.raises(StepFailed, match="no complete table of memory"):
        holder.capsule.held(18, digest(FIRST))
    assert holder.numbers() == [(17, True)]


def test_a_generation_is_kept_only_once_it_is_complete(holder: Holder) -> None:
    holder.hold(17, FIRST)
    source = Source(holder.images.expect(note(18)))
    source.send_pages(CHANGED)
    with pytest.raises(StepFailed, match=r"the image s18\.1 is not complete"):
        holder.capsule.held(18, digest(SECOND))
    source.end_memory(SECOND)
    source.finish()
    capsule = holder.capsule
    assert capsule.held(18, digest(SECOND)) == capsule.held(18, digest(SECOND))
    assert holder.memory(18) == SECOND


@pytest.mark.parametrize("dropped", [False, True], ids=["expected", "ruled"])
def test_what_came_for_a_failed_generation_goes(holder: Holder, dropped: bool) -> None:
    """Either at its ruling, or when the next one is expected."""
    holder.hold(17, FIRST)
    before, size = holder.files(), holder.capsule.used()
    with no_descriptor_left():
        failed = Source(holder.images.expect(note(18)))
        failed.send_pages(some_memory(9000, 1000))
        failed.send(CORE, b"x", end=False)
        failed.send("tree:1:tmp", bytes(512), end=False)
        assert holder.capsule.used() - size > 1000 * PAGE
        if dropped:
            holder.images.drop("s18.1")
            assert holder.files() == before
            assert holder.capsule.used() - size < 30 * PAGE
        source = Source(holder.images.expect(note(19)))
        with pytest.raises(StepFailed, match="takes no pages"):
            failed.send_pages(FIRST)
        with pytest.raises(StepFailed, match="takes no more data"):
            failed.send(CORE, b"x")
        assert holder.capsule.used() - size < 30 * PAGE
        source.send_pages(CHANGED)
        source.end_memory(SECOND)
        source.finish()
    holder.capsule.held(19, digest(SECOND))
    assert (holder.memory(17), holder.memory(19)) == (FIRST, SECOND)


def test_a_page_that_is_late_does_not_come_into_the_next_generation(
    holder: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder.hold(17, FIRST)
    late = Source(holder.images.expect(note(18)))
    begun, go_on, write = threading.Event(), threading.Event(), HeldStore.write

    def slow(store: HeldStore, chunk: bytes | memoryview) -> None:
        begun.set()
        assert go_on.wait(20)
        write(store, chunk)

    monkeypatch.setattr(HeldStore, "write", slow)
    with ThreadPoolExecutor(2) as pool:
        sent = pool.submit(late.send_pages, {7: some_memory(9000, 8)[7]})
        assert begun.wait(20)
        expected = pool.submit(holder.images.expect, note(19))
        with pytest.raises(TimeoutError):
            expected.result(0.05)
        go_on.set()
        sent.result(20)
        source = Source(expected.result(20))
    monkeypatch.undo()
    source.send_pages(CHANGED)
    source.end_memory(SECOND)
    source.finish()
    holder.capsule.held(19, digest(SECOND))


# ---- what is not expected ----------------------------------------------------------------------


def test_a_repeated_request_gets_the_same_inbox_and_an_older_one_none(holder: Holder) -> None:
    inbox = holder.images.expect(note(17))
    Source(inbox).send(CORE, b"registers")
    assert holder.images.expect(note(17)) is inbox
    assert (inbox.images / CORE[6:]).exists()
    holder.hold(18, FIRST)
    for number in (17, 18):
        with pytest.raises(Refused, match=rf"s{number}\.1 cannot come: s18 of gpt/1 is here"):
            holder.images.expect(note(number))
    assert holder.numbers() == [(18, True)]


def test_a_third_generation_waits_for_the_ruling_on_two(holder: Holder) -> None:
    """Only the orchestrator knows which of them is complete everywhere."""
    holder.hold(17, FIRST)
    holder.hold(18, SECOND, CHANGED)
    with pytest.raises(Refused, match="s17 and s18 of gpt/1 are held here") as caught:
        holder.images.expect(note(19))
    assert caught.value.hint
    holder.images.drop("s18.1")
    assert holder.memory(17) == FIRST
    holder.hold(19, SECOND)
    assert (holder.memory(17), holder.memory(19)) == (FIRST, SECOND)


@pytest.mark.parametrize("newest", [17, 18])
def test_a_third_generation_needs_no_ruling_if_it_is_said_which_one_is_complete(
    holder: Holder, newest: int
) -> None:
    """The ruling on the other one may come later than the next snapshot."""
    holder.hold(17, FIRST)
    holder.hold(18, SECOND, CHANGED)
    with pytest.raises(Refused):
        holder.images.expect(note(19), 16)
    inbox = holder.images.expect(note(19), newest)
    assert holder.images.expect(note(19), newest) is inbox
    assert holder.numbers() == [(newest, True), (19, False)]
    assert holder.capsule.stands(19)[0] == newest
    assert holder.memory(newest) == {17: FIRST, 18: SECOND}[newest]


@pytest.mark.parametrize(
    "stream",
    [
        "image:../x.img",
        "image:note",
        "output:x",
        "output:../memory",
        "tree:1:",
        "tree:3:tmp",
        "tree:1:carried:/etc",
        "tree:1:carried:",
        "tree:2:/etc",
        "devices",
        "digest",
        "x",
        "",
    ],
)
def test_streams_that_no_image_has_are_refused(holder: Holder, stream: str) -> None:
    inbox = holder.images.expect(note(17))
    before = holder.files()
    with pytest.raises(StepFailed, match=r"no destination takes|not carried"):
        inbox.write(stream, memoryview(b"x"))
    assert holder.files() == before


def test_a_manifest_of_another_image_is_refused(holder: Holder) -> None:
    source = Source(holder.images.expect(note(17)), "s18.1")
    source.send(CORE, b"x")
    with pytest.raises(StepFailed, match="of another image"):
        source.finish()
    other = Source(holder.images.expect(note(18)))
    with pytest.raises(StepFailed, match="not carried"):
        other.finish({"carried:/etc": ["passwd"]})


def test_a_directory_does_not_take_the_memory_that_the_host_needs(
    holder: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[Any] = [inboxes.LEFT]
    monkeypatch.setattr(inboxes, "memory_left", lambda: left[0])
    monkeypatch.setattr(inboxes, "FREED_S", 0.01)
    monkeypatch.setattr(held_place, "LOOK", MB)
    source = Source(holder.images.expect(note(17)))
    source.send("tree:1:tmp", bytes(2 * MB), end=False)
    left[0] = 0
    with pytest.raises(StepFailed, match="no memory for more"):
        source.send("tree:1:tmp", bytes(2 * MB))


def test_a_place_that_cannot_be_made_is_said_and_left(holder: Holder) -> None:
    holder.hold(17, FIRST)
    (holder.directory / "gpt.1/s18").write_text("in the way")
    with pytest.raises(StepFailed, match=r"s18 cannot be made"):
        holder.images.expect(note(18))
    assert holder.numbers() == [(17, True)]
    assert holder.memory(17) == FIRST


def test_the_last_generation_takes_all_along(holder: Holder) -> None:
    with no_descriptor_left():
        holder.hold(17, FIRST)
        holder.hold(18, SECOND, CHANGED)
        holder.images.drop("s17.1")
        assert holder.left() != []
        holder.images.drop("s18.1")
        holder.images.drop("s18.1")
    assert holder.left() == []
    with pytest.raises(NotFound, match=r"h1 does not hold the image s18\.1"):
        holder.images.find("s18.1")


def test_parts_lie_as_they_came(holder: Holder) -> None:
    source = Source(holder.images.expect(note(17)))
    for stream in (CORE, LOG, "tree:1:tmp", "tree:2:shm"):
        source.send(stream, stream.encode())
    source.finish()
    top = holder.directory / "gpt.1/s17"
    assert (top / CORE[6:]).read_bytes() == CORE.encode()
    assert (top / "output" / LOG[7:]).read_bytes() == LOG.encode()
    assert {path.read_bytes() for path in (top / "trees").iterdir()} == {
        b"tree:1:tmp",
        b"tree:2:shm",
    }
