# SPDX-License-Identifier: Apache-2.0
"""A move is not refused for what a snapshot's CRIU does to the processes at that moment."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from preflight_scene import NOTHING

from liveshift.criu_glue.survey.found import Survey
from liveshift.runtime.agent.migration_registry import MigrationRegistry

SOCKET = replace(NOTHING, problems=(("process 1001 is connected to process 904", "end it"),))


class Scene(MigrationRegistry):
    """``dumps``: whether CRIU is at work, at each question; then never again."""

    def __init__(self, found: list[Survey], dumps: list[bool], prepare_s: float = 10.0) -> None:
        timeouts = SimpleNamespace(prepare=prepare_s)
        self._capsule_table = cast(Any, SimpleNamespace(cluster=SimpleNamespace(timeouts=timeouts)))
        self.snapshots = cast(
            Any, SimpleNamespace(dumps=lambda _: dumps.pop(0) if dumps else False)
        )
        self._found = found
        self.surveys = 0

    async def _survey(self, resident: object) -> Survey:
        self.surveys += 1
        return self._found.pop(0)

    def look(self) -> Survey:
        resident: Any = SimpleNamespace(spec=SimpleNamespace(name="gpt/1"))
        return asyncio.run(self.surveyed(resident))


@pytest.mark.parametrize("dumps", [[True, False], [False, True, True, False], [True, True, True]])
def test_what_is_found_beside_a_dump_is_looked_at_again(dumps: list[bool]) -> None:
    scene = Scene([SOCKET, NOTHING], dumps)
    assert scene.look() is NOTHING
    assert scene.surveys == 2


@pytest.mark.parametrize(("found", "dumps"), [(SOCKET, []), (NOTHING, [True, True])])
def test_else_one_look_is_enough(found: Survey, dumps: list[bool]) -> None:
    scene = Scene([found], dumps)
    assert scene.look() is found
    assert scene.surveys == 1


def test_it_does_not_wait_for_ever() -> None:
    scene = Scene([SOCKET] * 1000, [True] * 100_000, prepare_s=0.1)
    assert scene.look() is SOCKET
