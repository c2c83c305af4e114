# SPDX-License-Identifier: Apache-2.0
"""Runs a job in the foreground: relays output, passes signals on, reports moves, keeps its code.

The job does not depend on this program. It goes on if this program ends or loses contact with the
orchestrator. Only a signal that a person sends reaches it.
"""

from __future__ import annotations

import queue
import signal
import sys
import time

from ...errors import LiveshiftError, NotFound
from ...runtime.messages import (
    Event,
    Events,
    GetEvents,
    GetStatus,
    JobRow,
    Named,
    RunJob,
    Status,
)
from ..client.client import Client
from ..show import moves, render
from ..show.output_lines import Streams, Writer, writers
from ..show.output_reader import Follower, OutputEnded, OutputStopped, Reader, ReadProblem, Report
from ..show.signal_relay import SignalRelay

PROTECTION = frozenset({"protected", "unprotected"})
"""The kinds of the history's entries that are repeated here."""

LOOK_S = 1.0  # seconds between two looks at the job's state
LAST_STATUS_S = 0.1  # the same, once all output has been relayed
REQUEST_S = 10.0
SILENCE_S = 3.0  # a capsule that cannot be read for so many seconds is reported
LAST_OUTPUT_S = 10.0  # seconds to wait for the rest of the output of a job that has ended

REWINDS = frozenset({"rewinding", "rewound", "not rewound", "silent", "fencing"})
SUSPENSIONS = frozenset({"suspending", "suspended", "not suspended", "not saved"})
RESUMPTIONS = frozenset({"resuming", "resumed", "not resumed"})
"""The kinds of events that tell how the job is taken back, suspended and resumed."""


