# SPDX-License-Identifier: Apache-2.0
"""The journal on a real SQLite file: one owner per capsule, durable, and a history that stays."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from journal_rows import OWNERS, journal, path, row
from sanitizers import compile_c

from liveshift.errors import LiveshiftError
from liveshift.runtime.journal import journal as journals
from liveshift.runtime.journal.journal import SCHEMA, VERSION, Journal
from liveshift.runtime.journal.journal_file import JournalError
from liveshift.runtime.messages import MigrationRow

__all__ = ["journal", "path"]


def owners(journal: Journal) -> dict[str, tuple[str, int]]:
    return {name: (host, epoch) for name, _, _, host, epoch, _, _ in journal.capsules("gpt")}


def test_commit_passes_the_ownership_on_once(journal: Journal) -> None:
    journal.commit("gpt/1", "h2", 2)
    assert owners(journal) == {"gpt/0": ("h0", 1), "gpt/1": ("h2", 2)}
    journal.commit("gpt/1", "h1", 3)
    assert owners(journal)["gpt/1"] == ("h1", 3)


@pytest.mark.parametrize("epoch", [0, 1, 3, 99])
def test_commit_refuses_any_epoch_but_the_next(journal: Journal, epoch: int) -> None:
    with pytest.raises(LiveshiftError, match=f"gpt/1 is not owned under epoch {epoch - 1}"):
        journal.commit("gpt/1", "h2", epoch)
    assert owners(journal)["gpt/1"] == ("h1", 1)


def test_a_line_of_the_history_is_never_long(journal: Journal) -> None:
    journal.add_event("gpt", "ended", "a reason " * 10_000)
    assert len(journal.events("gpt", 0)[-1].text) == 4_000 + len("…")


def test_the_history_is_read_from_the_newest_event_backwards_until_it_is_enough(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hundreds of thousands of events may be kept."""
    for number in range(100):
        journal.add_event(f"h{number % 2}", "tainted", str(number))
    looked: list[str] = []

    def sees(subject: str, _time: float) -> bool:
        looked.append(subject)
        return subject == "h1"

    def texts(after: int = 0) -> list[int]:
        looked.clear()
        return [int(event.text) for event in journal.events("", after, sees=sees)]

    first = journal.events("", 0)[0].number
    monkeypatch.setattr(journals, "MOST_EVENTS", 3)
    assert texts() == [95, 97, 99]
    assert len(looked) == 5
    assert texts(first + 97) == [99]
    monkeypatch.setattr(journals, "MOST_LOOKED", 4)
    assert texts() == [97, 99]
    assert len(looked) == 4
    monkeypatch.setattr(journals, "MOST_BYTES", 3)
    assert texts() == [99]
    monkeypatch.setattr(journals, "MOST_BYTES", 1)
    assert texts() == [99], "one is always told, or a follower would never get beyond it"


