# SPDX-License-Identifier: Apache-2.0
"""A history of bounded length that is found by indexes, also in a journal of an earlier version."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

import pytest
from journal_rows import OWNERS, journal, path, row

from liveshift.runtime.journal import old_events
from liveshift.runtime.journal.journal import SCHEMA, VERSION, Journal
from liveshift.runtime.journal.journal_file import JournalError
from liveshift.runtime.journal.old_events import INDEXES

__all__ = ["journal", "path"]


def texts(journal: Journal) -> list[str]:
    return [event.text for event in journal.events("", 0)]


def shorten(journal: Journal, keep: int) -> int:
    """Remove all that there is to remove; return how many calls that took."""
    calls = 1
    while journal.old_events.remove(keep):
        calls += 1
    return calls


def test_the_last_events_stay_and_all_those_of_jobs_that_are_there(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(old_events, "AT_ONCE", 7)
    for number in range(20):
        journal.add_event(("gpt", "gpt/1", "h1", "older", "older/0")[number % 5], "x", str(number))
    assert shorten(journal, 6) == 3
    assert texts(journal) == ["0", "1", "5", "6", "10", "11", *map(str, range(14, 20))]
    assert shorten(journal, 6) == 2, "it begins anew each time"
    journal.remove_job("gpt")
    shorten(journal, 6)
    assert texts(journal) == list(map(str, range(14, 20)))
    journal.add_event("h1", "x", "later")
    assert journal.last_event() == 21, "no number is used twice"


def test_a_step_that_fails_removes_nothing_and_is_done_again(journal: Journal, path: Path) -> None:
    for number in range(10):
        journal.add_event("h1", "x", str(number))
    with sqlite3.connect(path) as saboteur:
        saboteur.execute(
            "CREATE TRIGGER stop BEFORE DELETE ON events BEGIN SELECT RAISE(ABORT, 'disk'); END"
        )
    with pytest.raises(JournalError, match="disk"):
        journal.old_events.remove(3)
    assert len(texts(journal)) == 10
    saboteur.execute("DROP TRIGGER stop")
    saboteur.close()
    shorten(journal, 3)
    assert texts(journal) == ["7", "8", "9"]


def test_a_move_goes_with_its_last_event_but_for_the_last_moves(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(old_events, "LAST_MOVES", 2)
    states = {1: "done", 2: "failed", 3: "lost", 4: "done", 5: "done"}
    for number, state in states.items():
        journal.save_migration(number, row(number, "older/0", state))
        journal.add_event("older/0", "move", f"m{number} begins", "", number)
        journal.add_event("older/0", "moved", f"m{number}", "", number)
    for _ in range(10):
        journal.add_event("h1", "x", "newer")
    monkeypatch.setattr(old_events, "AT_ONCE", 1)
    assert journal.old_events.remove(10)
    assert journal.migration(1), "its second event is there"
    shorten(journal, 10)
    assert [number for number in states if journal.migration(number)] == [4, 5]
    assert texts(journal)[:4] == ["m4 begins", "m4", "m5 begins", "m5"]
    assert journal.next_migration() == 6


def test_a_history_that_fits_stays_whole(journal: Journal) -> None:
    for number in range(5):
        journal.add_event("older", "x", str(number))
    assert not journal.old_events.remove(5)
    assert len(texts(journal)) == 5


def plan(path: Path, query: str) -> str:
    with sqlite3.connect(path) as seen:
        rows = seen.execute("EXPLAIN QUERY PLAN " + query).fetchall()
    seen.close()
    return "\n".join(row[-1] for row in rows)


def test_an_earlier_journal_gets_the_indexes_and_is_read_as_before(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with sqlite3.connect(path) as earlier:
        earlier.executescript(SCHEMA.replace(INDEXES, ""))
        earlier.execute(f"PRAGMA user_version={VERSION}")
        about = ("gpt", "gpt/0", "gpt/1", "gpt0", "gptx", "bert")
        earlier.executemany(
            "INSERT INTO events (time, subject, kind, text, by) VALUES (1.0, ?, 'x', ?, '')",
            [(about[n % 6], str(n)) for n in range(600)],
        )
    earlier.close()
    journal = Journal(path)
    journal.add_job("gpt", 1, "10.99.0.0/24", b"", OWNERS)
    journal.add_event("gpt", "x", "600")
    assert [e.text for e in journal.events("gpt", 0)] == [
        str(n) for n in range(601) if n % 6 < 3 or n == 600
    ]
    shorten(journal, 1)
    assert len(texts(journal)) == 301
    assert "events_of_subject" in plan(path, "SELECT * FROM events WHERE subject = 'gpt'")
    assert "events_of_migration" in plan(path, "SELECT * FROM events WHERE migration = 7")


def test_the_history_of_one_job_reads_no_other(journal: Journal, path: Path) -> None:
    """Also from the beginning: a `run` asks for its job's history each second."""
    queries: list[str] = []
    journal.file._db.set_trace_callback(queries.append)
    journal.events("gpt", 3)
    journal.events_of_migration(7, 0, lambda _subject, _number: True)
    journal.file._db.set_trace_callback(None)
    selects = [query for query in queries if "FROM events" in query]
    assert selects
    for query in selects:
        steps = plan(path, query).splitlines()
        assert not [step for step in steps if step.startswith("SCAN events")], steps


def test_ten_thousand_events_are_removed_soon(journal: Journal) -> None:
    with journal.together():
        for number in range(10_000):
            journal.add_event(f"job{number}", "x", "some words of a history " * 4)
    longest, left = 0.0, True
    while left:
        began = time.monotonic()
        left = journal.old_events.remove(1000)
        longest = max(longest, time.monotonic() - began)
    assert len(texts(journal)) == 1000
    assert longest < 2.0, "the orchestrator does nothing else meanwhile"
