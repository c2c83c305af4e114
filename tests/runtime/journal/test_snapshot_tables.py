# SPDX-License-Identifier: Apache-2.0
"""Snapshots and rewinds in a real journal: each decision is written whole, or not at all."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from journal_rows import OWNERS, journal, path

from liveshift.errors import LiveshiftError
from liveshift.runtime.journal.journal import Journal
from liveshift.runtime.journal.journal_file import JournalError
from liveshift.runtime.journal.snapshot_tables import RewindRow
from liveshift.runtime.model.jobs import LastRewind
from liveshift.runtime.model.snapshots import Generation

__all__ = ["journal", "path"]

PLAN = {"gpt/0": "h2", "gpt/1": "h1"}


def generation(number: int, rewinds: int = 0, **owners: tuple[str, int]) -> Generation:
    """Of gpt, whose capsules belong to their first owners, unless ``a`` or ``b`` say otherwise."""
    at = {"gpt/0": owners.get("a", ("h0", 1)), "gpt/1": owners.get("b", ("h1", 1))}
    holders = {capsule: ["h2"] for capsule in at}
    return Generation(number, "gpt", "step 9", 5.0, rewinds, at, holders, 1 << 30)


def taken(journal: Journal, rewinds: int = 0, **owners: tuple[str, int]) -> int:
    """Take a snapshot, which is complete; return its number."""
    number = journal.snapshots.begin_snapshot("gpt")
    journal.snapshots.complete_snapshot(generation(number, rewinds, **owners))
    return number


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


def rewound(journal: Journal, number: int) -> RewindRow:
    """Rewind the job to that snapshot, to the end."""
    row = journal.snapshots.rewind("gpt", number, PLAN, "h0 is lost")
    journal.snapshots.begin_restoring(row.number)
    journal.snapshots.end_rewind(row)
    return row


# ---- snapshots -------------------------------------------------------------------------------


def test_the_newest_complete_snapshot_is_found_again(journal: Journal, path: Path) -> None:
    assert journal.snapshots.newest("gpt") is None
    assert taken(journal) == 1
    assert Journal(path).snapshots.newest("gpt") == generation(1)
    second = journal.snapshots.begin_snapshot("gpt")
    assert Journal(path).snapshots.newest("gpt") == generation(1), "until the next is complete"
    journal.snapshots.complete_snapshot(generation(second))
    assert Journal(path).snapshots.newest("gpt") == generation(2)
    assert journal.file.rows("SELECT number, state FROM snapshots") == [(2, "complete")]
    assert journal.snapshots.newest("bert") is None


def test_no_number_is_used_twice(journal: Journal, path: Path) -> None:
    first = journal.snapshots.begin_snapshot("gpt")
    journal.snapshots.give_up_snapshot(first)
    assert journal.snapshots.begin_snapshot("gpt") == first + 1
    journal.snapshots.give_up_snapshot(first + 1)
    journal.remove_job("gpt")
    assert Journal(path).snapshots.begin_snapshot("bert") == first + 2
    with pytest.raises(JournalError, match="disk"), failing(path, "INSERT ON snapshots"):
        journal.snapshots.begin_snapshot("bert")
    assert journal.snapshots.begin_snapshot("bert") == first + 3, "nobody heard of that one"


def test_what_was_given_up_is_not_complete_later(journal: Journal) -> None:
    taken(journal)
    for number in (2, 3):
        assert journal.snapshots.begin_snapshot("gpt") == number
        journal.snapshots.give_up_snapshot(number)
        with pytest.raises(LiveshiftError, match=f"s{number} of gpt is not being taken any more"):
            journal.snapshots.complete_snapshot(generation(number))
        assert journal.snapshots.newest("gpt") == generation(1)
    journal.snapshots.give_up_snapshot(1)
    assert journal.snapshots.newest("gpt") == generation(1), "a complete one cannot be given up"
    with pytest.raises(LiveshiftError, match="s1 of gpt is not being taken"):
        journal.snapshots.complete_snapshot(generation(1))


def test_a_snapshot_is_of_the_owners_that_there_are(journal: Journal) -> None:
    number = journal.snapshots.begin_snapshot("gpt")
    wrong = [generation(number, a=("h0", 2)), generation(number, b=("h2", 1))]
    for each in wrong:
        with pytest.raises(LiveshiftError, match="a capsule of gpt has moved or ended since s1"):
            journal.snapshots.complete_snapshot(each)
    journal.commit("gpt/1", "h2", 2)
    with pytest.raises(LiveshiftError, match="moved or ended"):
        journal.snapshots.complete_snapshot(generation(number))
    journal.commit("gpt/1", "h1", 3)
    journal.set_ended("gpt/0", 0)
    with pytest.raises(LiveshiftError, match="moved or ended"):
        journal.snapshots.complete_snapshot(generation(number, b=("h1", 3)))
    assert journal.snapshots.newest("gpt") is None


@pytest.mark.parametrize("now", ["ending", "ended", "rewinding"])
def test_a_snapshot_is_of_a_job_that_runs(journal: Journal, now: str) -> None:
    number = journal.snapshots.begin_snapshot("gpt")
    journal.set_job("gpt", now, None)
    with pytest.raises(LiveshiftError, match="gpt was rewound or has ended since s1 was begun"):
        journal.snapshots.complete_snapshot(generation(number))
    journal.set_job("gpt", "running", None)
    journal.snapshots.complete_snapshot(generation(number))


def test_a_snapshot_that_a_rewind_has_overtaken_is_none(journal: Journal) -> None:
    """Else the holders would drop the images to which the job is being rewound."""
    first = taken(journal)
    late = journal.snapshots.begin_snapshot("gpt")
    rewound(journal, first)
    with pytest.raises(LiveshiftError, match="gpt was rewound or has ended since s2"):
        journal.snapshots.complete_snapshot(generation(late, a=("h2", 3), b=("h1", 3)))
    assert journal.snapshots.newest("gpt") == generation(first)


@pytest.mark.parametrize("change", ["UPDATE ON snapshots", "DELETE ON snapshots"])
def test_a_snapshot_is_complete_whole_or_not_at_all(
    journal: Journal, path: Path, change: str
) -> None:
    taken(journal)
    number = journal.snapshots.begin_snapshot("gpt")
    with pytest.raises(JournalError, match="disk"), failing(path, change):
        journal.snapshots.complete_snapshot(generation(number))
    assert Journal(path).snapshots.newest("gpt") == generation(1)
    journal.snapshots.complete_snapshot(generation(number))
    assert Journal(path).snapshots.newest("gpt") == generation(2)


# ---- rewinds ---------------------------------------------------------------------------------


def test_a_rewind_takes_all_capsules_at_once(journal: Journal, path: Path) -> None:
    journal.commit("gpt/1", "h1", 2)
    journal.grant("gpt/1", "h1", 2)
    number = taken(journal, b=("h1", 2))
    row = journal.snapshots.rewind("gpt", number, PLAN, "h0 is lost", {"gpt/1": 40})
    again = Journal(path)
    assert capsules(again) == {"gpt/0": ("h2", 3, 0), "gpt/1": ("h1", 4, 0)}
    assert again.snapshots.history("gpt") == [row]
    assert row.died == {"gpt/1": 40}
    assert (state(again), again.snapshots.rewinds("gpt")) == ("rewinding", 1)
    assert again.snapshots.rewinds_under_way() == [(row, False)]
    assert row.owners == {"gpt/0": ("h2", 3), "gpt/1": ("h1", 4)}
    assert (row.number, row.rewinds, row.generation) == (1, 1, number)
    assert (row.before, row.why) == (["h0", "h1"], "h0 is lost")
    assert row.time > 1.6e9
    assert again.snapshots.newest("gpt") == generation(number, b=("h1", 2)), "it is kept"
    with pytest.raises(LiveshiftError, match="gpt/0 is not h0's under epoch 1"):
        journal.grant("gpt/0", "h0", 1)
    with pytest.raises(LiveshiftError, match="gpt/0 is not owned under epoch 1 any more"):
        journal.commit("gpt/0", "h1", 2)
    journal.grant("gpt/0", "h2", 3)
    journal.commit("gpt/1", "h2", 5)  # its restore has failed on h1


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE ON jobs",
        "INSERT ON rewound",
        "UPDATE ON capsules WHEN NEW.name = 'gpt/1'",
        "INSERT ON rewinds",
    ],
)
def test_a_rewind_is_written_whole_or_not_at_all(journal: Journal, path: Path, change: str) -> None:
    number = taken(journal)
    before = capsules(journal)
    with pytest.raises(JournalError, match="disk"), failing(path, change):
        journal.snapshots.rewind("gpt", number, PLAN, "h0 is lost")
    again = Journal(path)
    assert capsules(again) == before
    assert (state(again), again.snapshots.rewinds("gpt")) == ("running", 0)
    assert again.snapshots.rewinds_under_way() == []
    assert journal.snapshots.rewind("gpt", number, PLAN, "h0 is lost").rewinds == 1


def test_a_job_goes_back_to_its_newest_snapshot_only(journal: Journal) -> None:
    with pytest.raises(LiveshiftError, match="s1 is not the newest snapshot of gpt any more"):
        journal.snapshots.rewind("gpt", 1, PLAN, "")
    taken(journal)
    taken(journal)
    journal.snapshots.begin_snapshot("gpt")
    for number in (1, 3):
        with pytest.raises(LiveshiftError, match=f"s{number} is not the newest"):
            journal.snapshots.rewind("gpt", number, PLAN, "")
    assert state(journal) == "running"
    journal.snapshots.rewind("gpt", 2, PLAN, "")
    assert state(journal) == "rewinding"


def test_what_has_ended_is_not_taken_back(journal: Journal) -> None:
    number = taken(journal)
    for plan in ({"gpt/0": "h2"}, PLAN | {"gpt/2": "h2"}):
        with pytest.raises(
            LiveshiftError, match="no rewind of gpt is possible: a capsule has ended"
        ):
            journal.snapshots.rewind("gpt", number, plan, "")
    for now in ("ending", "ended"):
        journal.set_job("gpt", now, 3)
        with pytest.raises(LiveshiftError, match=f"no rewind of gpt is possible: it is {now}"):
            journal.snapshots.rewind("gpt", number, PLAN, "")
    journal.set_job("gpt", "running", None)
    journal.set_ended("gpt/1", 0)
    with pytest.raises(LiveshiftError, match="a capsule has ended"):
        journal.snapshots.rewind("gpt", number, PLAN, "")
    assert journal.snapshots.rewinds("gpt") == 0


def test_a_rewind_goes_on_under_the_next_orchestrator(journal: Journal, path: Path) -> None:
    row = journal.snapshots.rewind("gpt", taken(journal), PLAN, "h0 is lost")
    for _ in range(2):
        journal.snapshots.begin_restoring(row.number)
        assert Journal(path).snapshots.rewinds_under_way() == [(row, True)]
    for _ in range(2):
        journal.snapshots.end_rewind(row)
        assert (state(Journal(path)), Journal(path).snapshots.rewinds_under_way()) == (
            "running",
            [],
        )
    journal.snapshots.begin_restoring(row.number)
    assert journal.snapshots.rewinds_under_way() == [], "it is over"


def test_the_next_orchestrator_knows_when_the_last_rewind_ended(
    journal: Journal, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert journal.snapshots.last_rewind("gpt") is None
    now = iter((100.0, 160.0, 500.0))
    monkeypatch.setattr(time, "time", lambda: next(now))
    row = rewound(journal, taken(journal))
    found = Journal(path).snapshots.last_rewind("gpt")
    assert found == LastRewind(5.0, 95.0, 160.0), "it was written at 100 s"
    journal.snapshots.end_rewind(row)
    assert journal.snapshots.last_rewind("gpt") == found, "it ends once"


def test_a_rewind_of_an_earlier_version_has_ended_when_it_was_written(journal: Journal) -> None:
    row = rewound(journal, taken(journal))
    earlier = msgspec.to_builtins(row)
    del earlier["ended"]
    journal.file.write("UPDATE rewinds SET row = ?", (msgspec.msgpack.encode(earlier),))
    found = journal.snapshots.last_rewind("gpt")
    assert found == LastRewind(5.0, row.time - 5.0, row.time)


def test_a_job_that_is_ended_meanwhile_does_not_run_again(journal: Journal) -> None:
    row = journal.snapshots.rewind("gpt", taken(journal), PLAN, "")
    journal.snapshots.begin_restoring(row.number)
    journal.set_job("gpt", "ending", None)
    journal.snapshots.end_rewind(row)
    assert (state(journal), journal.snapshots.rewinds_under_way()) == ("ending", [])


def test_a_rewind_that_was_replaced_ends_nothing(journal: Journal) -> None:
    number = taken(journal)
    first = journal.snapshots.rewind("gpt", number, PLAN, "h0 is lost")
    journal.snapshots.begin_restoring(first.number)
    second = journal.snapshots.rewind("gpt", number, PLAN, "h2 is lost too")
    journal.snapshots.begin_restoring(first.number)
    journal.snapshots.end_rewind(first)
    assert (state(journal), journal.snapshots.rewinds_under_way()) == (
        "rewinding",
        [(second, False)],
    )
    journal.snapshots.end_rewind(second)
    assert state(journal) == "rewinding", "none of its capsules can have been restored"


def test_one_host_of_the_job_as_it_last_ran_must_end_its_copies(journal: Journal) -> None:
    """A rewind of a rewind asks for the same hosts, until one of them has answered."""
    number = taken(journal)
    rewind = journal.snapshots.rewind
    assert journal.snapshots.before("gpt") == []
    assert rewind("gpt", number, PLAN, "h0 is lost").before == ["h0", "h1"]
    assert journal.snapshots.before("gpt") == ["h0", "h1"]
    second = rewind("gpt", number, {"gpt/0": "h2", "gpt/1": "h2"}, "h1 is lost too")
    assert second.before == ["h0", "h1"], "nothing has run since"
    journal.snapshots.begin_restoring(second.number)
    assert journal.snapshots.before("gpt") == []
    journal.grant("gpt/0", "h2", second.owners["gpt/0"][1])
    third = rewind("gpt", number, PLAN, "h2 is lost")
    assert third.before == [], "only one capsule has run since, and an earlier copy has ended"
    for name, (host, epoch) in third.owners.items():
        journal.grant(name, host, epoch)
    assert rewind("gpt", number, PLAN, "h2 again").before == ["h1", "h2"]
    states = journal.file.rows("SELECT number, state FROM rewinds ORDER BY number")
    assert states == [(1, "replaced"), (2, "replaced"), (3, "replaced"), (4, "ending")]
    assert journal.snapshots.rewinds("gpt") == 4


# ---- the job, and a journal that was put back ------------------------------------------------


def test_a_name_that_is_used_again_goes_on_with_its_count(journal: Journal, path: Path) -> None:
    """A host that missed the job's end still has its devices under the id of the old count."""
    first = journal.snapshots.rewind("gpt", taken(journal), PLAN, "")
    journal.remove_job("gpt")
    again = Journal(path)
    assert again.snapshots.rewinds("gpt") == 1
    assert again.snapshots.newest("gpt") is None
    assert again.snapshots.rewinds_under_way() == []
    epoch = again.add_job("gpt", 1, "10.99.0.0/24", b"", OWNERS)[1]
    number = taken(again, 1, a=("h0", epoch), b=("h1", epoch))
    second = again.snapshots.rewind("gpt", number, PLAN, "")
    assert (second.number, second.rewinds) == (first.number + 1, 2)


