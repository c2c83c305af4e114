# SPDX-License-Identifier: Apache-2.0
"""A journal that was put back from its backup, with hosts that know better; and hosts that run what
no journal knows."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from fleet_scene import CLUSTER
from journal_rows import row
from orchestrator_scene import FACTS

from liveshift.errors import NotFound, Refused, Unreachable
from liveshift.runtime import messages
from liveshift.runtime.config import cluster as config
from liveshift.runtime.journal.journal_file import JournalError
from liveshift.runtime.messages import (
    CapsuleState,
    Claim,
    EndUnknown,
    GetStatus,
    Heartbeat,
    Message,
    Register,
    RunJob,
    SignalJob,
)
from liveshift.runtime.model.jobs import Job
from liveshift.runtime.model.snapshots import Generation
from liveshift.runtime.orchestrator.orchestrator import Orchestrator

RUN = RunJob("a", 2, ["true"], {}, "/", 0, [])


class Switchboard:
    """Hosts that do as they are asked; ``asked``: what."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Message]] = []
        self.connections: dict[str, Any] = {}

    async def request(self, host: str, message: Message, _timeout: float) -> None:
        self.asked.append((host, message))


def brain_on(state: Path) -> Orchestrator:
    cluster = config.parse(CLUSTER.replace("{state}", str(state))).cluster
    return Orchestrator(cluster, cast(Any, Switchboard()))


@pytest.fixture
def restored(tmp_path: Path) -> Orchestrator:
    """a/0 was on h0 and a/1 on h1 when the backup was made, and move m4 under way."""
    before = brain_on(tmp_path)
    journal = before.fleet.journal
    spec = msgspec.msgpack.encode({"uid": 0, "run": msgspec.to_builtins(RUN)})
    journal.add_job("a", 1, "10.99.0.0/24", spec, {"a/0": (0, "h0"), "a/1": (1, "h1")})
    journal.save_migration(4, row(4, "a/1", state="freezing"))
    journal.file.back_up()
    journal.file.close()
    path = journal.file.path
    path.unlink()
    shutil.copy(journal.file.backup, path)
    made = brain_on(tmp_path)
    made.catch_up.begin()
    return made


def says(brain: Orchestrator, host: str, ask: Message) -> Any:
    return asyncio.run(brain._handle_agent(host, ask))


def register(brain: Orchestrator, host: str, epochs: dict[str, int], **more: Any) -> messages.Books:
    found = says(
        brain, host, Register(host, FACTS, epochs, brain.cluster.digest, "boot_id", **more)
    )
    assert isinstance(found, messages.Books)
    return found


def here(brain: Orchestrator, ask: Message) -> Any:
    return asyncio.run(brain.api.handle(0, ask))


def owners(brain: Orchestrator) -> dict[str, tuple[str, int, int | None]]:
    rows = brain.fleet.journal.capsules("a")
    capsules = brain.fleet.jobs["a"].capsules
    found = {name: (host, epoch, code) for name, _, _, host, epoch, code, _ in rows}
    assert found == {c.name: (c.host, c.epoch, c.code) for c in capsules.values()}
    return found


LEAVING = Claim("m7", "a/1", "leaving", 1, ready=True)


def test_nothing_is_decided_before_all_hosts_have_reported(restored: Orchestrator) -> None:
    """h1 still holds a/1 frozen for a move that the lost journal had committed to h2: told to run
    it, it would be the second copy."""
    book = register(restored, "h0", {"a/0": 1}).books[0]
    assert (book.job, book.where) == ("a", {}), "where the capsules are is not known yet"
    register(restored, "h1", {"a/1": 1})
    assert says(restored, "h1", LEAVING).ruling == "wait"
    with pytest.raises(Unreachable):  # it is told again
        says(restored, "h1", messages.CapsuleEnded("a/1", 1, 0))
    for ask in (RUN, SignalJob("a", 15), messages.Migrate("a/1", "", "", False)):
        with pytest.raises(Refused, match="before h2 reported what is there"):
            here(restored, ask)
    assert "waits for h2 to report" in here(restored, GetStatus()).trouble
    register(restored, "h2", {"a/1": 2})
    assert owners(restored) == {"a/0": ("h0", 1, None), "a/1": ("h2", 2, None)}
    assert says(restored, "h1", LEAVING).ruling == "end"
    assert here(restored, GetStatus()).trouble == ""


