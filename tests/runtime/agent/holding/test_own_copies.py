# SPDX-License-Identifier: Apache-2.0
"""The copy that a capsule's own host keeps gives way to images that protect a job, and to what runs
on the host; but not while a restore reads it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import msgspec
import pytest
from held_scene import MB, Holder, Source, holder, note, some_memory
from inbox_scene import Host
from memory_parts import PAGE, content, digest

from liveshift.errors import Refused
from liveshift.runtime.agent.holding.held_capsule import HeldCapsule
from liveshift.runtime.agent.holding.held_note import HeldNote
from liveshift.runtime.agent.host import host_facts

__all__ = ["holder"]

MEMORY = some_memory()


def own(number: int, size: int = 8 * MB, index: int = 1) -> HeldNote:
    return msgspec.structs.replace(note(number, size=size, index=index), own=True)


def keep_own(holder: Holder, number: int, index: int = 1, *, stays: bool = False) -> None:
    expected = msgspec.structs.replace(own(number, index=index), stays=stays)
    inbox = holder.images.expect(expected)
    inbox.by_wire = True  # as the scene's source sends
    source = Source(inbox)
    source.send_pages(MEMORY)
    source.end_memory(MEMORY)
    source.finish()
    holder.images.find(f"s{number}.{index}")[0].held(number, digest(MEMORY))


def names(holder: Holder) -> list[str]:
    return sorted(g.note.migration for g in holder.images.generations())


def test_an_own_copy_makes_room_for_an_image_of_another_job(holder: Holder) -> None:
    keep_own(holder, 17)
    holder.images.expect(note(18, size=60 * MB, index=2))
    assert names(holder) == ["s18.2"]
    assert holder.left() == ["gpt.2"]


def test_it_stays_where_both_fit(holder: Holder) -> None:
    keep_own(holder, 17)
    holder.images.expect(note(18, size=20 * MB, index=2))
    assert names(holder) == ["s17.1", "s18.2"]


def test_it_stays_if_the_image_would_not_fit_all_the_same(holder: Holder) -> None:
    keep_own(holder, 17)
    with pytest.raises(Refused, match="cannot hold the image of gpt/2"):
        holder.images.expect(note(18, size=70 * MB, index=2))
    assert names(holder) == ["s17.1"]


def test_a_copy_leaves_more_memory_free_than_an_image_that_protects(
    holder: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_facts, "memory_to_spare", lambda kept: int((0.12 - kept) * 1000 * MB))
    with pytest.raises(Refused, match="beyond the 15% that stay free"):
        holder.images.expect(own(17))
    holder.images.expect(note(17))


def test_an_image_that_lacks_available_memory_gets_that_of_copies(
    holder: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_own(holder, 17)
    spare = 20 * MB - holder.images.own_bytes()
    monkeypatch.setattr(host_facts, "memory_to_spare", lambda _: spare)
    with pytest.raises(Refused):
        holder.images.expect(note(18, size=21 * MB, index=2))
    assert names(holder) == ["s17.1"]
    holder.images.expect(note(18, size=20 * MB, index=2))
    assert names(holder) == ["s18.2"]


@contextlib.contextmanager
def at_work(capsule: HeldCapsule) -> Iterator[None]:
    """A thread compares the memory of an image meanwhile."""
    begun, done = threading.Event(), threading.Event()

    def work() -> None:
        with capsule._lock:
            begun.set()
            assert done.wait(10)

    thread = threading.Thread(target=work)
    thread.start()
    assert begun.wait(10)
    try:
        yield
    finally:
        done.set()
        thread.join()


def test_nobody_waits_for_a_thread_that_is_at_work_on_a_copy(holder: Holder) -> None:
    """A heartbeat asks how much the copies take, and a digest may last for seconds."""
    keep_own(holder, 17)
    with at_work(holder.capsule):
        assert holder.images.own_bytes() == 0
    assert holder.images.own_bytes() > 0


def test_a_copy_on_which_a_thread_is_at_work_gives_way_soon(holder: Holder) -> None:
    """Else a heartbeat would report so little memory left meanwhile that the orchestrator drops the
    snapshots of other jobs that are held here."""
    holder.images.expect(own(17))
    with at_work(holder.capsule):
        there = holder.images.own_bytes_soon()
        assert there == holder.capsule.used() > 0, "also before anybody has asked"
    keep_own(holder, 18)
    with at_work(holder.capsule):
        assert holder.images.own_bytes_soon() == holder.capsule.used() > there
        assert holder.images.drop_own() == []
    assert holder.images.own_bytes_soon() == holder.images.own_bytes()
    assert holder.images.drop_own() == ["gpt/1"]
    assert holder.images.own_bytes_soon() == 0


def test_an_image_that_protects_a_job_gives_no_way_soon(holder: Holder) -> None:
    keep_own(holder, 17)
    holder.images.drop_own()
    holder.hold(18, MEMORY)
    with at_work(holder.capsule):
        assert holder.images.own_bytes_soon() == 0
    assert holder.images.own_bytes_soon() == 0


def test_it_makes_no_room_for_another_own_copy(holder: Holder) -> None:
    keep_own(holder, 17)
    with pytest.raises(Refused, match="cannot hold the image of gpt/2"):
        holder.images.expect(own(18, 60 * MB, index=2))
    assert names(holder) == ["s17.1"]


def test_an_image_that_protects_a_job_is_not_given_up(holder: Holder) -> None:
    holder.hold(17, MEMORY)
    with pytest.raises(Refused):
        holder.images.expect(note(18, size=60 * MB, index=2))
    assert holder.images.drop_own() == []
    assert names(holder) == ["s17.1"]


def test_what_was_a_holders_image_stays_with_the_own_copy_that_follows_it(holder: Holder) -> None:
    """A capsule was rewound to its holder: both generations are in one store."""
    holder.hold(17, MEMORY)
    holder.images.expect(own(18))
    assert holder.images.drop_own() == []
    holder.images.drop("s17.1")
    assert holder.images.drop_own() == ["gpt/1"]
    assert names(holder) == []


def test_it_stays_while_a_restore_reads_it_also_after_a_restart(holder: Holder) -> None:
    keep_own(holder, 17)
    host = Host(holder.directory.parent / "there")
    host.inbox.memory_limit = 1 << 30
    holder.capsule.hand_over(17, host.inbox)
    assert holder.images.drop_own() == []
    holder.again()
    assert holder.images.drop_own() == []
    assert host.inbox.memory is not None
    assert content(host.inbox.memory) == MEMORY
    host.inbox.forget_memory()
    (host.images / "memory").unlink()
    assert holder.images.drop_own() == ["gpt/1"]
    assert names(holder) == []


def test_what_it_would_give_back_is_known(holder: Holder) -> None:
    keep_own(holder, 17)
    holder.hold(18, MEMORY, index=2)
    size = holder.images.find("s17.1")[0].used()
    assert holder.images.own_bytes() == size > 300 * PAGE
    assert holder.images.drop_own(besides="gpt/1") == []
    assert holder.images.drop_own() == ["gpt/1"]
    assert holder.images.own_bytes() == 0
    assert names(holder) == ["s18.2"]


def test_a_restarted_agent_knows_that_it_is_an_own_copy(holder: Holder) -> None:
    keep_own(holder, 17)
    holder.again()
    assert [g.note.own for g in holder.images.generations()] == [True]
    assert holder.images.drop_own() == ["gpt/1"]


# ---- a copy that stays -----------------------------------------------------------------------


def test_a_copy_that_protects_its_job_does_not_give_way(holder: Holder) -> None:
    keep_own(holder, 17, stays=True)
    holder.again()
    assert holder.images.own_bytes() == 0
    with pytest.raises(Refused, match="cannot hold the image of gpt/2"):
        holder.images.expect(note(18, size=60 * MB, index=2))
    assert holder.images.drop_own() == []
    assert names(holder) == ["s17.1"]


def test_other_copies_make_room_for_it(holder: Holder) -> None:
    keep_own(holder, 17)
    stays = msgspec.structs.replace(own(18, 60 * MB, index=2), stays=True)
    holder.images.expect(stays)
    assert names(holder) == ["s18.2"]


def test_it_may_take_as_much_memory_as_a_holders_image(
    holder: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_facts, "memory_to_spare", lambda kept: int((0.12 - kept) * 1000 * MB))
    with pytest.raises(Refused):
        holder.images.expect(own(17))
    holder.images.expect(msgspec.structs.replace(own(17), stays=True))


def test_it_goes_if_another_holder_sends_the_image_for_a_rewind(holder: Holder) -> None:
    """Else its own host would have no memory for the capsule that comes back."""
    keep_own(holder, 17, stays=True)
    keep_own(holder, 17, index=2, stays=True)
    size = holder.images.find("s17.1")[0].used()
    assert holder.images.own_bytes(staying="gpt/1") == size
    assert holder.images.drop_own(staying="gpt/1") == ["gpt/1"]
    assert names(holder) == ["s17.2"]


def test_an_image_of_another_host_does_not_go_even_then(holder: Holder) -> None:
    holder.hold(17, MEMORY)
    assert holder.images.drop_own(staying="gpt/1") == []
