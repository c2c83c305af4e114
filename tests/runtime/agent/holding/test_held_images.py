# SPDX-License-Identifier: Apache-2.0
"""All that a holder has: what of it a restarted agent finds, and what memory it may take."""

from __future__ import annotations

import pytest
from descriptors import no_descriptor_left
from held_scene import BUDGET, CORE, MB, Holder, Source, holder, note, some_memory
from memory_parts import BASE, PAGE, digest, page

from liveshift.criu_glue.memory.store.store import INDEX_FILE, PAGES_FILE
from liveshift.errors import Refused
from liveshift.runtime.agent.holding.held_note import NOTE
from liveshift.runtime.agent.host import host_facts
from liveshift.runtime.config.values import read_size

__all__ = ["holder"]

FIRST = some_memory()
CHANGED = {7: {BASE + n * PAGE: page(5000 + n) for n in range(20)}}
SECOND = {7: FIRST[7] | CHANGED[7], 8: FIRST[8]}


# ---- a restart of the agent --------------------------------------------------------------------


def test_a_restarted_agent_has_what_was_kept(holder: Holder) -> None:
    holder.hold(17, FIRST)
    holder.hold(18, SECOND, CHANGED)
    sent = holder.images.generations()[0].manifest
    holder.again()
    assert holder.numbers() == [(17, True), (18, True)]
    assert (holder.memory(17), holder.memory(18)) == (FIRST, SECOND)
    found = holder.images.generations()[0]
    assert (found.note, found.manifest) == (note(17), sent)
    state = holder.capsule.held(18, digest(SECOND))
    assert (state.number, state.image_bytes) == (18, 7)


@pytest.mark.parametrize("complete", [False, True], ids=["in part", "not compared"])
def test_a_restarted_agent_has_nothing_of_what_was_not_kept(holder: Holder, complete: bool) -> None:
    holder.hold(17, FIRST)
    before = holder.files()
    if complete:
        holder.take(18, SECOND, CHANGED)
    else:
        Source(holder.images.expect(note(18))).send_pages(CHANGED)
    holder.again()
    assert holder.numbers() == [(17, True)]
    assert holder.files() == before
    assert holder.memory(17) == FIRST


def test_the_next_generation_goes_on_after_a_restart(holder: Holder) -> None:
    holder.hold(17, FIRST)
    size = holder.capsule.used()
    holder.again()
    holder.hold(18, SECOND, CHANGED)
    assert holder.images.generations()[-1].base == 17
    assert (holder.memory(17), holder.memory(18)) == (FIRST, SECOND)
    assert holder.capsule.used() - size < 100 * PAGE
    holder.images.drop("s17.1")
    holder.again()
    assert holder.memory(18) == SECOND


def test_a_restarted_agent_leaves_nothing_of_a_capsule_of_which_nothing_was_kept(
    holder: Holder,
) -> None:
    with no_descriptor_left():
        Source(holder.images.expect(note(17))).send(CORE, b"registers")
        holder.again()
    assert holder.numbers() == []
    assert not holder.directory.exists()


@pytest.mark.parametrize("harmed", ["manifest", NOTE, "index", "pages"])
def test_an_image_that_is_damaged_is_not_taken_up(holder: Holder, harmed: str) -> None:
    """And the agent starts, with what else it holds."""
    holder.hold(17, FIRST)
    holder.hold(17, SECOND, index=2)
    top = holder.directory / "gpt.1"
    if harmed == "index":
        (top / f"{INDEX_FILE}.17").write_bytes(b"\xc1")
    elif harmed == "pages":
        (top / PAGES_FILE).unlink()
    else:
        (top / "s17" / harmed).write_bytes(b"\xc1")
    holder.again()
    assert [g.note.migration for g in holder.images.generations()] == ["s17.2"]
    assert holder.left() == ["gpt.2"]
    assert holder.memory(17) == SECOND
    holder.hold(18, FIRST)
    assert holder.memory(18) == FIRST


def test_a_generation_whose_removal_was_interrupted_is_removed(holder: Holder) -> None:
    holder.hold(17, FIRST)
    holder.hold(18, SECOND, CHANGED)
    (holder.directory / "gpt.1/s17/manifest").unlink()
    holder.again()
    assert holder.numbers() == [(18, True)]
    assert not [name for name in holder.files() if "17" in name]
    holder.hold(19, FIRST)
    assert (holder.memory(18), holder.memory(19)) == (SECOND, FIRST)


# ---- the memory that they may take -------------------------------------------------------------


