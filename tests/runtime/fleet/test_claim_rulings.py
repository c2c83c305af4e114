# SPDX-License-Identifier: Apache-2.0
"""What the orchestrator rules on copies that hosts hold, with its real journal: nothing is said
before it is durable. The rules themselves are test_ownership.py's."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from journal_rows import row
from orchestrator_parts import Parts, parts

from liveshift.errors import LiveshiftError, Refused, Unreachable
from liveshift.runtime import messages
from liveshift.runtime.fleet.agents import Agents
from liveshift.runtime.fleet.fleet import Fleet
from liveshift.runtime.journal.journal import Journal
from liveshift.runtime.migration.host_migration import HostMigration
from liveshift.runtime.migration.order import Order
from liveshift.runtime.model import run_spec
from liveshift.runtime.model.ownership import Side
from liveshift.runtime.model.snapshots import HELD, Generation
from liveshift.runtime.model.steps import MigrationStep

__all__ = ["parts"]


def seen(parts: Parts) -> tuple[Any, Any]:
    """The fleet, and its capsule gpt/1, which h1 has under epoch 1."""
    fleet = parts.fleet
    return fleet, fleet.jobs["gpt"].capsules["gpt/1"]


def in_the_file(fleet: Any) -> tuple[str, int, int]:
    """Host, epoch and granted of gpt/1, as an orchestrator that is started anew finds them."""
    journal = Journal(fleet.journal.file.path)
    (found,) = [each for each in journal.capsules("gpt") if each[0] == "gpt/1"]
    journal.file.close()
    return found[3], found[4], found[6]


def claim(side: Side, epoch: int, ready: bool = True, capsule: str = "gpt/1") -> messages.Claim:
    return messages.Claim("m1", capsule, side.value, epoch, ready=ready)


def test_a_capsule_passes_on_only_while_it_cannot_run(parts: Parts) -> None:
    fleet, capsule = seen(parts)
    with pytest.raises(Refused, match="gpt/1 may run on h1: it cannot pass to h2"):
        parts.context.commit(capsule, "h2", still=False)
    assert in_the_file(fleet)[:2] == ("h1", 1)
    parts.context.commit(capsule, "h2", still=True)
    assert (capsule.host, capsule.epoch, capsule.granted) == ("h2", 2, False)
    assert in_the_file(fleet) == ("h2", 2, 0)
    parts.context.commit(capsule, "h0", still=False)  # nobody was let run it meanwhile
    assert in_the_file(fleet) == ("h0", 3, 0)
    capsule.code = 0
    with pytest.raises(Refused, match="gpt/1 has ended with code 0"):
        parts.context.commit(capsule, "h1", still=True)
    assert in_the_file(fleet) == ("h0", 3, 0)


def test_a_grant_is_durable_before_it_is_said_and_said_to_one_that_is_ready(
    parts: Parts,
) -> None:
    fleet, capsule = seen(parts)
    parts.context.commit(capsule, "h2", still=True)
    assert parts.claims.rule("h2", claim(Side.COMING, 2, ready=False)) == messages.Ruled("wait", 2)
    assert (capsule.granted, in_the_file(fleet)[2]) == (False, 0)
    assert parts.claims.rule("h2", claim(Side.COMING, 2)) == messages.Ruled("run", 2)
    assert (capsule.granted, in_the_file(fleet)[2]) == (True, 1)
    assert parts.claims.rule("h2", claim(Side.COMING, 2)) == messages.Ruled("run", 2), (
        "the same again"
    )
    assert parts.claims.rule("h0", claim(Side.COMING, 2)) == messages.Ruled("end", 2)
    assert parts.claims.rule("h1", claim(Side.LEAVING, 1)) == messages.Ruled("end", 2)
    capsule.code = 0
    assert parts.claims.rule("h2", claim(Side.COMING, 2)) == messages.Ruled("end", 2), (
        "its job is over"
    )


@pytest.mark.parametrize(
    ("state", "ruling"), [("failed", "run"), ("done", "end"), ("freezing", "wait")]
)
def test_a_move_of_the_past_is_ruled_by_what_the_journal_says(
    parts: Parts, state: str, ruling: str
) -> None:
    fleet, _ = seen(parts)
    fleet.journal.save_migration(1, row(1, state=state))
    assert parts.claims.rule("h1", claim(Side.LEAVING, 1)).ruling == ruling


@pytest.mark.parametrize("known", [True, False])
def test_a_claim_that_names_another_capsule_s_move_decides_nothing_of_it(
    parts: Parts, known: bool
) -> None:
    """That one could not go on from its complete image, if its source was lost then."""
    fleet, capsule = seen(parts)
    other = fleet.jobs["gpt"].capsules["gpt/0"]
    move = HostMigration(parts.context, 1, Order(fleet.jobs["gpt"], other, "h2"))
    move.step = MigrationStep.ROLLING_BACK
    if known:
        fleet.migrations["m1"], other.migration = move, "m1"
    fleet.journal.save_migration(1, row(1, "gpt/0", state="freezing"))
    assert parts.claims.rule("h1", claim(Side.LEAVING, 1)).ruling == "run", "as if there was none"
    assert not move.released
    step = fleet.journal.migration(1).state
    assert step == "freezing", "it is not written either"
    if known:
        own = claim(Side.LEAVING, 1, capsule="gpt/0")
        assert parts.claims.rule(other.host, own).ruling == "run"
        assert move.released
    assert capsule.granted


def test_a_job_that_was_forgotten_leaves_nothing_and_an_unknown_one_is_let_alone(
    parts: Parts,
) -> None:
    fleet, _ = seen(parts)
    fleet.journal.remove_job("gpt")
    del fleet.jobs["gpt"]
    assert parts.claims.rule("h1", claim(Side.COMING, 1)) == messages.Ruled("end", 1)
    assert parts.claims.rule("h1", claim(Side.COMING, 2)) == messages.Ruled("wait", 0)
    assert parts.claims.rule("h1", claim(Side.COMING, 1, capsule="bert/1")) == messages.Ruled(
        "wait", 0
    )


def test_a_copy_of_before_a_rewind_ends_and_one_of_now_runs(parts: Parts) -> None:
    """Also where its host owns the capsule again: it stayed there."""
    fleet, capsule = seen(parts)
    job, tables = fleet.jobs["gpt"], fleet.journal.snapshots
    fleet.journal.save_migration(1, row(1, state="failed"))
    snapshot = snapshot_taken(fleet)
    earlier, now = claim(Side.LEAVING, 1), claim(Side.COMING, 3)
    assert parts.claims.rule("h1", earlier) == messages.Ruled("run", 1)
    rewind = tables.rewind("gpt", snapshot, {"gpt/0": "h2", "gpt/1": "h1"}, "h0 is lost")
    job.rewinds = rewind.rewinds
    for each in job.capsules.values():
        each.host, each.epoch = rewind.owners[each.name]
        each.granted = False
    assert parts.claims.rule("h1", earlier) == messages.Ruled("end", 3)
    assert parts.claims.rule("h1", now) == messages.Ruled("end", 3), "made under no rewind"
    assert in_the_file(fleet) == ("h1", 3, 0)
    restored = msgspec.structs.replace(now, migration="r1.1", rewinds=1)
    waits = msgspec.structs.replace(restored, ready=False)
    assert parts.claims.rule("h1", waits) == messages.Ruled("wait", 3)
    assert parts.claims.rule("h1", restored) == messages.Ruled("run", 3)
    assert in_the_file(fleet) == ("h1", 3, 1)
    assert capsule.granted


def snapshot_taken(fleet: Any) -> int:
    """Take a snapshot of gpt; return its number."""
    number: int = fleet.journal.snapshots.begin_snapshot("gpt")
    owners = {c.name: (c.host, c.epoch) for c in fleet.jobs["gpt"].capsules.values()}
    fleet.journal.snapshots.complete_snapshot(
        Generation(number, "gpt", "", 5.0, 0, owners, {name: ["h2"] for name in owners})
    )
    return number


def test_an_image_is_held_until_a_newer_snapshot_is_complete(parts: Parts) -> None:
    fleet, _ = seen(parts)
    job = fleet.jobs["gpt"]

    def ruling(image: str, capsule: str = "gpt/1") -> str:
        held = messages.Claim(image, capsule, HELD, 1, ready=False)
        found: str = parts.claims.rule("h2", held).ruling
        return found

    assert ruling("s1.1") == "end"
    job.taking = 1
    assert ruling("s1.1") == "wait"
    snapshot_taken(fleet)
    job.newest, job.taking = fleet.journal.snapshots.newest("gpt"), 2
    assert [ruling(f"s{n}.1") for n in (1, 2, 3)] == ["wait", "wait", "end"]
    snapshot_taken(fleet)
    job.newest, job.taking = fleet.journal.snapshots.newest("gpt"), 0
    assert [ruling(f"s{n}.1") for n in (1, 2)] == ["end", "wait"]
    job.state = "ending"
    assert ruling("s2.1") == "wait", "it may not have ended everywhere"
    job.state = "ended"
    assert ruling("s2.1") == "end"
    with pytest.raises(LiveshiftError, match='h2 claims an image "m1", which has no number'):
        ruling("m1")
    assert ruling("s9.0", "bert/0") == "wait", "no journal of this cluster may know it"
    fleet.journal.remove_job("gpt")
    del fleet.jobs["gpt"]
    assert ruling("s2.1") == "end"


def test_the_host_of_a_capsule_keeps_its_copy_as_long_as_a_holder_keeps_the_image(
    parts: Parts,
) -> None:
    fleet, capsule = seen(parts)
    job = fleet.jobs["gpt"]
    snapshot_taken(fleet)
    job.newest, job.taking = fleet.journal.snapshots.newest("gpt"), 0
    assert job.newest is not None
    others = {"h0", "h1"} - {capsule.host}

    def ruling(host: str, *, whole: bool = True) -> str:
        held = messages.Claim("s1.1", capsule.name, HELD, 1, ready=whole)
        found: str = parts.claims.rule(host, held).ruling
        return found

    assert (capsule.name, job.newest.owners[capsule.name][0]) == ("gpt/1", capsule.host)
    assert [ruling(host) for host in ("h2", capsule.host, *others)] == ["wait", "wait", "end"]
    assert ruling("h2", whole=False) == "wait"
    assert ruling(capsule.host, whole=False) == "end", "it did not come with the snapshot"
    job.taking = 1
    assert ruling(capsule.host, whole=False) == "wait", "it comes"
    job.taking, job.state = 0, "rewinding"
    assert ruling(capsule.host) == "wait"
    job.state = "suspended"
    assert [ruling(host) for host in ("h2", capsule.host)] == ["wait", "end"]
    assert ruling("h2", whole=False) == "end", "a part of a copy, and h2 has lost its image"
    job.copying_to["s1.1"] = "h2"
    assert [ruling(host, whole=False) for host in ("h2", capsule.host)] == ["wait", "end"]
    job.copying_to.clear()
    job.state = "running"
    job.newest = replace(job.newest, holders={}, directory="/saved")
    assert [ruling(host) for host in ("h2", capsule.host)] == ["end", "end"]


def test_an_orchestrator_finds_counts_and_snapshots_again(parts: Parts) -> None:
    fleet, _ = seen(parts)
    snapshot = snapshot_taken(fleet)
    fleet.journal.snapshots.begin_snapshot("gpt")
    plan = {"gpt/0": "h2", "gpt/1": "h1"}
    fleet.journal.snapshots.rewind("gpt", snapshot, plan, "h0 is lost")
    run = fleet.jobs["gpt"].request
    fleet.journal.file.write("UPDATE jobs SET spec = ?", (run_spec.encode(run, 0),))
    again = Fleet(fleet.cluster).jobs["gpt"]
    assert (again.state, again.rewinds, again.taking) == ("rewinding", 1, 0)
    assert again.newest is not None
    assert again.newest.number == snapshot
    assert again.book().rewinds == 1
    assert {c.name: (c.host, c.epoch, c.granted) for c in again.capsules.values()} == {
        "gpt/0": ("h2", 3, False),
        "gpt/1": ("h1", 3, False),
    }


def test_what_cannot_move_is_refused_before_anything_is_written(parts: Parts) -> None:
    fleet, capsule = seen(parts)
    job = fleet.jobs["gpt"]
    before = fleet.journal.file.changes

    def refused() -> str:
        with pytest.raises((Refused, Unreachable)) as caught:
            parts.migrations.start(Order(job, capsule, "h2", "", "root"))
        return str(caught.value)

    capsule.migration = "m7"
    assert refused() == "gpt/1 is moving already (m7)"
    capsule.migration, capsule.code = None, 3
    assert refused() == "gpt/1 has ended with code 3"
    capsule.code, job.state = None, "ended"
    assert refused().startswith("gpt/1 has ended")
    job.state = "ending"
    assert refused().startswith("gpt is being ended")
    job.state, fleet.hosts["h1"].heard = "running", time.monotonic() - 3600
    assert refused().startswith("the agent on h1, where gpt/1 runs, does not answer")
    assert fleet.journal.file.changes == before
    assert fleet.under_way() == []


def test_an_answer_is_waited_for_while_its_host_is_up(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("liveshift.runtime.fleet.agents.LIVENESS_CHECK_S", 0.01)
    fleet, _ = seen(parts)
    cancelled: list[str] = []

    async def never(*_: object) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append("asking")
            raise

    async def at_last(*_: object) -> str:
        await asyncio.sleep(0.05)
        return "an answer"

    async def scene() -> None:
        agents = Agents(fleet, cast(Any, SimpleNamespace(request=at_last)))
        answer: object = await agents.request("h1", messages.OpenGate("gpt"), 5.0)
        assert answer == "an answer"
        fleet.hosts["h1"].heard = time.monotonic() - 3600
        agents = Agents(fleet, cast(Any, SimpleNamespace(request=never)))
        with pytest.raises(Unreachable, match="h1 stopped answering during the request to let"):
            await agents.request("h1", messages.OpenGate("gpt"), 5.0)
        await asyncio.sleep(0)
        assert cancelled == ["asking"], "it is not waited for any more"

    asyncio.run(scene())


def test_a_request_that_nobody_waits_for_any_more_is_given_up(parts: Parts) -> None:
    fleet, _ = seen(parts)
    given_up: list[str] = []

    async def never(*_: object) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            given_up.append("asking")

    async def scene() -> None:
        agents = Agents(fleet, cast(Any, SimpleNamespace(request=never)))
        asking = asyncio.create_task(agents.request("h1", messages.OpenGate("gpt"), 60.0))
        await asyncio.sleep(0.01)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await asyncio.sleep(0)
        assert given_up == ["asking"]

    asyncio.run(scene())


def test_hosts_that_failed_a_capsule_are_known_and_its_end_is_told(parts: Parts) -> None:
    fleet, capsule = seen(parts)
    over: list[str] = []

    async def ended(migration: Any) -> None:
        over.append(migration.name)

    async def work() -> None:
        pass

    async def scene() -> None:
        here = Parts(fleet, None, ended)
        planner, service = cast(Any, here.planner), cast(Any, here.migrations)
        move = HostMigration(here.context, 1, Order(fleet.jobs["gpt"], capsule, "h2"))
        fleet.migrations["m1"], capsule.migration = move, "m1"
        assert planner._failed_at(capsule) == set()
        move.step = MigrationStep.FAILED
        here.records.record(move)
        assert capsule.migration is None
        assert planner._failed_at(capsule) == {"h2"}
        await service._follow(move, work())

    asyncio.run(scene())
    assert over == ["m1"]