def test_a_journal_that_was_put_back_learns_the_counts_and_drops_snapshots(
    journal: Journal, path: Path
) -> None:
    taken(journal)
    journal.snapshots.catch_up({"gpt": 3, "bert": 0}, 1000)
    again = Journal(path).snapshots
    assert (again.rewinds("gpt"), again.rewinds("bert")) == (3, 0)
    assert again.newest("gpt") is None
    assert again.begin_snapshot("gpt") == 1002
    again.catch_up({"gpt": 2}, 1000)
    assert again.rewinds("gpt") == 3, "a count only grows"
    number = again.begin_snapshot("gpt")
    assert number == 2003
    again.complete_snapshot(generation(number, 3))
    assert again.rewind("gpt", number, PLAN, "").number == 2001


@pytest.mark.parametrize("version", [2, 3])
def test_an_older_journal_gets_the_tables(journal: Journal, path: Path, version: int) -> None:
    with contextlib.closing(sqlite3.connect(path)) as older:
        for table in ("snapshots", "rewinds", "rewound"):
            older.execute(f"DROP TABLE {table}")
        older.execute(f"PRAGMA user_version={version}")
    again = Journal(path)
    assert again.snapshots.newest("gpt") is None
    assert again.snapshots.rewinds("gpt") == 0
    assert again.snapshots.rewind("gpt", taken(again), PLAN, "").rewinds == 1


