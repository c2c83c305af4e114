# SPDX-License-Identifier: Apache-2.0
"""How the ends of capsules become the end of their job, in memory and in the journal."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path
from typing import Any, cast

import pytest
from fleet_scene import a_fleet
from journal_rows import row
from migration_stage import Stage
from orchestrator_parts import Parts

from liveshift.criu_glue.network.overlay import Overlay
from liveshift.errors import Refused, Unreachable
from liveshift.launcher.show.moves import outcome, raise_if_failed
from liveshift.runtime.fleet.endings import Endings
from liveshift.runtime.fleet.fleet import Fleet
from liveshift.runtime.messages import Forget, Message, RunJob, StartPrecopy
from liveshift.runtime.migration.host_migration import HostMigration
from liveshift.runtime.migration.order import Order
from liveshift.runtime.model.jobs import Capsule, Job
from liveshift.runtime.model.steps import MigrationStep


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return a_fleet(tmp_path)


class Idle:
    """In place of what ends the rest of a job."""

    def end_rest(self, job: Job) -> None:
        assert job.state == "ending"


def end(fleet: Fleet, capsule: str, code: int) -> None:
    async def told() -> None:
        job = fleet.jobs["a"]
        Endings(fleet, cast(Any, None), cast(Any, Idle())).capsule_ended(
            job, job.capsules[capsule], code
        )

    asyncio.run(told())


def journalled(fleet: Fleet) -> tuple[str, int | None, list[int | None]]:
    """The job's state and code, and its capsules' codes, as after a restart."""
    (job,) = fleet.journal.jobs()
    return job[5], job[6], [capsule[5] for capsule in fleet.journal.capsules("a")]


def history(fleet: Fleet) -> list[tuple[str, str]]:
    return [(event.subject, event.text) for event in fleet.journal.events("", 0)]


def test_the_last_capsule_ends_the_job(fleet: Fleet) -> None:
    end(fleet, "a/1", 0)
    assert (fleet.jobs["a"].state, fleet.jobs["a"].code) == ("running", None)
    assert journalled(fleet) == ("running", None, [None, 0])
    end(fleet, "a/0", 0)
    assert (fleet.jobs["a"].state, fleet.jobs["a"].code) == ("ended", 0)
    assert journalled(fleet) == ("ended", 0, [0, 0])
    assert history(fleet) == [
        ("a/1", "ended on h1 with code 0"),
        ("a/0", "ended on h0 with code 0"),
        ("a", "ended with code 0"),
    ]


@pytest.mark.parametrize(("code", "asked"), [(0, 0.0), (137, 0.0), (143, 5.0)])
def test_a_job_that_fails_is_told_where_it_was_saved(fleet: Fleet, code: int, asked: float) -> None:
    """One that a person stops is not: it is where that person wants it."""
    fleet.journal.snapshots.note_saved("a", "s3", "/kept", 1_790_000_000.0)
    fleet.jobs["a"].end_asked = asked
    for capsule in ("a/0", "a/1"):
        end(fleet, capsule, code)
    last = history(fleet)[-1][1]
    assert last.startswith(f"ended with code {code}")
    offered = " is in /kept: `liveshift resume a --from /kept` goes back to it"
    assert last.endswith(offered) == (code == 137)


def test_the_first_failure_is_the_job_s(fleet: Fleet) -> None:
    end(fleet, "a/1", 3)
    assert (fleet.jobs["a"].state, fleet.jobs["a"].code) == ("ending", 3)
    end(fleet, "a/0", 143)
    assert (fleet.jobs["a"].state, fleet.jobs["a"].code) == ("ended", 3)
    assert journalled(fleet) == ("ended", 3, [143, 3])


def test_an_end_that_is_told_twice_counts_once(fleet: Fleet) -> None:
    end(fleet, "a/1", 0)
    end(fleet, "a/1", 137)
    assert fleet.jobs["a"].capsules["a/1"].code == 0
    assert len(history(fleet)) == 1


def test_what_could_not_be_written_has_not_happened(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent tells it again: then it is written, all of it."""
    end(fleet, "a/1", 0)
    with monkeypatch.context() as patch:
        full = sqlite3.OperationalError("database or disk is full")

        def set_job(*_: object) -> None:
            raise full

        patch.setattr(fleet.journal, "set_job", set_job)
        with pytest.raises(sqlite3.OperationalError, match="disk is full"):
            end(fleet, "a/0", 0)
    job = fleet.jobs["a"]
    assert (job.state, job.code, job.capsules["a/0"].code) == ("running", None, None)
    assert journalled(fleet) == ("running", None, [None, 0])
    assert len(history(fleet)) == 1
    end(fleet, "a/0", 0)
    assert journalled(fleet) == ("ended", 0, [0, 0])
    assert len(history(fleet)) == 3


def test_as_many_ended_jobs_are_kept_as_the_cluster_file_says(tmp_path: Path) -> None:
    """The oldest go, with their output on the hosts; names that liveshift made do not return."""
    forgotten: list[str] = []

    class Switchboard:
        async def request(self, host: str, word: Any, _limit: float) -> None:
            forgotten.append(word.job)

    async def scene() -> None:
        fleet = a_fleet(tmp_path, "[jobs]\nkeep_ended = 2\n")
        fleet.up = lambda: ["h0"]  # type: ignore[method-assign]
        endings = Endings(fleet, cast(Any, Switchboard()), cast(Any, Idle()))
        for number in range(2, 6):
            name = f"job{number}"
            fleet.journal.add_job(name, number, "10.99.0.0/24", b"", {f"{name}/0": (0, "h0")})
            capsules = {f"{name}/0": Capsule(f"{name}/0", 0, "h0", 1)}
            run = RunJob(name, 1, ["true"], {}, "/", 0, [])
            overlay = Overlay(number, "10.99.0.0/24")
            job = fleet.jobs[name] = Job(name, overlay, run, 0, float(number), capsules)
            endings.capsule_ended(job, capsules[f"{name}/0"], 0)
            await asyncio.sleep(0.01)
        async with asyncio.timeout(60):
            while [name for name, job in fleet.jobs.items() if job.state == "ended"] != [
                "job4",
                "job5",
            ]:
                await asyncio.sleep(0.01)
        assert forgotten == ["job2", "job3"]
        assert fleet.journal.next_number() == 6

    asyncio.run(scene())