def test_what_nobody_has_any_more_is_lost_and_what_has_ended_has_ended(
    restored: Orchestrator,
) -> None:
    register(restored, "h2", {})
    register(restored, "h1", {})
    register(restored, "h0", {"a/0": 1}, ended={"a/0": 0})
    assert owners(restored) == {"a/0": ("h0", 1, 0), "a/1": ("h1", 1, 137)}
    assert restored.fleet.jobs["a"].code == 137


def test_nothing_is_decided_while_what_the_hosts_told_cannot_be_written(
    restored: Orchestrator, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(restored, "h0", {"a/0": 1})
    register(restored, "h1", {"a/1": 1})

    def full(*_: object) -> None:
        raise JournalError("the disk is full", hint="make room")

    with monkeypatch.context() as patch:
        patch.setattr(restored.fleet.journal, "hand_over", full)
        with pytest.raises(JournalError):
            register(restored, "h2", {"a/1": 2})
    assert "waits for h2 to report" in here(restored, GetStatus()).trouble
    with pytest.raises(Unreachable):
        says(restored, "h1", messages.CapsuleEnded("a/1", 1, 0))
    register(restored, "h2", {"a/1": 2})
    assert owners(restored) == {"a/0": ("h0", 1, None), "a/1": ("h2", 2, None)}


def test_a_count_of_rewinds_that_hosts_know_is_not_used_again(
    restored: Orchestrator, tmp_path: Path
) -> None:
    """The backup knows neither the rewinds since, nor which snapshots the holders still have."""
    tables = restored.fleet.journal.snapshots
    number = tables.begin_snapshot("a")
    owners = {"a/0": ("h0", 1), "a/1": ("h1", 1)}
    tables.complete_snapshot(Generation(number, "a", "", 5.0, 0, owners, {}))
    restored.fleet.jobs["a"].newest = tables.newest("a")
    register(restored, "h0", {"a/0": 5}, rewinds={"a": 2})
    register(restored, "h1", {"a/1": 3}, rewinds={"a": 1, "b": 4})
    assert restored.fleet.jobs["a"].rewinds == 0
    register(restored, "h2", {"a/1": 5}, rewinds={"a": 2})
    job = restored.fleet.jobs["a"]
    assert (job.rewinds, job.newest, job.book().rewinds) == (2, None, 2)
    restored.fleet.journal.file.close()
    again = brain_on(tmp_path).fleet
    assert (again.jobs["a"].rewinds, again.jobs["a"].newest) == (2, None)
    assert again.journal.snapshots.rewinds("b") == 4
    assert again.journal.snapshots.begin_snapshot("a") == number + 1001


def test_a_command_that_may_have_been_run_since_the_backup_is_not_due(
    restored: Orchestrator,
) -> None:
    commands = restored.fleet.journal.commands
    commands.add(3, "a", {"LIVESHIFT_JOB": "a"})
    assert [row.begun for row in commands.rows()] == [False]
    for host, epochs in (("h0", {"a/0": 1}), ("h1", {"a/1": 1}), ("h2", {})):
        register(restored, host, epochs)
    assert [row.begun for row in commands.rows()] == [True]


def test_it_is_a_journal_like_any_other_afterwards(restored: Orchestrator, tmp_path: Path) -> None:
    """Numbers of moves that hosts may know are not used again, and the old move is over."""
    for host, epochs in (("h0", {"a/0": 1}), ("h1", {}), ("h2", {"a/1": 2})):
        assert restored.fleet.journal.file.restored
        register(restored, host, epochs)
    restored.fleet.journal.file.close()
    again = brain_on(tmp_path)
    assert not again.fleet.journal.file.restored
    assert again.fleet.journal.next_migration() == 1005
    old = again.fleet.journal.migration(4)
    assert old is not None
    assert (old.state, old.error) == (
        "failed",
        "its end is not known: the journal was put back from a backup",
    )
    assert owners(again)["a/1"] == ("h2", 2, None)


def test_what_no_journal_knows_is_shown_and_ended_on_demand(tmp_path: Path) -> None:
    brain = brain_on(tmp_path)
    register(brain, "h1", {"old/0": 3})
    seen = CapsuleState("old/0", 3, 7, 10**9, 5, 0.0, [0], "python train.py")
    says(brain, "h1", Heartbeat("h1", 1 << 30, [seen]))
    (unknown,) = here(brain, GetStatus()).unknown
    assert (unknown.capsule, unknown.host, unknown.pids) == ("old/0", "h1", 7)
    with pytest.raises(Refused, match="h1 runs old/0, which the journal does not know"):
        here(brain, RUN)
    with pytest.raises(NotFound):
        here(brain, EndUnknown("h2", "old"))
    assert here(brain, EndUnknown("h1", "old")) == messages.UnknownEnded(later=False)
    board: Any = brain.switchboard
    assert board.asked == [("h1", messages.End("old/0", 3)), ("h1", messages.Forget("old"))]
    says(brain, "h1", Heartbeat("h1", 1 << 30, []))
    assert here(brain, GetStatus()).unknown == []


def test_the_name_and_the_epochs_of_an_unknown_job_are_not_used_again(tmp_path: Path) -> None:
    """The backup was made before job5 began: the next name would be job5 again, its epoch 1."""
    brain = brain_on(tmp_path)
    register(brain, "h1", {"job5/0": 3, "job5/1": 4})
    seen = [CapsuleState(f"job5/{n}", 3 + n, 7, 10**9, 5, 0.0, [0], "x") for n in range(2)]
    says(brain, "h1", Heartbeat("h1", 1 << 30, seen))
    here(brain, EndUnknown("h1", "job5"))
    journal = brain.fleet.journal
    assert journal.next_number() == 6
    assert journal.last_epoch("job5") == 4
    assert journal.add_job("job5", 1, "10.99.0.0/24", b"", {"job5/0": (0, "h1")})[1] == 5
    (event,) = journal.events("h1", 0, True)
    assert (event.kind, event.text) == ("ended", "ended job5, which was unknown")


def test_one_unknown_job_is_ended_and_others_stay_unknown(tmp_path: Path) -> None:
    brain = brain_on(tmp_path)
    register(brain, "h1", {"old/0": 3, "older/0": 2})
    both = [CapsuleState(f"{name}/0", 3, 7, 10**9, 5, 0.0, [0], "x") for name in ("old", "older")]
    says(brain, "h1", Heartbeat("h1", 1 << 30, both))
    here(brain, EndUnknown("h1", "old"))
    assert [row.capsule for row in here(brain, GetStatus()).unknown] == ["older/0"]
    with pytest.raises(Refused, match="h1 runs older/0"):
        here(brain, RUN)


def test_what_a_dead_host_ran_keeps_nobody_from_running_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[tuple[str, str, int]] = []
    brain = brain_on(tmp_path)
    monkeypatch.setattr(brain.endings, "end_stray", lambda *stray: ended.append(stray))
    register(brain, "h1", {"job5/0": 3})
    beat = Heartbeat("h1", 1 << 30, [CapsuleState("job5/0", 3, 7, 10**9, 5, 0.0, [0], "x")])
    says(brain, "h1", beat)
    with pytest.raises(Refused, match="h1 runs job5/0"):
        here(brain, RUN)
    brain.fleet.hosts["h1"].heard = 0.0
    assert here(brain, EndUnknown("h1", "job5")) == messages.UnknownEnded(later=True)
    board: Any = brain.switchboard
    assert board.asked == []
    brain.fleet.refuse_unknown()
    assert brain.fleet.journal.next_number() == 6, "its name is not used again"
    assert ended == []
    says(brain, "h1", beat)
    assert ended == [("h1", "job5/0", 3)], "the host is back"
    assert here(brain, GetStatus()).unknown == []


def test_a_copy_of_a_forgotten_job_is_not_unknown_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its host was cut off while the job was rewound without it, ended and was forgotten."""
    ended: list[tuple[str, str, int]] = []
    brain = brain_on(tmp_path)
    monkeypatch.setattr(brain.endings, "end_stray", lambda *stray: ended.append(stray))
    brain.fleet.journal.add_job("old", 1, "10.99.0.0/24", b"", {"old/0": (0, "h1")})
    brain.fleet.journal.remove_job("old")
    register(brain, "h1", {})
    seen = CapsuleState("old/0", 1, 7, 10**9, 5, 0.0, [0], "python train.py")
    says(brain, "h1", Heartbeat("h1", 1 << 30, [seen]))
    assert here(brain, GetStatus()).unknown == []
    assert ended == [("h1", "old/0", 1)]


# ---- a job that was suspended when the backup was made ---------------------------------------


def suspended_in_the_backup(state: Path) -> Orchestrator:
    """The job a was suspended after it had run on h0 and h1; its last image is on h2."""
    before = brain_on(state)
    journal = before.fleet.journal
    spec = msgspec.msgpack.encode({"uid": 0, "run": msgspec.to_builtins(RUN)})
    journal.add_job("a", 1, "10.99.0.0/24", spec, {"a/0": (0, "h0"), "a/1": (1, "h1")})
    number = journal.snapshots.begin_snapshot("a")
    held = Generation(
        number,
        "a",
        "step 9",
        5.0,
        0,
        {"a/0": ("h0", 1), "a/1": ("h1", 1)},
        {"a/0": ["h2"], "a/1": ["h2"]},
    )
    journal.snapshots.suspend(held, "root wants it")
    journal.file.back_up()
    journal.file.close()
    shutil.copy(journal.file.backup, journal.file.path)
    made = brain_on(state)
    made.catch_up.begin()
    return made


def test_a_suspended_job_of_a_backup_stays_suspended_without_a_snapshot(tmp_path: Path) -> None:
    brain = suspended_in_the_backup(tmp_path)
    for host in ("h0", "h1", "h2"):
        register(brain, host, {}, rewinds={"a": 1})
    job = brain.fleet.jobs["a"]
    assert (job.state, job.newest, job.rewinds) == ("suspended", None, 1)
    assert [c.code for c in job.capsules.values()] == [None, None]
    with pytest.raises(Refused, match="a cannot be resumed: no snapshot of it is left"):
        here(brain, messages.ResumeJob("a"))


def test_a_job_that_was_resumed_since_the_backup_runs(tmp_path: Path) -> None:
    """Its hosts have it under a later count. A person who sees it as suspended would stop it, and
    it would train on."""
    brain = suspended_in_the_backup(tmp_path)
    register(brain, "h0", {}, rewinds={"a": 2})
    register(brain, "h1", {"a/1": 5}, rewinds={"a": 2})
    register(brain, "h2", {"a/0": 5}, rewinds={"a": 2})
    assert owners(brain) == {"a/0": ("h2", 5, None), "a/1": ("h1", 5, None)}
    job = brain.fleet.jobs["a"]
    assert (job.state, job.rewinds) == ("running", 2)
    assert all(capsule.granted for capsule in job.capsules.values())


def test_a_job_may_start_while_the_hosts_are_told_where_capsules_are(
    restored: Orchestrator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those who waited for this moment run at once; others are forgotten since their ends are
    known."""
    for host, epochs in (("h0", {"a/0": 1}), ("h1", {"a/1": 1}), ("h2", {})):
        register(restored, host, epochs)
    jobs, told = restored.fleet.jobs, []

    async def publish(job: Job) -> None:
        told.append(job.name)
        jobs[f"after-{job.name}"] = job

    async def evacuate() -> None:
        told.append("evacuation")

    monkeypatch.setattr(restored.address_book, "publish", publish)
    monkeypatch.setattr(restored.evacuation, "run", evacuate)
    asyncio.run(restored._evacuate())
    assert told == ["a", "evacuation"]