def test_a_migration_is_read_once_for_all_its_events_and_counts_for_each(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal.save_migration(1, row(1, "gpt/1"))
    for kind in ("move", "moving", "moved"):
        journal.add_event("gpt/1", kind, kind, "", 1)
    read: list[int] = []
    migration = journal.migration

    def counted(number: int) -> MigrationRow | None:
        read.append(number)
        return migration(number)

    monkeypatch.setattr(journal, "migration", counted)
    assert [e.migration.name for e in journal.events("gpt/1", 0) if e.migration] == ["m1"] * 3
    assert read == [1]
    size = len(msgspec.msgpack.encode(row(1, "gpt/1")))
    monkeypatch.setattr(journals, "MOST_BYTES", 2 * size + 20)
    assert [event.kind for event in journal.events("gpt/1", 0)] == ["moving", "moved"]
    told = journal.events_of_migration(1, 0, lambda _subject, _time: True)
    assert [event.kind for event in told] == ["moving", "moved"]
    assert journal.events_of_migration(1, 0, lambda _subject, _time: False) == []


def granted(journal: Journal, capsule: str = "gpt/1") -> bool:
    return next(bool(row[6]) for row in journal.capsules("gpt") if row[0] == capsule)


def test_who_owns_it_may_run_it_once_it_was_granted(journal: Journal, path: Path) -> None:
    assert granted(journal)
    journal.commit("gpt/1", "h2", 2)
    assert not granted(journal)
    for host, epoch in (("h1", 1), ("h1", 2), ("h2", 1), ("h2", 3)):
        with pytest.raises(LiveshiftError, match=f"gpt/1 is not {host}'s under epoch {epoch}"):
            journal.grant("gpt/1", host, epoch)
    assert not granted(journal)
    journal.grant("gpt/1", "h2", 2)
    assert granted(Journal(path))
    journal.commit("gpt/1", "h2", 3)  # to itself: what was granted before is over
    assert not granted(Journal(path))


def test_what_has_ended_passes_to_nobody(journal: Journal) -> None:
    journal.set_ended("gpt/1", 137)
    with pytest.raises(LiveshiftError, match="not owned under epoch 1 any more"):
        journal.commit("gpt/1", "h2", 2)


def test_a_name_that_is_used_again_begins_above_its_old_epochs(journal: Journal) -> None:
    journal.commit("gpt/1", "h2", 2)
    journal.commit("gpt/1", "h1", 3)
    assert journal.last_epoch("gpt") == 0
    journal.remove_job("gpt")
    assert journal.last_epoch("gpt") == 3
    assert journal.add_job("gpt", 1, "10.99.0.0/24", b"", OWNERS)[1] == 4
    assert set(owners(journal).values()) == {("h0", 4), ("h1", 4)}
    assert journal.add_job("new", 2, "10.99.1.0/24", b"", {"new/0": (0, "h0")})[1] == 1


def test_migrations_under_way_are_found_again(journal: Journal, path: Path) -> None:
    for number, state in enumerate(("done", "freezing", "failed", "restoring", "lost"), 1):
        journal.save_migration(number, row(number, state=state))
    left = Journal(path).migrations_under_way()
    assert [(number, found.state) for number, found in left] == [(2, "freezing"), (4, "restoring")]


def test_a_migration_is_found_by_its_name(journal: Journal) -> None:
    journal.save_migration(12, row(12))
    assert journal.migration_named("m12") == journal.migration(12)
    assert journal.migration_named("m13") is None


@pytest.mark.parametrize("name", ["m²", "m" + "9" * 30, "m-1", "m", ""])
def test_a_name_that_is_no_migrations_finds_none(journal: Journal, name: str) -> None:
    """int() takes no "²", and SQLite no number of more than 64 bits."""
    journal.save_migration(1, row(1))
    assert journal.migration_named(name) is None


def test_the_last_migrations_of_a_state_come_newest_first(journal: Journal) -> None:
    for number, state in enumerate(("done", "failed", "done", "done", "lost"), 1):
        journal.save_migration(number, row(number, state=state))
    assert [found.name for found in journal.migrations_in("done", 9)] == ["m4", "m3", "m1"]
    assert [found.name for found in journal.migrations_in("done", 2)] == ["m4", "m3"]
    assert journal.migrations_in("freezing", 9) == []


@pytest.mark.parametrize("number", [1, VERSION + 1])
def test_a_journal_of_another_format_is_refused(journal: Journal, path: Path, number: int) -> None:
    with sqlite3.connect(path) as other:
        other.execute(f"PRAGMA user_version={number}")
    other.close()
    with pytest.raises(
        LiveshiftError, match=f"has format {number}, this version reads 2 and 3 and 4"
    ):
        Journal(path)


def test_a_journal_of_the_format_before_is_taken_over(path: Path) -> None:
    """Its jobs lack what the new version knows, and the old version does not read it again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with sqlite3.connect(path) as older:
        older.executescript(SCHEMA.partition("CREATE TABLE IF NOT EXISTS cordons")[0])
        older.execute("INSERT INTO taints VALUES ('h1', 'ECC', 'root')")
        older.execute("PRAGMA user_version=2")
    older.close()
    journal = Journal(path)
    assert journal.taints() == {"h1": ("ECC", "root")}
    assert journal.cordons() == {}
    with sqlite3.connect(path) as seen:
        assert seen.execute("PRAGMA user_version").fetchone() == (VERSION,)
    seen.close()


def test_commit_of_an_unknown_capsule_is_refused(journal: Journal) -> None:
    with pytest.raises(LiveshiftError, match="gpt/9"):
        journal.commit("gpt/9", "h2", 2)


def test_of_two_that_commit_only_one_does(journal: Journal, path: Path) -> None:
    other = Journal(path)
    journal.commit("gpt/1", "h2", 2)
    with pytest.raises(LiveshiftError, match="not owned under epoch 1 any more"):
        other.commit("gpt/1", "h3", 2)
    assert owners(other)["gpt/1"] == ("h2", 2)


def test_what_was_committed_outlives_a_killed_process(path: Path) -> None:
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from liveshift.runtime.journal.journal import Journal\n"
        "journal = Journal(Path(sys.argv[1]))\n"
        "journal.add_job('gpt', 1, '10.99.0.0/24', b'', {'gpt/0': (0, 'h0'), 'gpt/1': (1, 'h1')})\n"
        "journal.commit('gpt/1', 'h2', 2)\n"
        "print('committed', flush=True)\n"
        "time.sleep(60)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    with child.stdout as said:
        assert said.readline() == b"committed\n"
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert owners(Journal(path))["gpt/1"] == ("h2", 2)


def test_reopening_sees_everything(journal: Journal, path: Path) -> None:
    journal.set_taint("h1", "ECC errors", "root")
    journal.set_taint("h2", "old", "root")
    journal.set_taint("h2", "renewed", "ann")
    journal.set_taint("h3", "gone", "ann")
    journal.clear_taint("h3")
    journal.commit("gpt/1", "h2", 2)
    journal.set_ended("gpt/0", 3)
    journal.set_job("gpt", "ended", 3)
    assert journal.next_migration() == 1
    journal.save_migration(1, row(1, state="preparing"))
    journal.save_migration(1, row(1))
    journal.add_event("gpt/1", "moved", "h1 → h2", "root", 1)
    again = Journal(path)
    assert again.taints() == {"h1": ("ECC errors", "root"), "h2": ("renewed", "ann")}
    ((name, vni, subnet, spec, started, state, code),) = again.jobs()
    assert (name, vni, subnet, spec, state, code) == ("gpt", 1, "10.99.0.0/24", b"spec", "ended", 3)
    assert started > 1.6e9
    assert again.capsules("gpt") == [
        ("gpt/0", "gpt", 0, "h0", 1, 3, 1),
        ("gpt/1", "gpt", 1, "h2", 2, None, 0),
    ]
    assert again.migration(1) == row(1)
    assert again.migration(2) is None
    assert again.next_migration() == 2
    (event,) = again.events("", 0)
    assert (event.subject, event.text, event.by) == ("gpt/1", "h1 → h2", "root")
    assert event.migration == row(1)


def test_history_by_subject(journal: Journal) -> None:
    journal.add_event("gpt", "started", "")
    journal.add_event("gpt/1", "move", "")
    journal.add_event("gptx/1", "move", "")
    journal.add_event("h1", "tainted", "")

    def subjects(about: str, after: int = 0) -> list[str]:
        return [event.subject for event in journal.events(about, after)]

    assert subjects("") == ["gpt", "gpt/1", "gptx/1", "h1"]
    assert subjects("gpt") == ["gpt", "gpt/1"]
    assert subjects("gpt/1") == ["gpt/1"]
    assert subjects("h1") == ["h1"]
    assert subjects("gpt", after=journal.events("gpt", 0)[0].number) == ["gpt/1"]
    assert subjects("nobody") == []


def test_the_history_of_a_host_has_its_moves(journal: Journal) -> None:
    ways = [("h1", "h2"), ("h0", "h2"), ("h1 GPU 0", "h1 GPU 3"), ("h10", "h2")]
    for number, (source, destination) in enumerate(ways, start=1):
        moved = msgspec.structs.replace(row(number), source=source, destination=destination)
        journal.save_migration(number, moved)
        journal.add_event("gpt/1", "move", f"m{number} begins", "root", number)
        journal.add_event("gpt/1", "moved", f"m{number}", "root", number)
    journal.add_event("h1", "tainted", "tainted: ECC")

    def texts(host: str) -> list[str]:
        return [event.text for event in journal.events(host, 0, host=True)]

    assert texts("h1") == ["m1 begins", "m1", "m3 begins", "m3", "tainted: ECC"]
    assert texts("h0") == ["m2 begins", "m2"]
    assert texts("h3") == []


def test_a_job_is_added_and_removed_whole(journal: Journal, path: Path) -> None:
    with pytest.raises(JournalError):  # the same capsules again: nothing of it stays
        journal.add_job("two", 2, "10.99.1.0/24", b"", OWNERS)
    assert [job[0] for job in Journal(path).jobs()] == ["gpt"]
    with sqlite3.connect(path) as saboteur:
        saboteur.execute(
            "CREATE TRIGGER stop BEFORE DELETE ON capsules BEGIN SELECT RAISE(ABORT, 'disk'); END"
        )
    saboteur.close()
    with pytest.raises(JournalError, match="disk"):
        journal.remove_job("gpt")
    assert [job[0] for job in Journal(path).jobs()] == ["gpt"]
    with sqlite3.connect(path) as saboteur:
        saboteur.execute("DROP TRIGGER stop")
    saboteur.close()
    journal.remove_job("gpt")
    assert Journal(path).jobs() == []
    assert Journal(path).capsules("gpt") == []
    journal.add_job("gpt", 1, "10.99.0.0/24", b"", OWNERS)  # the name and number are free again


def test_a_file_that_is_no_journal_is_refused_in_words(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    path.write_bytes(b"no database, but long enough to be taken for one" * 100)
    with pytest.raises(LiveshiftError, match=r"the journal .*journal.sqlite is damaged"):
        Journal(path)


def test_nobody_else_reads_it_and_readers_do_not_hold_it_up(journal: Journal, path: Path) -> None:
    """It has the jobs' environments; a backup is made while it is written."""
    journal.add_event("gpt", "started", "")
    modes = {each.name: each.stat().st_mode & 0o777 for each in path.parent.iterdir()}
    assert modes.pop("journal.sqlite") == 0o600
    assert set(modes.values()) <= {0o600}
    with contextlib.closing(sqlite3.connect(path)) as reader:
        reader.execute("BEGIN")
        before = reader.execute("SELECT COUNT(*) FROM events").fetchone()
        journal.add_event("gpt", "goes on", "")
        assert reader.execute("SELECT COUNT(*) FROM events").fetchone() == before


def test_a_move_has_a_number_above_all_others(journal: Journal, path: Path) -> None:
    for number in (1, 2, 7):
        journal.save_migration(number, row(number))
    assert Journal(path).next_migration() == 8


def test_numbers_of_a_journal_that_is_lost_are_not_used_again(journal: Journal, path: Path) -> None:
    journal.save_migration(3, row(3))
    journal.skip_migrations(100)
    assert Journal(path).next_migration() == 104
    journal.save_migration(104, row(104))
    assert journal.next_migration() == 105


def test_what_a_host_was_granted_by_a_lost_journal_is_its_own(journal: Journal, path: Path) -> None:
    journal.hand_over("gpt/1", "h2", 9)
    assert owners(Journal(path)) == {"gpt/0": ("h0", 1), "gpt/1": ("h2", 9)}
    assert granted(journal)


def test_what_is_noted_is_in_the_history(journal: Journal) -> None:
    journal.note("gpt/1", "moved", "to h2", "root")
    (event,) = journal.events("gpt/1", 0)
    assert (event.kind, event.text, event.by) == ("moved", "to h2", "root")


def test_the_history_of_a_host_has_its_last_moves(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 2, 3):
        journal.save_migration(number, row(number))
        journal.add_event("gpt/1", "moved", f"number {number}", migration=number)
    monkeypatch.setattr(journals, "MOVES_OF_A_HOST", 2)
    told = [event.text for event in journal.events("h2", 0, host=True)]
    assert told == ["number 2", "number 3"]
    assert journal.events("h9", 0, host=True) == []
    assert journal.events("h2", 0) == [], "a job may have a host's name"


def test_a_name_may_come_and_go_often(journal: Journal) -> None:
    for first in (1, 2, 3):
        if first > 1:
            assert journal.add_job("gpt", 1, "10.99.0.0/24", b"", OWNERS)[1] == first
        assert [state for *_, state, _ in journal.jobs()] == ["running"]
        journal.remove_job("gpt")
        assert journal.last_epoch("gpt") == first


def test_a_deadline_is_kept_as_long_as_its_taint(journal: Journal, path: Path) -> None:
    journal.set_taint("h1", "ECC errors", "root")
    for until in (100.0, 200.5):
        journal.set_deadline("h1", until)
        assert Journal(path).deadlines() == {"h1": until}
    journal.set_deadline("h2", 7.0)
    journal.set_deadline("h2", None)
    assert Journal(path).deadlines() == {"h1": 200.5}
    journal.clear_taint("h1")
    assert (Journal(path).deadlines(), Journal(path).taints()) == ({}, {})


def test_a_job_that_only_its_hosts_knew_is_begun_above_its_epochs(
    journal: Journal, path: Path
) -> None:
    for epoch, last in ((7, 7), (9, 9), (3, 9)):
        journal.end_unknown("lost", epoch)
        assert Journal(path).last_epoch("lost") == last
    _, first = journal.add_job("lost", 9, "10.99.9.0/24", b"", {"lost/0": (0, "h0")})
    assert first == 10


def test_cordons_are_kept(journal: Journal, path: Path) -> None:
    journal.set_cordon("h1", "root")
    journal.set_cordon("h1", "ann")
    journal.set_cordon("h2", "ann")
    assert Journal(path).cordons() == {"h1": "ann", "h2": "ann"}
    journal.clear_cordon("h1")
    assert Journal(path).cordons() == {"h2": "ann"}


SYNCS = """
#include <stdatomic.h>
#include <sys/syscall.h>
#include <unistd.h>

static _Atomic int count;
int syncs(void) { return atomic_load(&count); }
int fdatasync(int fd) { atomic_fetch_add(&count, 1); return (int)syscall(SYS_fdatasync, fd); }
int fsync(int fd) { atomic_fetch_add(&count, 1); return (int)syscall(SYS_fsync, fd); }
"""

WRITES = """
import ctypes, sys
from pathlib import Path
from liveshift.runtime.journal.journal import Journal
from liveshift.runtime.messages import MigrationRow
journal = Journal(Path(sys.argv[1]))
syncs = ctypes.CDLL(None).syncs
row = MigrationRow("m1", "gpt/1", "h1", "h2", "asked for", "root", 2, "done", 1.0, 2.0, 0.5, 10,
                   11, 12, 3.5e8, [], None, None)
for name, *arguments in (
    ("add_job", "gpt", 1, "10.99.0.0/24", b"spec", {"gpt/0": (0, "h0"), "gpt/1": (1, "h1")}),
    ("commit", "gpt/1", "h2", 2),
    ("grant", "gpt/1", "h2", 2),
    ("save_migration", 1, row),
    ("add_event", "gpt/1", "moved", "to h2"),
    ("set_taint", "h1", "broken", "root"),
    ("clear_taint", "h1"),
    ("set_ended", "gpt/1", 0),
    ("set_job", "gpt", "done", 0),
    ("remove_job", "gpt"),
):
    before = syncs()
    getattr(journal, name)(*arguments)
    print(name, syncs() - before)
"""


def test_the_disk_has_what_a_method_wrote_before_it_returns(path: Path, tmp_path: Path) -> None:
    """Else a power cut takes back a commit that the destination was told of."""
    (tmp_path / "syncs.c").write_text(SYNCS)
    library = tmp_path / "syncs.so"
    compile_c(library, "-shared", "-fPIC", tmp_path / "syncs.c")
    ran = subprocess.run(
        [sys.executable, "-c", WRITES, path],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"LD_PRELOAD": str(library)},
    )
    said = [line.split() for line in ran.stdout.splitlines()]
    assert len(said) == 10
    assert {name: int(count) for name, count in said if int(count) < 1} == {}
