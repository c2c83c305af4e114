# SPDX-License-Identifier: Apache-2.0
"""A journal that cannot be written, is damaged or gone: words, nothing that was not written is so,
and a backup from which it goes on."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from fleet_scene import a_fleet
from full_journal import empty, fill
from journal_rows import journal, path, row
from orchestrator_parts import Parts, parts

from liveshift.runtime.journal.journal import Journal
from liveshift.runtime.journal.journal_file import JournalError
from liveshift.runtime.messages import Prediction, Rounds
from liveshift.runtime.migration.host_migration import HostMigration
from liveshift.runtime.migration.order import Order
from liveshift.runtime.model.ownership import Side
from liveshift.runtime.model.steps import MigrationStep
from liveshift.runtime.orchestrator.orchestrator import Orchestrator

__all__ = ["journal", "parts", "path"]


def test_a_full_disk_is_named_and_nothing_of_a_group_of_writes_is_kept(journal: Journal) -> None:
    fill(journal)

    def taint() -> None:
        with journal.together():
            journal.set_taint("h1", "ECC errors", "root")
            journal.add_event("h1", "tainted", "x" * 10_000)

    with pytest.raises(JournalError) as caught:
        taint()
    said = caught.value
    assert f"the journal {journal.file.path} cannot be written: the disk at /" in str(said)
    assert "is full" in str(said)
    assert "free some space" in str(said.hint)
    assert journal.file.problem == str(said)
    assert journal.taints() == {}
    empty(journal)
    journal.set_taint("h1", "ECC errors", "root")
    assert journal.taints() == {"h1": ("ECC errors", "root")}
    assert journal.file.problem == ""


def test_a_line_of_the_history_is_lost_rather_than_what_it_tells_of(journal: Journal) -> None:
    fill(journal)
    journal.note("gpt", "signal", "received SIGTERM" + "x" * 10_000)
    assert not [e for e in journal.events("gpt", 0) if e.kind == "signal"]


@pytest.mark.parametrize("harm", ["garbage", "pages"])
def test_a_damaged_journal_is_put_back_from_its_backup(path: Path, harm: str) -> None:
    journal = Journal(path)
    for number in range(200):
        journal.add_job(f"job{number}", number + 1, "10.99.0.0/24", b"x" * 500, {})
    journal.file.back_up()
    journal.file.close()
    raw = bytearray(path.read_bytes())
    if harm == "garbage":
        raw[:] = b"not a database at all" * 100
    else:
        raw[3 * 4096 : 9 * 4096] = b"\xff" * (6 * 4096)
    path.write_bytes(raw)
    with pytest.raises(JournalError) as caught:
        Journal(path)
    assert str(caught.value).startswith(f"the journal {path} is damaged: ")
    hint = str(caught.value.hint)
    assert f"copy {path.with_name('journal.backup')} (of {time.strftime('%Y-%m-%d')}" in hint
    assert path.read_bytes() == raw, "nothing was made of it"
    shutil.copy(path.with_name("journal.backup"), path)
    again = Journal(path)
    assert len(again.jobs()) == 200
    assert again.file.restored


def test_a_journal_that_is_gone_is_not_begun_anew_beside_its_backup(
    path: Path, journal: Journal
) -> None:
    journal.file.back_up()
    journal.file.close()
    path.unlink()
    with pytest.raises(JournalError, match=f"the journal {path} is gone") as caught:
        Journal(path)
    assert "journal.backup" in str(caught.value.hint)
    assert not path.exists()


def test_a_backup_is_whole_while_the_journal_is_written_to(journal: Journal, path: Path) -> None:
    with journal.together():
        journal.set_taint("h1", "not yet", "root")
        journal.file.back_up()
    copy = sqlite3.connect(path.with_name("journal.backup"))
    assert copy.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert copy.execute("SELECT COUNT(*) FROM capsules").fetchone() == (2,)
    assert copy.execute("SELECT COUNT(*) FROM taints").fetchone() == (0,)
    assert path.with_name("journal.backup").stat().st_mode & 0o777 == 0o600
    assert not journal.file.restored


def test_numbers_of_names_are_not_used_again(journal: Journal) -> None:
    assert journal.next_number() == 1
    for name in ("job1", "job7", "job", "myjob9", "job12x"):
        journal.add_job(name, 10 + len(name), "10.99.0.0/24", b"", {f"{name}/0": (0, "h0")})
        journal.remove_job(name)
    assert journal.next_number() == 8


def test_a_name_with_the_last_number_leaves_numbers_for_others(journal: Journal) -> None:
    for number, after in ((2, 3), (999_999_998, 999_999_999), (999_999_999, 1), (1, 3)):
        name = f"job{number}"
        journal.add_job(name, 10, "10.99.0.0/24", b"", {f"{name}/0": (0, "h0")})
        assert journal.next_number() == after
        journal.remove_job(name)
        assert journal.next_number() == after


@pytest.mark.parametrize("epoch", [(1 << 63) - 1, (1 << 64) - 1])
def test_an_epoch_that_no_job_can_have_leaves_epochs_for_others(
    journal: Journal, epoch: int
) -> None:
    """A host says it of a job that the journal does not know, and ends that."""
    for _ in range(2):
        journal.end_unknown("lost", epoch)
    _, first = journal.add_job("lost", 10, "10.99.8.0/24", b"", {"lost/0": (0, "h0")})
    journal.commit("lost/0", "h1", first + 1)


# ---- what is in memory follows it ----


def test_a_move_that_could_not_be_written_down_has_not_begun(parts: Parts) -> None:
    fleet = parts.fleet
    job = fleet.jobs["gpt"]
    capsule = job.capsules["gpt/1"]

    async def begin() -> None:
        with pytest.raises(JournalError):
            parts.migrations.start(Order(job, capsule, "h2", "x" * 10_000, "root"))
        await asyncio.sleep(0)

    fill(fleet.journal)
    asyncio.run(begin())
    assert capsule.migration is None
    assert fleet.under_way() == []


def test_a_source_is_told_to_run_only_once_that_is_written_down(parts: Parts) -> None:
    """Else an orchestrator that is started anew would find the move where its image may be taken
    for complete, and pass the capsule on while its source runs it: two copies."""
    from liveshift.runtime import messages

    fleet = parts.fleet
    capsule = fleet.jobs["gpt"].capsules["gpt/1"]
    claim = messages.Claim("m1", "gpt/1", Side.LEAVING.value, 1, ready=True)

    async def scene() -> None:
        move = HostMigration(parts.context, 1, Order(fleet.jobs["gpt"], capsule, "h2"))
        fleet.journal.save_migration(1, row(1, state="freezing"))
        fleet.migrations["m1"], capsule.migration, move.step = move, "m1", MigrationStep.FREEZING
        move.reason = "x" * 10_000  # so that its row needs a page
        fill(fleet.journal)
        cast(Any, move)._advance(MigrationStep.ROLLING_BACK)
        with pytest.raises(JournalError):
            parts.claims.rule("h1", claim)
        released = move.released
        assert not released
        empty(fleet.journal)
        assert parts.claims.rule("h1", claim).ruling == "run"
        assert move.released
        saved = fleet.journal.migration(1)
        assert saved is not None
        assert saved.state == "rolling back"

    asyncio.run(scene())


def test_the_end_of_a_move_is_written_down_when_there_is_space_again(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    from liveshift.runtime.migration import migration_records as module

    monkeypatch.setattr(module, "SAVE_AGAIN_S", 0.05)
    fleet = parts.fleet
    capsule = fleet.jobs["gpt"].capsules["gpt/1"]

    async def scene() -> None:
        move = HostMigration(parts.context, 1, Order(fleet.jobs["gpt"], capsule, "h2"))
        fleet.journal.save_migration(1, row(1, state="rolling back"))
        fleet.migrations["m1"], capsule.migration, move.step = (
            move,
            "m1",
            MigrationStep.ROLLING_BACK,
        )
        move.reason = "x" * 10_000
        fill(fleet.journal)
        cast(Any, move)._advance(MigrationStep.FAILED)
        assert fleet.jobs["gpt"].capsules["gpt/1"].migration is None, "it may be moved again"
        await asyncio.sleep(0.2)
        empty(fleet.journal)
        await asyncio.sleep(0.2)
        saved = fleet.journal.migration(1)
        assert saved is not None
        assert saved.state == "failed"

    asyncio.run(scene())


# ---- what is told of the end of a move ----


@pytest.mark.parametrize(
    ("step", "of_row", "kind", "text"),
    [
        (
            MigrationStep.DONE,
            {
                "frozen_s": 0.92,
                "image_bytes": 117_000_000,
                "precopy": Rounds(4, 782_000_000, 0, 0, 1e8),
                "predicted": Prediction("pre-copy", "", 0.38, [], 0),
            },
            "moved",
            "moved h1 → h2: paused 0.92 s (predicted 0.38 s); copied 782 MB running, 117 MB paused",
        ),
        (
            MigrationStep.DONE,
            {"frozen_s": 0.92, "image_bytes": 117_000_000},
            "moved",
            "moved h1 → h2: paused 0.92 s; copied 117 MB paused",
        ),
        (
            MigrationStep.JOB_ENDED,
            {"error": "gpt/1 ended with code 0 before it could move"},
            "not moved",
            "gpt/1 ended with code 0 before it could move",
        ),
        (
            MigrationStep.FAILED,
            {"error": "h2 lacks room"},
            "not moved",
            "did not move h1 → h2, failed: h2 lacks room",
        ),
    ],
)
def test_the_end_of_a_move_is_told(
    parts: Parts,
    monkeypatch: pytest.MonkeyPatch,
    step: MigrationStep,
    of_row: dict[str, Any],
    kind: str,
    text: str,
) -> None:
    fleet = parts.fleet
    capsule = fleet.jobs["gpt"].capsules["gpt/1"]
    capsule.migration = "m7"
    move = HostMigration(parts.context, 7, Order(fleet.jobs["gpt"], capsule, "h2", "", "root"))
    move.step = step
    ended = msgspec.structs.replace(row(7, state=step.value), **of_row)
    monkeypatch.setattr(move, "row", lambda: ended)
    parts.records.record(move)
    (event,) = fleet.journal.events("gpt/1", 0)
    assert (event.kind, event.text, event.by) == (kind, text, "root")
    assert fleet.jobs["gpt"].capsules["gpt/1"].migration is None
    assert fleet.journal.migration(7) == ended


def test_the_job_of_a_lost_rank_ends_once_that_can_be_written_down(tmp_path: Path) -> None:
    fleet = a_fleet(tmp_path)
    cluster = fleet.cluster
    fleet.journal.file.close()

    async def request(*_: object) -> None:
        """The other rank's host ends it."""

    brain = Orchestrator(cluster, cast(Any, SimpleNamespace(connections={}, request=request)))
    job = brain.fleet.jobs["a"]
    lost = job.capsules["a/1"]
    migration = SimpleNamespace(name="m1", step=MigrationStep.LOST, job=job, capsule=lost)

    async def play() -> None:
        fill(brain.fleet.journal)
        ended = asyncio.create_task(brain._migration_ended(cast(Any, migration)))
        await asyncio.sleep(2 * cluster.timeouts.heartbeat)
        assert (ended.done(), lost.code, job.state) == (False, None, "running")
        empty(brain.fleet.journal)
        await ended

    asyncio.run(play())
    assert (lost.code, job.state) == (137, "ending")
