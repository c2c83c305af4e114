# SPDX-License-Identifier: Apache-2.0
"""Real trees of whose memory the cold part is in place before CRIU is told to restore them."""

from __future__ import annotations

import os
from pathlib import Path

import memory_parts
import pytest
from captured import sink
from early_stage import (
    ALIKE,
    ALONE,
    FAMILY,
    NO_RESERVE,
    Stages,
    flags_of,
    is_whole_and_goes_on,
    kill_early,
    restore,
    restore_misses_what_is_lost,
    restore_plainly,
    scene,
    size_of,
    staged,
    without_room_for_both,
)
from memory_parts import PAGE
from one_sandbox import said
from sandbox_trees import count, criu, goes_on, new_sandboxes, place, states
from waits import until

from liveshift.criu_glue.capsule import output
from liveshift.criu_glue.capsule.tree import tasks
from liveshift.criu_glue.criu import early
from liveshift.criu_glue.memory.prefill import prefill
from liveshift.criu_glue.memory.prefill.mapped import PrefillLost
from liveshift.criu_glue.memory.prefill.prefill import SPARE, Prefill
from liveshift.criu_glue.memory.store.store import PAGES_FILE
from liveshift.errors import StepFailed

__all__ = ["criu", "new_sandboxes", "place", "scene", "sink", "staged"]


@pytest.mark.root
@pytest.mark.parametrize("program", [ALONE, FAMILY], ids=["alone", "family"])
def test_cold_memory_is_in_place_and_what_is_outdated_is_copied_again(
    staged: Stages, program: str
) -> None:
    stage = staged(program)
    stage.put_in_place()
    assert stage.early.bytes > 100 << 20
    stage.send_the_rest()
    stage.parted.end_source()
    tree, seen = restore(stage)
    assert seen.preplaced > 100 << 20
    assert 0 <= stage.early.bytes - seen.preplaced < 4 << 20, "all but pages of zeros"
    assert seen.preplaced + seen.bytes == seen.total
    assert seen.preplaced > seen.total - (16 << 20), "in blocks that were outdated in part, too"
    assert stage.compare() > 30000
    restored = flags_of(stage.early.held.tree().values())
    both = {where for where in stage.flags if where in restored and where[1].endswith("rw-p")}
    assert {where: restored[where] for where in both} == {w: stage.flags[w] for w in both}
    assert any(size_of(where) > 100 << 20 for _, where in both)  # neighbours may have been joined
    assert not tree.resumed()
    tree.let_run(60)
    assert tree.resumed()
    assert goes_on(stage.there)
    assert said(stage.there, output.STDERR) == ""
    lines = [int(n) for n in said(stage.there).split()]
    assert lines == list(range(len(lines)))


@pytest.mark.root
@pytest.mark.machine("autogroup")
def test_a_tree_does_not_share_the_weight_of_its_agent(staged: Stages) -> None:
    """An agent's session has a low weight while it copies on idle cores, and the early CRIU is in
    that session. This test leaves the weight as it is: other tests share its session."""
    stage = staged(FAMILY)
    stage.bring_over()
    tree, seen = restore(stage)
    assert seen.preplaced > 100 << 20
    tree.let_run(60)
    pids = [task.pid for task in tasks(stage.there)]
    assert len(pids) > 1
    groups = {Path(f"/proc/{pid}/autogroup").read_text().strip() for pid in pids}
    assert Path("/proc/self/autogroup").read_text().strip() not in groups
    assert {group.rpartition(" ")[2] for group in groups} == {"0"}
    threads = [int(thread.name) for pid in pids for thread in Path(f"/proc/{pid}/task").iterdir()]
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads} == {own}
    assert goes_on(stage.there)


class NoHold:
    def spare_from_exit(self) -> None:
        pass

    def end(self) -> None:
        pass


@pytest.mark.root
def test_a_tree_with_memory_in_place_stops_at_the_door(staged: Stages) -> None:
    stage = staged(FAMILY)
    stage.bring_over()
    tree, seen = restore(stage, stopped=True)
    assert seen.preplaced > 100 << 20
    tree.stop_at_door(60)
    assert (stage.parted.images / "at-door").exists()
    assert not tree.resumed()
    assert states(stage.there) == {"T"}
    waiting = count(stage.there)
    tree.let_run_held(NoHold())
    until(lambda: count(stage.there) > waiting + 3 or not stage.there.alive())
    assert said(stage.there, output.STDERR) == ""


@pytest.mark.long
@pytest.mark.root
def test_a_tree_whose_early_criu_has_gone_is_restored_without(staged: Stages) -> None:
    stage = staged(ALONE)
    stage.put_in_place()
    kill_early(stage)
    stage.send_the_rest()
    stage.parted.end_source()
    assert not stage.early.prepare()
    assert stage.early.why == "it has ended"
    restore_plainly(stage)


@pytest.mark.root
def test_an_early_criu_that_ends_when_told_to_go_fails_and_another_attempt_succeeds(
    staged: Stages,
) -> None:
    stage = staged(ALONE)
    stage.bring_over()
    prepared = stage.early.prepare

    def prepare() -> bool:
        done = prepared()
        kill_early(stage)
        return done

    stage.early.prepare = prepare  # type: ignore[method-assign]
    with pytest.raises(StepFailed, match="early CRIU"):
        restore(stage)
    assert tasks(stage.there) == []
    restore_plainly(stage)