class Foreground:
    """One job from its start to its end. ``notices``: print on stderr when it starts and moves."""

    def __init__(self, client: Client, *, notices: bool) -> None:
        self._client = client
        self._reports: queue.SimpleQueue[Report | signal.Signals] = queue.SimpleQueue()
        self._signals = SignalRelay(self._reports.put)
        self._notices = notices
        self._begun = False
        self._event = 0  # the last one seen
        self._moved: set[str] = set()  # migrations whose end was printed
        self._job = ""
        self._writers: dict[str, Writer] = {}
        self._ended: dict[str, int] = {}  # capsule → exit code, once its output was relayed
        # capsule → since when, and the newest reason
        self._silent: dict[str, tuple[float, LiveshiftError]] = {}
        self._reported: set[str] = set()  # silent capsules that were reported
        self._contact = True

    def run(self, request: RunJob, start_s: float) -> int:
        """Start the job. Return its exit code when it has ended and all output was relayed.

        Raises what the start raises, and KeyboardInterrupt for the third SIGINT: the job goes on.
        """
        streams = Streams(sys.stdout.buffer, sys.stderr.buffer, tolerant=True)
        with self._signals.caught():
            self._job = self._client.get(Named, request, start_s).name
            self._signals.started()
            self._writers = writers(streams, [f"{self._job}/{n}" for n in range(request.nnodes)])
            for capsule, writer in self._writers.items():
                Follower(self._client.place, Reader(capsule), writer.put, self._reports.put).start()
            code = self._wait()
        if streams.gone:
            render.note(f"not all of its output was read here: see `liveshift logs {self._job}`")
        return code

    def _wait(self) -> int:
        """Wait until the job has ended and nothing is left to relay. Returns its exit code."""
        give_up = float("inf")
        while True:
            job, known = self._check_job()
            relayed = len(self._ended) == len(self._writers)
            ended = known and (job is None or job.state == "ended")
            if ended and relayed:
                return self._code(job)
            if ended:
                give_up = min(give_up, time.monotonic() + LAST_OUTPUT_S)
                if self._silent and time.monotonic() > give_up:
                    self._report_unheard()
                    return self._code(job)
            self._deal(time.monotonic() + (LAST_STATUS_S if relayed else LOOK_S))

    def _check_job(self) -> tuple[JobRow | None, bool]:
        """Pass signals on, look at the job, and print what is new.

        Returns the job's row (None: there is none), and whether that is certain.
        """
        try:
            self._signals.send(self._client, self._job)
            status = self._client.get(Status, GetStatus(self._job), REQUEST_S)
            job = next((row for row in status.jobs if row.name == self._job), None)
            self._report_notices(job)
        except LiveshiftError as error:
            if self._contact:
                self._say(f"{error}; {self._job} goes on, trying again")
            self._contact = False
            return None, False
        if not self._contact:
            self._say(f"{self._job}: contact again")
        self._contact = True
        self._report_silence()
        return job, True

    def _deal(self, until: float) -> None:
        """Handle reports until a moment (monotonic seconds), or until one calls for a look."""
        while (left := until - time.monotonic()) > 0:
            try:
                report = self._reports.get(timeout=left)
            except queue.Empty:
                return
            match report:
                case OutputEnded(capsule, code):
                    self._finish(capsule, code)
                case OutputStopped(capsule, error):
                    if not isinstance(error, LiveshiftError):
                        raise error
                    render.failure(f"{capsule}: its output cannot be read: {error}", error.hint)
                    self._finish(capsule, 1)
                case ReadProblem(capsule, error):
                    if error is None:
                        self._heard(capsule)
                    else:
                        since, _ = self._silent.get(capsule, (time.monotonic(), error))
                        self._silent[capsule] = since, error
                case signal.Signals():
                    return
            if len(self._ended) == len(self._writers):
                return

    def _finish(self, capsule: str, code: int) -> None:
        self._writers[capsule].end()
        self._ended[capsule] = code
        self._heard(capsule)

    def _heard(self, capsule: str) -> None:
        self._silent.pop(capsule, None)
        self._reported.discard(capsule)

    def _code(self, job: JobRow | None) -> int:
        """Return the job's exit code. If the job is already forgotten: the code of a capsule that
        failed, else 0."""
        if job is not None and job.code is not None:
            return job.code
        return next((code for _, code in sorted(self._ended.items()) if code), 0)

    def _report_unheard(self) -> None:
        for capsule, (_, error) in sorted(self._silent.items()):
            render.failure(f"{capsule}: the end of its output could not be read: {error}")
        for capsule in self._writers.keys() - self._ended.keys():
            self._writers[capsule].end()

    def _report_notices(self, job: JobRow | None) -> None:
        """Print, each once: where the job runs, whether it is protected, moves and rewinds."""
        if not self._notices or job is None:
            return
        if not self._begun:
            hosts = dict.fromkeys(capsule.host for capsule in job.capsules)
            capsules = render.count(len(job.capsules), "capsule")
            render.note(f"{job.name}: {capsules} on {', '.join(hosts)}", style="dim")
            self._begun = True
        try:
            asked = GetEvents(job.name, self._event)
            events = self._client.get(Events, asked, REQUEST_S).events
        except NotFound:  # it has ended and was forgotten meanwhile
            return
        for event in _of_this_job(events, job.name):
            self._event = max(self._event, event.number)
            if event.kind in PROTECTION:
                render.note(event.text, style="dim")
            if event.kind in REWINDS | SUSPENSIONS | RESUMPTIONS:
                render.note(f"{job.name}: {event.kind}: {event.text}", style="dim")
            row = event.migration
            if row is None or row.name in self._moved:  # several events may be about one move
                continue
            if moves.over(row):
                self._moved.add(row.name)
                render.note(moves.outcome(row), style="dim")

    def _report_silence(self) -> None:
        """Report capsules that stay silent. A capsule on the move is silent for a moment only."""
        for capsule, (since, error) in self._silent.items():
            if time.monotonic() - since > SILENCE_S and capsule not in self._reported:
                self._say(f"{capsule}: its output cannot be read: {error}; trying again")
                self._reported.add(capsule)

    @staticmethod
    def _say(text: str) -> None:
        render.note(text, style="yellow")


def _of_this_job(events: list[Event], name: str) -> list[Event]:
    """Leave out what is of an earlier job of that name. Times do not tell: clocks may be set."""
    began = [n for n, e in enumerate(events) if e.kind == "started" and e.subject == name]
    return events[began[-1] :] if began else events
