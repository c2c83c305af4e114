# SPDX-License-Identifier: Apache-2.0
"""What the parts of the orchestrator do for each other while a capsule moves: they measure what the
move costs, keep that, and predict by the link between the two hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from migration_service_scene import SEATS, Scene, play
from waits import until_async

from liveshift.errors import Refused
from liveshift.runtime import messages
from liveshift.runtime.messages import Cost
from liveshift.runtime.migration.order import Order
from liveshift.runtime.model.gpu_asked import GpuAsked
from liveshift.runtime.model.steps import MigrationStep
from liveshift.runtime.moves import planning

COST = Cost(1.5, 1.2, 0.3, 3.1, 0.5, 0.4, 246, 500)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


# ---- what a move costs -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu", "measured"), [(None, ["begin", "end"]), (GpuAsked("h1", "1", "0"), [])]
)
def test_a_move_to_another_host_is_measured_and_a_swap_of_gpus_is_not(
    scene: Scene, gpu: GpuAsked | None, measured: list[str]
) -> None:
    scene.fleet.hosts["h1"].gpus = SEATS
    refused = Refused("it cannot move")
    scene.hosts.answers |= {messages.Inspect: [refused], messages.LookAtGpus: [refused]}
    done: list[str] = []
    costing: Any = scene.costing

    def noted(what: str) -> Any:
        async def note(migration: object) -> None:
            done.append(what)
            assert migration is scene.fleet.migrations["m1"]

        return note

    costing.begin, costing.end = noted("begin"), noted("end")

    async def act() -> None:
        to = "" if gpu else "h2"
        move = scene.migrations.start(Order(scene.job, scene.capsule, to, by="root", gpu=gpu))
        await until_async(lambda: scene.over == [move])
        await until_async(lambda: done == measured)

    play(act())
    assert done == measured


@pytest.mark.parametrize("text", ["", "cost 1.5 s of training"])
def test_a_cost_that_is_known_after_the_end_is_kept(scene: Scene, text: str) -> None:
    move = scene.a_move(1, MigrationStep.DONE)
    scene.records.begin(move, "as asked")
    move.cost = COST
    scene.records.record_cost(move, text)
    kept = scene.fleet.journal.migration(1)
    assert kept is not None
    assert kept.cost == COST
    history = scene.told("cost")
    assert history == ([(text, "root", "m1")] if text else []), "an empty text adds no line"


# ---- what a plan reckons with ------------------------------------------------------------------


def test_a_migration_asks_the_address_book_and_the_planner(scene: Scene) -> None:
    context = scene.context
    assert context.publish == scene.address_book.publish
    assert context.another_spare == scene.planner.another_spare
    assert context.predict == scene.planner.predict


def link(speed: int, **rates: float) -> messages.DataLink:
    return messages.DataLink("eth0", speed, True, rates, "")


@pytest.mark.parametrize(
    ("links", "rate"),
    [
        ((None, None), None),
        ((link(0), link(0)), None),
        ((link(0), link(8_000)), 1_000.0),
        ((link(16_000), link(8_000)), 1_000.0),
        ((link(8_000, h2=300.0), link(8_000, h1=200.0)), 300.0),
        ((link(8_000), link(8_000, h1=200.0)), 200.0),
        ((link(8_000, h0=300.0), None), 1_000.0),
    ],
)
def test_the_rate_of_a_link_is_the_measured_one_else_the_slower_interfaces(
    scene: Scene,
    monkeypatch: pytest.MonkeyPatch,
    links: tuple[messages.DataLink | None, messages.DataLink | None],
    rate: float | None,
) -> None:
    """Speeds are in bit/s, rates in bytes per second."""
    scene.fleet.hosts["h1"].link, scene.fleet.hosts["h2"].link = links
    given: list[Any] = []
    monkeypatch.setattr(planning, "costed", lambda *which: given.append(which[3]))

    async def act() -> None:
        await scene.planner.plan(Order(scene.job, scene.capsule, "h2", by="root"))

    play(act())
    assert given == [rate]