@pytest.mark.root
def test_what_is_not_as_the_store_has_it_is_seen_before_the_tree_runs(staged: Stages) -> None:
    stage = staged(ALONE)
    stage.bring_over()
    file = stage.parted.images / PAGES_FILE
    right = file.read_bytes()
    with file.open("r+b") as pages:
        pages.write(bytes(byte ^ 1 for byte in right[:PAGE]) * (len(right) // PAGE))
    with pytest.raises(StepFailed, match="another page was placed"):
        restore(stage)
    assert tasks(stage.there) == []
    with file.open("r+b") as pages:
        pages.write(right)
    restore_plainly(stage)


@pytest.mark.long
@pytest.mark.root
@pytest.mark.parametrize("program", [ALONE, FAMILY], ids=["alone", "family"])
def test_a_host_without_memory_for_both_keeps_what_is_in_place_only_there(
    staged: Stages, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    stage = staged(program)
    without_room_for_both(stage, monkeypatch)
    stage.parted.end_source()
    tree, seen = restore(stage, free_after_copy=True)
    assert seen.preplaced > 100 << 20
    assert stage.kept < seen.total / 40
    is_whole_and_goes_on(stage, tree, pages=30000)


@pytest.mark.long
@pytest.mark.root
def test_what_no_mapping_takes_along_is_brought_back_before_the_tree_is_restored(
    staged: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = staged(NO_RESERVE)
    without_room_for_both(stage, monkeypatch)
    before = stage.store.lost
    stage.parted.end_source()
    tree, seen = restore(stage, free_after_copy=True)
    assert before - stage.store.lost > 60 << 20
    assert seen.bytes > 60 << 20
    is_whole_and_goes_on(stage, tree, pages=50000)


@pytest.mark.root
def test_what_a_child_takes_over_from_its_parent_is_brought_back(
    staged: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The half that each has written is its own; nothing is put in place there for it."""
    stage = staged(ALIKE)
    without_room_for_both(stage, monkeypatch)
    before = stage.store.lost
    stage.parted.end_source()
    tree, seen = restore(stage, free_after_copy=True)
    assert before - stage.store.lost > 60 << 20
    assert seen.preplaced > 100 << 20, "the parent's"
    assert stage.early.bytes - seen.preplaced < 4 << 20, "what is not used is not counted"
    assert seen.bytes > 180 << 20, "the children's"
    is_whole_and_goes_on(stage, tree, pages=50000)


@pytest.mark.long
@pytest.mark.root
def test_all_is_brought_back_when_nothing_can_be_placed(
    staged: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = staged(ALONE)
    without_room_for_both(stage, monkeypatch)
    stage.parted.end_source()

    def rare(*_: object) -> None:
        raise PrefillLost("mm-1001.img has mappings of a rare kind")

    monkeypatch.setattr(prefill, "mapped", rare)
    assert not stage.early.prepare()
    assert "of a rare kind" in stage.early.why
    assert not stage.early.held.alive()
    assert stage.store.lost == 0
    restore_plainly(stage)


@pytest.mark.long
@pytest.mark.root
def test_a_host_without_memory_for_both_lets_go_of_what_was_written_again(
    staged: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as it was not copied again."""
    stage = staged(ALONE)
    monkeypatch.setattr(early, "memory_left", lambda: SPARE - 1)
    monkeypatch.setattr(Prefill, "copy_outdated", lambda *_: False)
    stage.put_in_place()
    stage.early.halt()
    stage.send_again()
    until(lambda: stage.early.bytes < 8 << 20, 20)
    stage.store.end(memory_parts.table(stage.parted.memory))
    assert stage.store.lost == 0, "all of it has come again"
    stage.parted.end_source()
    tree, seen = restore(stage, free_after_copy=True)
    assert seen.bytes > 100 << 20
    is_whole_and_goes_on(stage, tree, pages=30000)


@pytest.mark.root
def test_what_was_written_again_is_copied_again_and_kept_once_where_memory_is_short(
    staged: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = staged(ALONE)
    stage.put_in_place()
    stage.early.halt()
    monkeypatch.setattr(early, "memory_left", lambda: SPARE + (16 << 20) - stage.kept)
    stage.send_again()
    until(lambda: stage.kept < 64 << 20, 20)
    stage.store.end(memory_parts.table(stage.parted.memory))
    stage.parted.end_source()
    tree, seen = restore(stage, free_after_copy=True)
    assert seen.preplaced + seen.bytes == seen.total
    assert seen.preplaced > 60 << 20, "the new content, in the memory that the old one had"
    is_whole_and_goes_on(stage, tree, pages=30000)


@pytest.mark.root
def test_what_lay_only_in_a_criu_that_has_gone_is_missed_and_never_read_as_zeros(
    staged: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = staged(ALONE)
    without_room_for_both(stage, monkeypatch)
    kill_early(stage)
    assert stage.early.lost == "it has ended"
    assert not stage.early.prepare()
    restore_misses_what_is_lost(stage)


@pytest.mark.root
def test_an_early_criu_ends_with_its_agent(staged: Stages) -> None:
    stage = staged(ALONE)
    stage.put_in_place()
    began = stage.early.held.tree()
    assert began
    stage.early.drop()
    assert not stage.early.held.alive()
    assert tasks(stage.there) == []
    stage.send_the_rest()
    stage.parted.end_source()
    restore_plainly(stage)
