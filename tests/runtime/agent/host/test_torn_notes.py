# SPDX-License-Identifier: Apache-2.0
"""A host that loses its power soon after a note was written may have an empty file in its place."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from liveshift.errors import LiveshiftError
from liveshift.runtime.agent.host import carried_out
from liveshift.runtime.agent.host.running_capsule import NOTE, CapsuleFactory
from liveshift.runtime.config import cluster as config

CLUSTER = """
[cluster]
name = "c"
orchestrator = "10.88.0.2:7400"
overlay = "10.99.0.0/16"
[hosts.h0]
address = "10.88.0.10"
[paths]
state = "{state}"
"""


@pytest.fixture
def factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CapsuleFactory:
    place = "liveshift.runtime.agent.host.running_capsule.network.end_namespace"
    monkeypatch.setattr(place, lambda name: None)
    return CapsuleFactory(config.parse(CLUSTER.format(state=tmp_path)).cluster, "h0")


def noted(factory: CapsuleFactory, raw: bytes) -> Path:
    directory = factory.cluster.paths.state / "capsules" / "gpt.1"
    directory.mkdir(parents=True)
    (directory / NOTE).write_bytes(raw)
    return directory


def test_a_capsule_with_an_empty_note_went_down_with_the_host(factory: CapsuleFactory) -> None:
    directory = noted(factory, b"")
    factory.clear_unfinished(set())
    assert not directory.exists()
    assert factory.returning() == []


def test_a_note_of_another_version_is_named_and_its_capsule_is_not_touched(
    factory: CapsuleFactory,
) -> None:
    directory = noted(factory, b"\x81\xa1x\x01")
    factory.clear_unfinished(set())
    with pytest.raises(LiveshiftError, match=f"cannot read what {directory}") as caught:
        factory.returning()
    assert f"remove {directory}" in str(caught.value.hint)
    assert directory.exists()


def test_an_empty_list_of_what_left_removes_nothing_and_is_used_up(
    factory: CapsuleFactory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    note = tmp_path / "carried-out" / "gpt.1"
    note.parent.mkdir()
    note.touch()
    with caplog.at_level(logging.WARNING):
        carried_out.reconcile(factory, "gpt/1", {"/data": set()})
    assert "files that gpt/1 took along before may be back" in caplog.text
    assert not note.exists()
