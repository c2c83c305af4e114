# SPDX-License-Identifier: Apache-2.0
"""SQLite databases that go along: which of them stand in the way of a move, and why."""

from __future__ import annotations

import os
import sqlite3
import time
from pathlib import Path

import pytest
from captured import PYTHON, ROOT_PID, Sink, sink
from one_sandbox import Start, netns, plan, said, start
from sandbox_trees import SandboxMaker, count, criu, moved, new_sandboxes, place
from waits import until

from liveshift.criu_glue.capsule.mounts import Placement
from liveshift.criu_glue.capsule.sandboxes import Sandbox
from liveshift.criu_glue.criu.tool import Criu
from liveshift.criu_glue.survey import databases
from liveshift.criu_glue.survey.survey import changing, survey

__all__ = ["criu", "netns", "new_sandboxes", "place", "plan", "sink", "start"]

HERE = Placement((), ())
OPEN = """
import os, sqlite3, time
db = sqlite3.connect("{path}", isolation_level=None)
db.execute("pragma journal_mode={mode}")
db.execute("create table t (n)")
{then}
os.write(1, b"ready\\n")
time.sleep(60)
"""
WRITING = """
import sqlite3
db = sqlite3.connect("/tmp/counts.db", isolation_level=None)
db.execute("pragma journal_mode={mode}"); db.execute("create table t (n)")
for n in range(10**9):
    try: db.execute("insert into t values (?)", (n,)); os.write(1, b"wrote\\n")
    except sqlite3.OperationalError as error: os.write(1, str(error).encode() + b"\\n")
    time.sleep(0.002)
"""
READ_ONLY = "attempt to write a readonly database"


def opened(start: Start, path: object, mode: str = "delete", then: str = "") -> Sandbox:
    made = start(PYTHON, "-Sc", OPEN.format(path=path, mode=mode, then=then))
    until(lambda: "ready" in said(made))
    return made


@pytest.mark.parametrize("path", ["/tmp/counts.db", "/dev/shm/counts.db"])
@pytest.mark.root
def test_one_with_a_rollback_journal_stands_in_the_way(start: Start, path: str) -> None:
    stands = opened(start, path)
    ((text, remedy),) = survey(stands, ROOT_PID, HERE).problems
    assert text.startswith(f"process {ROOT_PID} (")
    assert f"has the SQLite database {path} open, to which SQLite refuses to write" in text
    assert "journal_mode=WAL" in remedy
    assert "files.shared" in remedy
    assert changing(stands, HERE).passing == ((text, remedy),)


@pytest.mark.parametrize(
    ("mode", "then"),
    [
        ("wal", ""),
        ("delete", "db.close()"),
        ("delete", "db.close(); db = sqlite3.connect('file:/tmp/c.db?mode=ro', uri=True)"),
        (
            "delete",
            "db.close(); other = open('/tmp/c.db', 'r+b', buffering=0)\nother.write(b'x' * 4096)",
        ),
    ],
)
@pytest.mark.root
def test_one_that_goes_on_does_not(start: Start, mode: str, then: str) -> None:
    stands = opened(start, "/tmp/c.db", mode, then)
    assert survey(stands, ROOT_PID, HERE).problems == ()
    assert changing(stands, HERE).passing == ()


@pytest.mark.root
def test_one_on_a_shared_path_does_not(start: Start) -> None:
    path = Path(f"/var/tmp/ls-test-databases-{time.monotonic_ns()}")
    path.mkdir()
    try:
        stands = opened(start, path / "c.db")
        assert survey(stands, ROOT_PID, Placement((str(path),), ())).problems == ()
        assert survey(stands, ROOT_PID, HERE).problems != ()
    finally:
        for file in path.iterdir():
            file.unlink()
        path.rmdir()


@pytest.mark.root
def test_one_that_is_open_for_moments_only_does_not(start: Start) -> None:
    then = """
os.write(1, b"ready\\n")
while True:
    db.close(); time.sleep(0.15)
    db = sqlite3.connect("/tmp/c.db"); db.execute("select * from t"); time.sleep(0.15)
"""
    stands = opened(start, "/tmp/c.db", then=then)
    until(lambda: changing(stands, HERE).passing)
    for _ in range(3):
        assert survey(stands, ROOT_PID, HERE).problems == ()


@pytest.mark.parametrize("mode", ["delete", "wal"])
@pytest.mark.root
def test_at_the_destination_sqlite_does_as_was_said(
    criu: Criu, new_sandboxes: SandboxMaker, place: Path, sink: Sink, mode: str
) -> None:
    here, there = new_sandboxes.counting(WRITING.format(mode=mode)), new_sandboxes.empty()
    refused = bool(changing(here, HERE).passing)
    assert refused is (mode == "delete")
    before = count(here)
    moved(criu, here, there, place, sink)
    arrived = count(there)
    until(lambda: count(there) > arrived + 5)
    lines = said(there).splitlines()
    assert set(lines[:before]) == {"wrote"}
    assert set(lines[-5:]) == {READ_ONLY if refused else "wrote"}


def test_what_is_no_database_or_has_gone_is_none(tmp_path: Path) -> None:
    with (tmp_path / "short").open("w+b") as file:
        file.write(b"SQLite format 3\0")
        file.flush()
        assert not databases.refuses_after_a_move(os.getpid(), file.fileno())
    assert not databases.refuses_after_a_move(1, 10**6)
    with sqlite3.connect(tmp_path / "a.db") as db:
        db.execute("create table t (n)")
    with (tmp_path / "a.db").open("rb") as file:
        assert databases.refuses_after_a_move(os.getpid(), file.fileno())