def test_an_image_that_does_not_fit_is_refused_with_the_size_that_would(holder: Holder) -> None:
    holder.images.expect(note(17, size=50 * MB, index=1))
    assert holder.images.budget_left() == BUDGET - 50 * MB
    with pytest.raises(Refused, match=r"cannot hold the image of gpt/2: it takes 21\.0 MB") as no:
        holder.images.expect(note(17, size=10 * MB, rewritten=5 * MB, index=2))
    assert "14.7 MB of the 67.1 MB that h1 offers" in str(no.value)
    assert no.value.hint == "it fits if snapshots.memory is 73.5 MB there, or more"
    assert [g.note.migration for g in holder.images.generations()] == ["s17.1"]
    assert holder.left() == ["gpt.1"]
    holder.images.expect(note(17, size=10 * MB, rewritten=2 * MB, index=2))
    assert holder.images.budget_left() == 0
    holder.images.drop("s17.1")
    assert holder.images.budget_left() == 50 * MB


def test_all_images_of_a_snapshot_fit_or_none_comes(holder: Holder) -> None:
    holder.images.expect(note(16, size=20 * MB, index=7))
    together = {"gpt/0": 10 * MB, "gpt/1": 20 * MB, "gpt/2": 20 * MB}
    with pytest.raises(
        Refused, match=r"the 3 images of gpt take 52\.4 MB, and 46\.1 MB"
    ) as refused:
        holder.images.expect(note(17, size=20 * MB), together=together)
    assert refused.value.hint == "it fits if snapshots.memory is 73.5 MB there, or more"
    assert holder.left() == ["gpt.7"]
    holder.images.drop("s16.7")
    holder.images.expect(note(17, size=20 * MB), together=together)
    holder.images.expect(note(17, size=20 * MB, index=2), together=together)
    assert holder.images.budget_left() == BUDGET - 40 * MB


def test_images_leave_memory_to_what_runs_on_their_host(
    holder: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was announced and has yet to come counts, and what is there does not count twice."""
    monkeypatch.setattr(host_facts, "memory_to_spare", lambda _: 30 * MB)
    holder.images.expect(note(17, size=20 * MB, index=1))
    with pytest.raises(Refused, match="cannot hold the image of gpt/2") as refused:
        holder.images.expect(note(17, size=11 * MB, index=2))
    assert "32.5 MB are yet to come, and 31.5 MB of its memory are available" in str(refused.value)
    assert "beyond the 10% that stay free for what runs there" in str(refused.value)
    assert holder.left() == ["gpt.1"]
    holder.images.expect(note(17, size=10 * MB, index=2))
    monkeypatch.setattr(host_facts, "memory_to_spare", lambda _: -5)
    with pytest.raises(Refused, match="0 B of its memory are available"):
        holder.images.expect(note(17, size=1, index=3))


def test_a_further_generation_needs_only_the_memory_that_differs(
    holder: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder.hold(17, FIRST)
    here = holder.capsule.used()
    monkeypatch.setattr(host_facts, "memory_to_spare", lambda _: 10 * PAGE)
    holder.images.expect(note(18, size=here + 10 * PAGE))
    holder.images.drop("s18.1")
    with pytest.raises(Refused, match="cannot hold"):
        holder.images.expect(note(18, size=here + 11 * PAGE))


def test_the_size_that_would_fit_can_be_written_into_the_cluster_file(holder: Holder) -> None:
    with pytest.raises(Refused) as refused:
        holder.images.expect(note(17, size=123_456_789))
    assert refused.value.hint == "it fits if snapshots.memory is 124 MB there, or more"
    assert read_size("124 MB") >= 123_456_789


def test_what_a_capsule_takes_already_counts_for_its_next_image(holder: Holder) -> None:
    holder.hold(17, FIRST)
    used = holder.capsule.used()
    others = BUDGET - used + PAGE
    with pytest.raises(Refused, match="cannot hold the image of gpt/1"):
        holder.images.expect(note(18, size=1), together={"gpt/1": 1, "gpt/2": others})
    holder.images.expect(note(18, size=1), together={"gpt/1": 1, "gpt/2": others - PAGE})


def test_a_further_generation_counts_with_what_differs(holder: Holder) -> None:
    holder.images.expect(note(17, size=50 * MB))
    holder.images.drop("s17.1")
    holder.hold(18, FIRST)
    holder.images.expect(note(19, size=60 * MB, rewritten=2 * MB))
    assert holder.images.budget_left() == 0
    with pytest.raises(Refused, match=r"0 B of the 67\.1 MB"):
        holder.images.expect(note(19, size=1, index=2))


def test_what_images_take_counts_also_if_less_was_announced(holder: Holder) -> None:
    source = Source(holder.images.expect(note(17, size=1)))
    source.send_pages(some_memory(count=2000))
    assert holder.images.budget_left() <= BUDGET - 2000 * PAGE
