# SPDX-License-Identifier: Apache-2.0
"""A host that loses its power soon after a note was written may have an empty file in its place."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster_files import SMALL

from liveshift.errors import LiveshiftError
from liveshift.runtime.agent.host.running_capsule import NOTE, CapsuleFactory
from liveshift.runtime.config.cluster import parse

CLUSTER = f'{SMALL}[paths]\nstate = "{{state}}"\n'


@pytest.fixture
def factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CapsuleFactory:
    place = "liveshift.runtime.agent.host.running_capsule.network.end_namespace"
    monkeypatch.setattr(place, lambda name: None)
    return CapsuleFactory(parse(CLUSTER.format(state=tmp_path)).cluster, "h0")


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