def test_the_job_that_ended_first_is_forgotten_first(tmp_path: Path) -> None:
    """Whichever started first, also after a restart: a job that has trained for days keeps its
    output when it ends."""

    class Switchboard:
        async def request(self, _host: str, _word: Any, _limit: float) -> None: ...

    async def end(fleet: Fleet, *names: str) -> list[str]:
        """The jobs that are left."""
        fleet.up = lambda: ["h0"]  # type: ignore[method-assign]
        endings = Endings(fleet, cast(Any, Switchboard()), cast(Any, Idle()))
        for name in names:
            for capsule in fleet.jobs[name].capsules.values():
                endings.capsule_ended(fleet.jobs[name], capsule, 0)
            await asyncio.gather(*endings._tasks._running)
        return list(fleet.jobs)

    fleet = a_fleet(tmp_path, "[jobs]\nkeep_ended = 2\n")
    (_, _, _, spec, *_) = fleet.journal.jobs()[0]
    for number in range(2, 6):
        name = f"job{number}"
        fleet.journal.add_job(name, number, f"10.99.{number}.0/24", spec, {f"{name}/0": (0, "h0")})
    fleet.jobs = fleet._load_jobs()
    assert list(fleet.jobs) == ["a", "job2", "job3", "job4", "job5"]
    left = asyncio.run(end(fleet, "job2", "job3", "a"))
    assert left == ["a", "job3", "job4", "job5"]
    fleet.journal.file.close()
    again = Fleet(fleet.cluster)
    assert list(again.jobs) == left
    assert asyncio.run(end(again, "job4")) == ["a", "job4", "job5"]
    assert asyncio.run(end(again, "job5")) == ["job4", "job5"]


def test_a_capsule_that_ends_ends_its_move_at_once(fleet: Fleet) -> None:
    """Whatever its source is still asked for; what became of it has words of its own."""
    job = fleet.jobs["a"]
    capsule = job.capsules["a/1"]

    class Copying(Stage):
        async def request(self, host: str, message: Message, timeout: float) -> Message | None:
            if isinstance(message, StartPrecopy):
                asyncio.get_running_loop().call_soon(endings.capsule_ended, job, capsule, 0)
                await asyncio.sleep(600)
            return await super().request(host, message, timeout)

    endings = Endings(fleet, cast(Any, None), cast(Any, Idle()))
    stage = Copying()
    stage.capsule = capsule
    move = HostMigration(stage, 7, Order(job, capsule, "h2", "h1 is tainted", "root"))
    fleet.migrations["m7"], capsule.migration = move, "m7"
    asyncio.run(asyncio.wait_for(move.run(), 20))
    assert stage.steps == [
        MigrationStep.PRECOPYING,
        MigrationStep.ROLLING_BACK,
        MigrationStep.JOB_ENDED,
    ]
    assert str(move.error) == "a/1 ended with code 0 before it could move h1 → h2"


def test_a_move_whose_job_ended_while_no_orchestrator_ran_has_that_as_its_outcome(
    fleet: Fleet,
) -> None:
    """The journal still has it under way; nobody is asked about it, and it is not told of again."""
    fleet.journal.save_migration(7, row(7, "gone/1", MigrationStep.PRECOPYING.value))
    under_way = fleet.journal.migrations_under_way()
    assert [number for number, _ in under_way] == [7]
    Parts(fleet).migrations.recover()
    ended = fleet.journal.migration(7)
    assert ended is not None
    assert ended.state == MigrationStep.JOB_ENDED.value
    assert outcome(ended) == "the job of gone/1 ended while no orchestrator ran"
    with pytest.raises(Refused, match="the job of gone/1 ended while no orchestrator ran"):
        raise_if_failed(ended)
    assert fleet.journal.migrations_under_way() == []
    assert fleet.migrations == {}


def test_a_job_has_its_name_and_its_subnet_until_the_hosts_have_let_go_of_it(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new job would have its network taken by a host that is still taking away the old one."""
    told: list[str] = []

    async def scene() -> None:
        let_go = asyncio.Event()

        class Switchboard:
            async def request(self, host: str, word: Any, _limit: float) -> None:
                assert word == Forget("a")
                told.append(host)
                if host == "h0":
                    raise Unreachable("h0 is down")
                await let_go.wait()

        monkeypatch.setattr(fleet, "up", lambda: ["h0", "h1"])
        endings = Endings(fleet, cast(Any, Switchboard()), cast(Any, Idle()))
        fleet.jobs["a"].state = "ended"
        both = asyncio.gather(endings.forget("a"), endings.forget("a"))
        await asyncio.sleep(0.01)
        assert "a" in fleet.jobs
        assert [row[0] for row in fleet.journal.jobs()] == ["a"]
        let_go.set()
        await both

    asyncio.run(scene())
    assert told == ["h0", "h1"]
    assert fleet.jobs == {}
    assert list(fleet.journal.jobs()) == []
