# SPDX-License-Identifier: Apache-2.0
"""A job under test: how far it is, how it is moved, and what it leaves."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from reference_runs import References, Result, read_result
from whereabouts import Tasks, owners, where

from liveshift.criu_glue.capsule.sandboxes import PAGES
from liveshift.interposer import layout
from liveshift.runtime.messages import CapsuleRow, MigrationRow, ProtectionRow
from liveshift.runtime.model.steps import ENDS

if TYPE_CHECKING:
    from lab_session import LabSession

Step = dict[str, Any]
OVER = tuple(step.value for step in ENDS)
BEFORE, AFTER = 3, 10
"""Steps that a job must have made before its first move, and must still make after its last."""


@dataclass(frozen=True)
class Seen:
    """A capsule on a host, as this machine's /proc shows it."""

    host: str
    tasks: Tasks
    users: set[int]


class Job:
    """One job on a lab, its results in ``out``."""

    def __init__(
        self, session: LabSession, name: str, argv: Sequence[str], nnodes: int, out: Path
    ) -> None:
        self.session = session
        self.name = name
        self.argv = tuple(argv)
        self.nnodes = nnodes
        self.out = out
        self.moves: list[MigrationRow] = []

    # ---- how far it is ----

    def steps(self, rank: int = 0) -> list[Step]:
        with suppress(FileNotFoundError):
            text = (self.out / f"rank{rank}.jsonl").read_text()
            return [json.loads(line) for line in text.splitlines(keepends=True) if line[-1] == "\n"]
        return []

    def wait_step(self, step: int, rank: int = 0, timeout: float = 60.0) -> None:
        """Wait until the rank has made this step; fails when the job ends before."""
        until = time.monotonic() + timeout
        while len(self.steps(rank)) < step:
            assert self.code() is None, f"{self.name} ended before step {step}:\n{self.output()}"
            assert time.monotonic() < until, f"{self.name}: no step {step} in {timeout:g} s"
            time.sleep(0.05)

    def go_on(self, steps: int = 5, rank: int = 0) -> None:
        """The job must make this many steps more."""
        self.wait_step(len(self.steps(rank)) + steps, rank)

    def code(self) -> int | None:
        row = next((job for job in self.session.status().jobs if job.name == self.name), None)
        assert row is not None, f"{self.name} is not known any more"
        return row.code if row.state == "ended" else None

    def capsule(self, index: int) -> CapsuleRow:
        row = next(job for job in self.session.status().jobs if job.name == self.name)
        return row.capsules[index]

    def protection(self) -> ProtectionRow:
        """What ``status`` says of its snapshots."""
        row = next(job for job in self.session.status().jobs if job.name == self.name)
        assert row.protection is not None
        return row.protection

    def wait_end(self, timeout: float = 120.0) -> int:
        """Wait until the job has ended; fails when it does not, and makes no step for ``timeout``
        seconds."""
        logged, until = -1, 0.0
        while (code := self.code()) is None:
            if (size := sum(log.stat().st_size for log in self.out.glob("*.jsonl"))) != logged:
                logged, until = size, time.monotonic() + timeout
            assert time.monotonic() < until, f"{self.name} still runs after {timeout:g} s"
            time.sleep(0.2)
        return code

    def stop(self) -> None:
        """Let a job that waits for its ``enough`` file end, and see that it ends well."""
        (self.out / "enough").touch()
        assert self.wait_end() == 0, self.output()

    def output(self) -> str:
        said = self.session.cli("logs", self.name)
        return said.out + said.err

    # ---- where it is ----

    def seen(self, index: int) -> Seen:
        """Where the capsule's processes are; they must all be on one host."""
        found = where(self.session.lab, f"{self.name}/{index}")
        assert len(found) == 1, f"{self.name}/{index} is on {sorted(found)}"
        host, tasks = found.popitem()
        return Seen(host, tasks, owners(tasks))

    def write_layout(self, index: int, number: int) -> None:
        """Have the capsule's only page look like that of an interposer with another layout."""
        ((inner, pid),) = self.seen(index).tasks.items()
        with open(f"/proc/{pid}/root{PAGES}/{inner}", "r+b", buffering=0) as page:
            page.seek(layout.IDENTITY.offsets["layout"])
            page.write(number.to_bytes(4, "little"))

    def migrate(
        self, index: int, to: str = "", user: int | None = None, options: tuple[str, ...] = ()
    ) -> MigrationRow:
        """``liveshift migrate``; the processes must have moved, and nothing else."""
        before = self.seen(index)
        there = ["--to", to] if to else []
        words = ["migrate", f"{self.name}/{index}", "--no-cost", *there, *options]
        row = msgspec.convert(self.session.json(*words, user=user), MigrationRow)
        self.assert_moved(before, row)
        assert not to or row.destination == to
        return row

    def drained(self, index: int, verb: str = "drain") -> MigrationRow:
        """Empty the capsule's host by ``drain``, or by ``taint`` and waiting for the event."""
        before = self.seen(index)
        name = f"{self.name}/{index}"
        if verb == "drain":
            self.session.cli("drain", before.host, "--reason", "a test")
        else:
            self.session.cli("taint", "host", before.host, "--reason", "a test")
        row = self.migration_after(len(self.moves))
        assert row.capsule == name
        assert "a test" in row.reason
        self.assert_moved(before, row)
        return row

    def migrations(self) -> list[MigrationRow]:
        """All migrations that the job's history tells of, in their last state."""
        told = [event.migration for event in self.session.history(self.name)]
        return list({row.name: row for row in told if row is not None}.values())

    def migration_after(self, count: int, timeout: float = 60.0) -> MigrationRow:
        """The migration that follows the ``count`` ones that this job has had, once it is over."""
        until = time.monotonic() + timeout
        while len(rows := self.migrations()) <= count or rows[count].state not in OVER:
            assert time.monotonic() < until, f"{self.name} does not move: {rows}"
            time.sleep(0.2)
        return rows[count]

    def assert_moved(self, before: Seen, row: MigrationRow) -> None:
        """The same processes, all of them on the destination, none on the source."""
        assert (row.state, row.error) == ("done", None), row
        assert row.source == before.host
        assert row.destination != before.host
        after = self.seen(int(row.capsule.partition("/")[2]))
        assert after.host == row.destination
        assert after.tasks.keys() == before.tasks.keys(), f"{after.tasks}, before {before.tasks}"
        assert after.users == before.users
        assert not set(after.tasks.values()) & set(before.tasks.values()), "they have not moved"
        self.moves.append(row)

    # ---- what it leaves ----

    def result(self, ranks: int) -> Result:
        """What a job that must end well has left; it need not keep its pace any more."""
        (self.out / "hurry").touch()
        code = self.wait_end()
        assert code == 0, f"{self.name} ended with {code}:\n{self.output()}"
        return read_result(self.out, ranks)

    def assert_same_as_never_moved(
        self, references: References, ranks: int, argv: Sequence[str] | None = None
    ) -> None:
        """It ends well, trained before and after its moves, and computed what ``argv`` (its own
        command, unless that must differ) computes without liveshift."""
        result = self.result(ranks)
        self.assert_trained_across(ranks)
        self.assert_quiesced(communicates=ranks > 1)
        result.assert_equals(references.of(argv or self.argv, self.nnodes, ranks))

    def assert_trained_across(self, ranks: int = 1) -> None:
        """Every move lay inside the training: steps before it, and steps after the last one."""
        assert self.moves
        for rank in range(ranks):
            steps = self.steps(rank)
            for row in self.moves:
                before = [s["step"] for s in steps if s["time"] < row.asked]
                after = [s["step"] for s in steps if s["time"] > row.asked + row.seconds]
                assert len(before) >= BEFORE, f"rank {rank}: {row.name} began too early"
                assert len(after) >= AFTER, f"rank {rank}: {row.name} ended too late: {len(after)}"
                assert before[-1] < after[0]

    def assert_quiesced(self, communicates: bool) -> None:
        """Every move found all ranks of the job at a collective boundary, and told where."""
        boundary = r"paused after collective \d+ of gloo" if communicates else "no rank has called"
        for row in self.moves:
            (quiesce,) = (phase for phase in row.phases if phase.name == "quiesce")
            assert re.match(boundary, quiesce.detail), quiesce.detail
            told = self.session.cli("events", row.name).out
            assert quiesce.detail in " ".join(told.split()), told

    def assert_begins_like_never_moved(self, references: References) -> None:
        """Stop a job that goes on until then: each of its steps is that of the reference run,
        which went further."""
        self.stop()
        made = max(len(self.steps(rank)) for rank in range(self.nnodes))
        reference = references.further_than(made, self.argv, self.nnodes)
        for rank in range(self.nnodes):
            steps = self.steps(rank)
            lines = (reference / f"rank{rank}.jsonl").read_text().splitlines()
            assert 30 < len(steps) < len(lines), "it ended when it was told to"
            for step, line in zip(steps, map(json.loads, lines), strict=False):
                for what in ("step", "loss_hex", "sha256"):
                    assert step[what] == line[what], f"rank {rank}, step {step['step']}"