def test_only_the_row_of_a_suspension_gets_a_directory(journal: Journal, path: Path) -> None:
    """A restarted orchestrator saves the images there."""
    with pytest.raises(LiveshiftError, match="gpt is not suspended"):
        journal.snapshots.save_to("gpt", "/kept")
    number = journal.snapshots.begin_snapshot("gpt")
    row = journal.snapshots.suspend(generation(number), "root wants it")
    with failing(path, "UPDATE ON rewinds"), pytest.raises(JournalError):
        journal.snapshots.save_to("gpt", "/kept")
    assert Journal(path).snapshots.rewinds_under_way() == [(row, False)]
    journal.snapshots.begin_restoring(row.number)
    saved = journal.snapshots.save_to("gpt", "/kept")
    assert (saved.to, saved.number, saved.owners) == ("/kept", row.number, row.owners)
    assert Journal(path).snapshots.rewinds_under_way() == [(saved, True)]
    journal.snapshots.resume("gpt", number, PLAN, "root wants it")
    with pytest.raises(LiveshiftError, match="gpt is not suspended"):
        journal.snapshots.save_to("gpt", "/kept")


def test_rows_of_a_later_field_are_read(journal: Journal) -> None:
    """As MigrationRow: a field that an older orchestrator did not write has its default."""
    raw = msgspec.to_builtins(generation(1))
    del raw["bytes"]
    journal.snapshots.begin_snapshot("gpt")
    journal.file.write(
        "UPDATE snapshots SET state = 'complete', row = ?", (msgspec.msgpack.encode(raw),)
    )
    found = journal.snapshots.newest("gpt")
    assert found is not None
    assert (found.number, found.bytes) == (1, 0)


def test_the_age_of_a_rewind_does_not_follow_a_clock_that_is_set(
    journal: Journal, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that is set back by a day after it must not make it younger than an hour for a day:
    the job would be taken back no more."""
    taken(journal)
    row, now = journal.snapshots.rewind("gpt", 1, PLAN, "h0 is lost"), time.time()
    for step in (-86_400.0, 86_400.0):
        monkeypatch.setattr(time, "time", lambda: now + step)  # noqa: B023 - called in this turn only
        assert 0 <= journal.snapshots.age(row) < 60
    later = Journal(path).snapshots
    (found,) = later.history("gpt")
    assert later.age(found) >= 86_000, "an earlier orchestrator has written it: the clock says"
    monkeypatch.setattr(time, "time", lambda: now - 86_400)
    began = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: began + 4000)
    assert later.age(found) >= 4000, "it was there before this orchestrator"
