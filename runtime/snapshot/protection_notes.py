# SPDX-License-Identifier: Apache-2.0
"""What the history says of a job's snapshots. It says a thing once, until something else is so."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ... import units
from ...errors import LiveshiftError
from ..journal.journal import Journal
from ..journal.snapshot_tables import SavedRow
from ..model.jobs import Job


class ProtectionNotes:
    """The notes about one job."""

    def __init__(self, journal: Journal, job: Job) -> None:
        self._journal = journal
        self._job = job
        self._last = ""

    def protected(self, text: str, key: str) -> None:
        """Note that the job is protected, and how, unless that was noted with the same ``key``."""
        self._note("protected", f"protected: {text}", key)

    def unprotected(self, why: str) -> None:
        self._note("unprotected", f"not protected: {why}", same(why))

    def failed(self, why: str, name: str) -> None:
        """Note why the snapshot ``name`` failed, or why none was begun if that is empty."""
        if self._job.newest is None:
            self.unprotected(why)
            return
        text = f"{name} failed: {why}" if name else why
        self._journal.note(self._job.name, "snapshot", f"{text}; {self._job.newest.name} stays")

    def _note(self, kind: str, text: str, key: str) -> None:
        if self._last != key:
            self._last = key
            self._journal.note(self._job.name, kind, text)


def same(why: str) -> str:
    """A reason without its numbers and without names of snapshots: a job that does not fit has
    another size each time."""
    return re.sub(r"(?<![\w.])(?:s[0-9]+(?!\.)|[0-9][0-9.]*)(?!\w)", "", why)


def words(error: LiveshiftError | None) -> str:
    """An error with its hint, in a line."""
    return f"{error} ({error.hint})" if error is not None and error.hint else str(error)


def none_heard(job: str, silent: Mapping[str, float], fence_after: float | None = None) -> str:
    """Return a text about a job of which no host is heard, and what a person can do. ``silent``:
    the hosts that may be dead → when each was last heard, in seconds since 1970. ``fence_after``:
    after so many seconds of silence a command switches one of them off; None: none does."""
    since = units.moment(min(silent.values()))
    if len(silent) == 1:
        (host,) = silent
        who, lost, dead = f"{host} and its kernel", host, host
    else:
        who, lost, dead = f"{units.some(silent, 8)} and their kernels", "HOST", "one of them"
    fenced = ""
    if fence_after is not None:
        fenced = f" before `snapshots.fence` has switched one off, {fence_after:g} s later"
        fenced += f" (`liveshift events {job}`)"
    return (
        f"{who} are silent since {since}, and no other host of {job} is heard: it may train on"
        f" there, so it is not taken back{fenced}. If {dead} is dead: `liveshift rewind {job}"
        f" --lost {lost}`"
    )


def offer(saved: SavedRow | None, job: str) -> str:
    """Return a text that says how a person can resume a lost job; it follows a reason. "" if no
    snapshot of the job was saved in a directory."""
    if saved is None:
        return ""
    return (
        f"; {saved.name} of {units.moment(saved.time)} is in {saved.directory}:"
        f" `liveshift resume {job} --from {saved.directory}` goes back to it"
    )
