# SPDX-License-Identifier: Apache-2.0
"""A dump or a restore that failed is shown by the next plan, until a move has come about."""

from __future__ import annotations

import asyncio
import time

import pytest
from migration_stage import FACTS, SURVEY
from orchestrator_parts import Parts, parts

from liveshift.errors import LiveshiftError, Refused, SourceFailed, StepFailed
from liveshift.runtime import messages
from liveshift.runtime.migration.host_migration import HostMigration
from liveshift.runtime.migration.order import Order
from liveshift.runtime.model.steps import MigrationStep

__all__ = ["parts"]


async def answers(_host: str, word: messages.Message, _limit: float) -> messages.Message:
    if isinstance(word, messages.Inspect):
        return messages.Inspected(SURVEY, FACTS, 5)
    return messages.Reserved([("CRIU", "4.2.1")], "")


def test_the_next_plan_warns_of_it_until_a_move_has_come_about(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts.agents, "request", answers)
    fleet = parts.fleet
    job = fleet.jobs["gpt"]
    capsule = job.capsules["gpt/1"]

    def ends(number: int, step: MigrationStep, error: LiveshiftError | None) -> None:
        move = HostMigration(parts.context, number, Order(job, capsule, "h2", "", "root"))
        fleet.migrations[move.name] = move
        move.step, move.error = step, error
        parts.records.record(move)

    async def warnings() -> list[str]:
        planned = await parts.planner.plan(Order(job, capsule, "h2"))
        return [found for what, found in planned.checks if what == "warning"]

    async def story() -> None:
        assert await warnings() == []
        ends(1, MigrationStep.FAILED, SourceFailed("dump", "CRIU could not dump gpt/1: Error: new"))
        first = "its last move from here, m1, failed: dump: CRIU could not dump gpt/1: Error: new"
        assert await warnings() == [first]
        ends(2, MigrationStep.FAILED, Refused("cancelled by root"))
        ends(3, MigrationStep.FAILED, StepFailed("ship", "the link broke"))
        assert await warnings() == [first], "these say nothing of the capsule"
        ends(4, MigrationStep.FAILED, StepFailed("restore", "CRIU could not restore gpt/1: so"))
        (second,) = await warnings()
        assert second.endswith("m4, failed: restore: CRIU could not restore gpt/1: so")
        ends(5, MigrationStep.DONE, None)
        assert await warnings() == []

    asyncio.run(story())


def test_a_host_that_a_job_has_left_for_its_links_is_the_last_choice(parts: Parts) -> None:
    fleet = parts.fleet
    for host in fleet.hosts.values():
        host.heard = time.monotonic()
    job = fleet.jobs["gpt"]
    order = Order(job, job.capsules["gpt/1"])
    first = parts.planner.resolve(order)[0].destination
    fleet.left_hosts.note([first], [])
    second = parts.planner.resolve(order)[0].destination
    assert second not in ("", first)
    fleet.left_hosts.note(fleet.hosts, [])
    assert parts.planner.resolve(order)[0].destination == first, "it is better than none"
