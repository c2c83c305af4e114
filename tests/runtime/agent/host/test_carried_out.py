# SPDX-License-Identifier: Apache-2.0
"""What a capsule took along from carried paths, and has deleted elsewhere, does not reappear."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from cluster_files import SMALL

from liveshift.criu_glue.files import trees
from liveshift.criu_glue.files.trees import Tree
from liveshift.runtime.agent.host import carried_out
from liveshift.runtime.agent.host.running_capsule import CapsuleFactory
from liveshift.runtime.config.cluster import parse


def reconcile(factory: CapsuleFactory, capsule: str, came: dict[str, set[str]]) -> None:
    carried_out.reconcile(factory, capsule, carried_out.left_here(factory, capsule), came)


def test_what_was_taken_along_and_deleted_elsewhere_does_not_reappear(tmp_path: Path) -> None:
    carried = tmp_path / "carried"
    text = f'{SMALL}[files]\ncarried = ["{carried}"]\n[paths]\nstate = "{tmp_path}/state"\n'
    factory = CapsuleFactory(parse(text).cluster, "h0")
    (carried / "sub").mkdir(parents=True)
    for name in ("kept", "deleted elsewhere", "sub/deleted too", "another job's"):
        (carried / name).write_bytes(b"x")
    (carried / "deleted elsewhere, used here").write_bytes(b"x")
    names = {"kept", "deleted elsewhere", "deleted elsewhere, used here", "sub", "sub/deleted too"}
    every = trees.listing(Tree("carried", carried))
    taken = {str(carried): {name: every[name] for name in names}}
    (carried / "deleted elsewhere, used here").write_bytes(b"another job's lines")
    carried_out.remember(factory, "gpt/1", taken)
    reconcile(factory, "gpt/0", {})  # somebody else comes
    carried_out.remember(factory, "gpt/2", taken)
    carried_out.drop_note(factory, "gpt/2")  # it goes back to a snapshot
    reconcile(factory, "gpt/2", {str(carried): set()})  # the note is used up
    assert len(list(carried.rglob("*"))) == 6
    reconcile(factory, "gpt/1", {str(carried): {"kept", "new"}})
    left = {p.name for p in carried.rglob("*")}
    assert left == {"kept", "another job's", "deleted elsewhere, used here"}
    (carried / "deleted elsewhere").touch()
    taken = {str(carried): trees.listing(Tree("carried", carried))}
    reconcile(factory, "gpt/1", {str(carried): set()})  # the note is used up
    assert (carried / "deleted elsewhere").exists()
    carried_out.remember(factory, "gpt/1", taken)
    carried_out.remember(factory, "gptx/1", taken)
    carried_out.forget_job(factory, "gpt")
    reconcile(factory, "gpt/1", {str(carried): set()})
    assert (carried / "deleted elsewhere").exists()
    reconcile(factory, "gptx/1", {str(carried): set()})
    assert not (carried / "deleted elsewhere").exists()


def test_what_a_failed_move_has_brought_is_added(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    factory = CapsuleFactory(parse(f'{SMALL}[paths]\nstate = "{tmp_path}"\n').cluster, "h0")
    assert carried_out.left_here(factory, "gpt/1") == {}
    carried_out.add(factory, "gpt/1", {"/data": {}})
    assert not (tmp_path / "carried-out").exists()
    carried_out.remember(
        factory,
        "gpt/1",
        {"/data": {"a": (1, 2, 3, 4), "b": (1, 2, 3, 4), "\udcff\n": (1, 2, 3, 4)}},
    )
    carried_out.add(factory, "gpt/1", {"/data": {"b": (5, 6, 7, 8)}, "/more": {"c": (1, 2, 3, 4)}})
    assert carried_out.left_here(factory, "gpt/1") == {
        "/data": {"a": (1, 2, 3, 4), "b": (5, 6, 7, 8), "\udcff\n": (1, 2, 3, 4)},
        "/more": {"c": (1, 2, 3, 4)},
    }
    assert carried_out.left_here(factory, "gpt/0") == {}
    (tmp_path / "carried-out" / "gpt.1.new").mkdir()
    carried_out.add(factory, "gpt/1", {"/data": {"d": (1, 2, 3, 4)}})
    assert "that files of gpt/1 are here cannot be noted" in caplog.text


def test_an_empty_list_of_what_left_removes_nothing_and_is_used_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    factory = CapsuleFactory(parse(f'{SMALL}[paths]\nstate = "{tmp_path}"\n').cluster, "h0")
    note = tmp_path / "carried-out" / "gpt.1"
    note.parent.mkdir()
    note.touch()
    with caplog.at_level(logging.WARNING):
        reconcile(factory, "gpt/1", {"/data": set()})
    assert "files that gpt/1 took along before may be back" in caplog.text
    assert not note.exists()
