# SPDX-License-Identifier: Apache-2.0
"""Suspensions and resumptions in a real journal: each is written whole, or not at all."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from journal_rows import journal, path

from liveshift.errors import LiveshiftError
from liveshift.runtime.journal.journal import Journal
from liveshift.runtime.journal.journal_file import JournalError
from liveshift.runtime.journal.snapshot_tables import RewindKind, RewindRow
from liveshift.runtime.model.snapshots import Generation

__all__ = ["journal", "path"]

ELSEWHERE = {"gpt/0": "h2", "gpt/1": "h1"}


def generation(number: int, rewinds: int = 0, epoch: int = 1) -> Generation:
    """Of gpt, whose capsules belong to h0 and h1 under ``epoch``; h2 holds their images."""
    owners = {"gpt/0": ("h0", epoch), "gpt/1": ("h1", epoch)}
    holders = {capsule: ["h2"] for capsule in owners}
    return Generation(number, "gpt", "step 9", 5.0, rewinds, owners, holders, 1 << 30)


def suspended(journal: Journal) -> RewindRow:
    """Take a last snapshot, and suspend the job with it."""
    number = journal.snapshots.begin_snapshot("gpt")
    return journal.snapshots.suspend(generation(number), "root wants it")


def resumed(journal: Journal) -> RewindRow:
    """Suspend the job, and resume it on h2 and h1."""
    number = suspended(journal).generation
    return journal.snapshots.resume("gpt", number, ELSEWHERE, "root wants it")


def all_that_is_written(journal: Journal) -> list[object]:
    """Every row that a suspension may change."""
    queries = (
        "SELECT * FROM jobs",
        "SELECT * FROM capsules ORDER BY name",
        "SELECT * FROM snapshots ORDER BY number",
        "SELECT * FROM rewinds ORDER BY number",
        "SELECT * FROM rewound",
    )
    return [journal.file.rows(query) for query in queries]


def capsules(journal: Journal) -> dict[str, tuple[str, int, int]]:
    """Host, epoch and granted of each capsule."""
    rows = journal.capsules("gpt")
    return {name: (host, epoch, granted) for name, _, _, host, epoch, _, granted in rows}


def state(journal: Journal) -> str:
    return next(job[5] for job in journal.jobs() if job[0] == "gpt")


@contextlib.contextmanager
def failing(path: Path, change: str) -> Iterator[None]:
    """Every such change of the file fails meanwhile."""
    with contextlib.closing(sqlite3.connect(path)) as other:
        stop = "BEGIN SELECT RAISE(ABORT, 'disk'); END"
        other.execute(f"CREATE TRIGGER stop BEFORE {change} {stop}")
        try:
            yield
        finally:
            other.execute("DROP TRIGGER stop")


# ---- the suspension --------------------------------------------------------------------------


def test_one_write_completes_the_snapshot_and_suspends_the_job(
    journal: Journal, path: Path
) -> None:
    row = suspended(journal)
    for each in (journal, Journal(path)):
        assert state(each) == "suspended"
        assert each.snapshots.newest("gpt") == generation(1)
        assert each.snapshots.snapshots_under_way() == []
        assert each.snapshots.rewinds("gpt") == 1
        assert each.snapshots.rewinds_under_way() == [(row, False)]
        assert each.snapshots.history("gpt") == [row]
    assert (row.kind, row.number, row.rewinds, row.generation) == (RewindKind.SUSPENSION, 1, 1, 1)
    assert (row.why, row.died) == ("root wants it", {})
    assert row.time > 1.6e9


def test_no_copy_is_granted_after_a_suspension_and_all_epochs_have_grown(
    journal: Journal,
) -> None:
    row = suspended(journal)
    assert row.owners == {"gpt/0": ("h0", 3), "gpt/1": ("h1", 3)}
    assert capsules(journal) == {"gpt/0": ("h0", 3, 0), "gpt/1": ("h1", 3, 0)}
    with pytest.raises(LiveshiftError, match="gpt/0 is not h0's under epoch 1"):
        journal.grant("gpt/0", "h0", 1)


def test_a_suspension_drops_earlier_snapshots(journal: Journal) -> None:
    first = journal.snapshots.begin_snapshot("gpt")
    journal.snapshots.complete_snapshot(generation(first))
    assert suspended(journal).generation == first + 1
    rows = journal.file.rows("SELECT number, state FROM snapshots")
    assert rows == [(first + 1, "complete")]


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE ON snapshots",
        "UPDATE ON jobs",
        "INSERT ON rewound",
        "UPDATE ON capsules WHEN NEW.name = 'gpt/1'",
        "INSERT ON rewinds",
    ],
)
def test_a_suspension_is_written_whole_or_not_at_all(
    journal: Journal, path: Path, change: str
) -> None:
    number = journal.snapshots.begin_snapshot("gpt")
    before = all_that_is_written(journal)
    with pytest.raises(JournalError, match="disk"), failing(path, change):
        journal.snapshots.suspend(generation(number), "root wants it")
    assert all_that_is_written(Journal(path)) == before
    journal.snapshots.suspend(generation(number), "root wants it")
    assert state(Journal(path)) == "suspended"


def moved(journal: Journal) -> None:
    journal.commit("gpt/1", "h2", 2)


def one_ended(journal: Journal) -> None:
    journal.set_ended("gpt/0", 0)


def being_ended(journal: Journal) -> None:
    journal.set_job("gpt", "ending", None)


def all_ended(journal: Journal) -> None:
    journal.set_job("gpt", "ended", 0)


def given_up(journal: Journal) -> None:
    for number, _ in journal.snapshots.snapshots_under_way():
        journal.snapshots.give_up_snapshot(number)


def removed(journal: Journal) -> None:
    journal.remove_job("gpt")


@pytest.mark.parametrize("change", [moved, one_ended, being_ended, all_ended, given_up, removed])
def test_a_job_that_has_changed_since_the_snapshot_began_is_not_suspended(
    journal: Journal, path: Path, change: Callable[[Journal], None]
) -> None:
    number = journal.snapshots.begin_snapshot("gpt")
    change(journal)
    before = all_that_is_written(journal)
    with pytest.raises(LiveshiftError):
        journal.snapshots.suspend(generation(number), "root wants it")
    assert all_that_is_written(Journal(path)) == before


def test_a_job_that_was_rewound_since_the_snapshot_began_is_not_suspended(
    journal: Journal, path: Path
) -> None:
    first = journal.snapshots.begin_snapshot("gpt")
    journal.snapshots.complete_snapshot(generation(first))
    late = journal.snapshots.begin_snapshot("gpt")
    row = journal.snapshots.rewind("gpt", first, {"gpt/0": "h0", "gpt/1": "h1"}, "h0 is lost")
    for _ in ("while it is taken back", "after that"):
        before = all_that_is_written(journal)
        with pytest.raises(LiveshiftError, match="gpt was rewound or has ended since s2"):
            journal.snapshots.suspend(generation(late), "root wants it")
        assert all_that_is_written(Journal(path)) == before
        journal.snapshots.begin_restoring(row.number)
        journal.snapshots.end_rewind(row)


def test_a_suspended_job_is_neither_suspended_nor_rewound_nor_has_a_snapshot(
    journal: Journal,
) -> None:
    row = suspended(journal)
    late = journal.snapshots.begin_snapshot("gpt")
    before = all_that_is_written(journal)
    with pytest.raises(LiveshiftError, match="gpt was rewound or has ended since s2"):
        journal.snapshots.suspend(generation(late, 1, 3), "")
    with pytest.raises(LiveshiftError, match="gpt was rewound or has ended since s2"):
        journal.snapshots.complete_snapshot(generation(late, 1, 3))
    with pytest.raises(LiveshiftError, match="no rewind of gpt is possible: it is suspended"):
        journal.snapshots.rewind("gpt", row.generation, ELSEWHERE, "")
    assert all_that_is_written(journal) == before


def test_a_suspension_lasts_though_its_copies_have_ended(journal: Journal, path: Path) -> None:
    row = suspended(journal)
    journal.snapshots.begin_restoring(row.number)
    assert Journal(path).snapshots.rewinds_under_way() == [(row, True)]
    assert state(Journal(path)) == "suspended"


# ---- the resumption --------------------------------------------------------------------------


def test_a_resumption_gives_each_capsule_to_its_host_of_the_plan(
    journal: Journal, path: Path
) -> None:
    row = resumed(journal)
    for each in (journal, Journal(path)):
        assert state(each) == "rewinding"
        assert capsules(each) == {"gpt/0": ("h2", 5, 0), "gpt/1": ("h1", 5, 0)}
        assert each.snapshots.rewinds_under_way() == [(row, False)]
        assert each.snapshots.newest("gpt") == generation(1), "it is kept"
    assert (row.kind, row.rewinds, row.generation) == (RewindKind.RESUMPTION, 2, 1)
    journal.grant("gpt/0", "h2", 5)


def test_a_job_runs_again_at_the_end_of_its_resumption(journal: Journal, path: Path) -> None:
    row = resumed(journal)
    journal.snapshots.end_rewind(row)
    assert state(journal) == "rewinding", "none of its capsules can have been restored"
    journal.snapshots.begin_restoring(row.number)
    for _ in range(2):
        journal.snapshots.end_rewind(row)
        assert state(Journal(path)) == "running"
        assert Journal(path).snapshots.rewinds_under_way() == []
    kinds = [each.kind for each in journal.snapshots.history("gpt")]
    assert kinds == [RewindKind.SUSPENSION, RewindKind.RESUMPTION]


def test_nothing_has_run_before_the_first_resumption(journal: Journal, path: Path) -> None:
    suspension = suspended(journal)
    first = journal.snapshots.resume("gpt", suspension.generation, ELSEWHERE, "")
    again = journal.snapshots.suspend_again(first, "no host has room")
    second = journal.snapshots.resume("gpt", suspension.generation, ELSEWHERE, "")
    lost = journal.snapshots.rewind("gpt", suspension.generation, ELSEWHERE, "h1 is silent")
    may = [Journal(path).snapshots.may_have_run(row) for row in (first, second, lost)]
    assert may == [False, True, True]
    assert again.kind is RewindKind.SUSPENSION


@pytest.mark.parametrize("now", ["running", "rewinding", "ending", "ended"])
def test_only_a_suspended_job_is_resumed(journal: Journal, path: Path, now: str) -> None:
    number = suspended(journal).generation
    journal.set_job("gpt", now, None)
    before = all_that_is_written(journal)
    with pytest.raises(LiveshiftError, match=f"no resumption of gpt is possible: it is {now}"):
        journal.snapshots.resume("gpt", number, ELSEWHERE, "root wants it")
    assert all_that_is_written(Journal(path)) == before


def test_a_job_is_resumed_from_its_newest_snapshot_with_all_its_capsules(
    journal: Journal,
) -> None:
    number = suspended(journal).generation
    before = all_that_is_written(journal)
    with pytest.raises(LiveshiftError, match="s7 is not the newest snapshot of gpt any more"):
        journal.snapshots.resume("gpt", 7, ELSEWHERE, "")
    with pytest.raises(LiveshiftError, match="no resumption of gpt is possible: a capsule has"):
        journal.snapshots.resume("gpt", number, {"gpt/0": "h2"}, "")
    assert all_that_is_written(journal) == before


def test_a_resumption_restores_only_once_one_earlier_host_has_ended_its_copy(
    journal: Journal,
) -> None:
    row = suspended(journal)
    assert row.before == journal.snapshots.before("gpt") == ["h0", "h1"]
    second = journal.snapshots.resume("gpt", row.generation, ELSEWHERE, "")
    assert second.before == journal.snapshots.before("gpt") == ["h0", "h1"]
    journal.snapshots.begin_restoring(row.number)
    assert journal.snapshots.before("gpt") == ["h0", "h1"], "that suspension was replaced"
    journal.snapshots.begin_restoring(second.number)
    assert journal.snapshots.before("gpt") == []


def test_a_resumption_restores_at_once_if_the_suspension_has_ended_a_copy(
    journal: Journal,
) -> None:
    row = suspended(journal)
    journal.snapshots.begin_restoring(row.number)
    assert journal.snapshots.before("gpt") == []
    second = journal.snapshots.resume("gpt", row.generation, ELSEWHERE, "")
    assert second.before == journal.snapshots.before("gpt") == []
    assert journal.snapshots.rewinds_under_way() == [(second, False)]


# ---- a resumption that fails -----------------------------------------------------------------


def test_a_job_whose_resumption_failed_is_suspended_again_at_the_same_snapshot(
    journal: Journal, path: Path
) -> None:
    first = resumed(journal)
    journal.snapshots.begin_restoring(first.number)
    journal.grant("gpt/0", "h2", 5)
    row = journal.snapshots.suspend_again(first, "gpt/1 could not be restored")
    for each in (journal, Journal(path)):
        assert state(each) == "suspended"
        assert capsules(each) == {"gpt/0": ("h2", 7, 0), "gpt/1": ("h1", 7, 0)}
        assert each.snapshots.newest("gpt") == generation(1)
        assert each.snapshots.rewinds_under_way() == [(row, False)]
    assert (row.kind, row.rewinds, row.generation) == (RewindKind.SUSPENSION, 3, 1)
    assert row.before == [], "it has not run as a whole since"
    again = journal.snapshots.resume("gpt", row.generation, ELSEWHERE, "once more")
    assert again.rewinds == 4


def test_what_ran_as_a_whole_must_end_before_a_second_resumption_restores(
    journal: Journal,
) -> None:
    first = resumed(journal)
    journal.snapshots.begin_restoring(first.number)
    for name, (host, epoch) in first.owners.items():
        journal.grant(name, host, epoch)
    row = journal.snapshots.suspend_again(first, "its gates did not open")
    assert row.before == journal.snapshots.before("gpt") == ["h1", "h2"]


def test_a_resumption_that_is_over_or_replaced_suspends_nothing(
    journal: Journal, path: Path
) -> None:
    first = resumed(journal)
    second = journal.snapshots.rewind("gpt", first.generation, ELSEWHERE, "h2 is lost")
    before = all_that_is_written(journal)
    with pytest.raises(LiveshiftError, match="gpt was rewound since"):
        journal.snapshots.suspend_again(first, "")
    assert all_that_is_written(Journal(path)) == before
    journal.snapshots.begin_restoring(second.number)
    journal.snapshots.end_rewind(second)
    with pytest.raises(LiveshiftError, match="no suspension of gpt is possible: it is running"):
        journal.snapshots.suspend_again(second, "")
    assert state(journal) == "running"


@pytest.mark.parametrize("now", ["running", "suspended", "ending", "ended"])
def test_a_job_that_is_not_being_resumed_any_more_is_not_suspended_again(
    journal: Journal, now: str
) -> None:
    first = resumed(journal)
    journal.set_job("gpt", now, None)
    before = all_that_is_written(journal)
    with pytest.raises(LiveshiftError, match=f"no suspension of gpt is possible: it is {now}"):
        journal.snapshots.suspend_again(first, "")
    assert all_that_is_written(journal) == before


# ---- the job ---------------------------------------------------------------------------------


def test_a_job_that_is_removed_leaves_only_its_count(journal: Journal, path: Path) -> None:
    suspended(journal)
    journal.remove_job("gpt")
    again = Journal(path)
    assert again.snapshots.newest("gpt") is None
    assert again.snapshots.rewinds_under_way() == []
    assert again.snapshots.history("gpt") == []
    assert again.snapshots.rewinds("gpt") == 1


@pytest.mark.parametrize(
    ("kind", "events"),
    [
        (RewindKind.REWIND, "rewinding"),
        (RewindKind.SUSPENSION, "suspending"),
        (RewindKind.RESUMPTION, "resuming"),
    ],
)
def test_each_kind_has_events_of_its_own(kind: RewindKind, events: str) -> None:
    assert kind.under_way == events


def test_a_row_without_a_kind_is_a_rewind(journal: Journal) -> None:
    """An orchestrator from before suspensions has written it."""
    row = msgspec.to_builtins(suspended(journal))
    del row["kind"]
    journal.file.write("UPDATE rewinds SET row = ?", (msgspec.msgpack.encode(row),))
    (found,) = journal.snapshots.history("gpt")
    assert found.kind is RewindKind.REWIND
