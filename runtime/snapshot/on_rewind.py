# SPDX-License-Identifier: Apache-2.0
"""Runs the cluster file's ``snapshots.on_rewind`` after each rewind and each resumption.

It runs at most once for each. That a command is due is written together with the end of the rewind,
and that it begins is written before it does. So an orchestrator that was restarted runs what was
only due. Of what had begun it does not know the end, and says that in the job's history.

The commands of one job run one after the other. No job waits for one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from ...errors import LiveshiftError
from ..config.cluster import Cluster
from ..daemon.bounded_command import outcome, run_bounded
from ..daemon.tasks import Tasks
from ..journal.command_table import CommandRow
from ..journal.journal import Journal
from ..journal.snapshot_tables import RewindKind, RewindRow
from ..model.snapshots import Generation

log = logging.getLogger("liveshift.on_rewind")

LIMIT_S = 60.0
"""A command is killed after so many seconds."""
KIND = "on_rewind"
"""The kind of the history's entries about commands."""


def variables(row: RewindRow, generation: Generation) -> dict[str, str]:
    """What the command finds in its environment."""
    resumed = row.kind is RewindKind.RESUMPTION
    # A suspended job has not trained since its snapshot; one that was adopted may have.
    repeated = 0.0 if resumed and not generation.saved else row.time - generation.time
    return {
        "LIVESHIFT_JOB": row.job,
        "LIVESHIFT_KIND": row.kind.value,
        "LIVESHIFT_SNAPSHOT": generation.name,
        "LIVESHIFT_BOUNDARY": generation.boundary,
        "LIVESHIFT_REPEATED_S": f"{max(0.0, repeated):.3f}",
        "LIVESHIFT_LOST_HOSTS": " ".join(row.lost),
    }


class RewindCommands:
    """The commands of all jobs. ``limit_s``: seconds after which one is killed."""

    def __init__(self, cluster: Cluster, journal: Journal, limit_s: float = LIMIT_S) -> None:
        self._argv = cluster.snapshots.on_rewind
        self._retry_s = cluster.timeouts.heartbeat
        self._journal = journal
        self._limit_s = limit_s
        self._busy: set[str] = set()  # the jobs whose commands run now
        self._tasks = Tasks()

    @property
    def busy(self) -> bool:
        """Whether a command runs."""
        return bool(self._busy)

    def end_rewind(self, row: RewindRow, generation: Generation | None) -> None:
        """Record that all capsules run again, and that the command is due, in one write."""
        with self._journal.together():
            done = self._journal.snapshots.end_rewind(row)
            if done and self._argv and generation is not None:
                self._journal.commands.add(row.number, row.job, variables(row, generation))

    def recover(self) -> None:
        """Take over what an earlier orchestrator has left; returns at once."""
        text = "was running when the orchestrator was restarted: its end is not known"
        for command in self._journal.commands.rows():
            if command.begun:
                self._tasks.spawn(self._write(partial(self._end, command, text)))
        self.run_due()

    def run_due(self) -> None:
        """Begin the commands that are due, and return."""
        for command in self._journal.commands.rows():
            if not command.begun and command.job not in self._busy:
                self._busy.add(command.job)
                self._tasks.spawn(self._run(command))

    async def _run(self, command: CommandRow) -> None:
        try:
            said = "was not run: the cluster file has none any more"
            if self._argv:
                await self._write(partial(self._journal.commands.begin, command.number))
                end = await run_bounded(self._argv, command.variables, self._limit_s)
                said = outcome(end, self._limit_s)
            await self._write(partial(self._end, command, said))
        finally:
            self._busy.discard(command.job)
        self.run_due()

    async def _write(self, write: Callable[[], None]) -> None:
        """Repeat a write to the journal until it succeeds."""
        while True:
            try:
                write()
                return
            except LiveshiftError as error:
                log.error("on_rewind waits: %s", error)
                await asyncio.sleep(self._retry_s)

    def _end(self, command: CommandRow, said: str) -> None:
        """Record the end, and say it, in one write: so it is neither forgotten nor said twice."""
        what = self._argv[0] if self._argv else "the command"
        kind, snapshot = (command.variables[f"LIVESHIFT_{key}"] for key in ("KIND", "SNAPSHOT"))
        with self._journal.together():
            self._journal.commands.end(command.number)
            text = f"{what}, for the {kind} to {snapshot}, {said}"
            self._journal.add_event(command.job, KIND, text)
