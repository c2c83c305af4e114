# SPDX-License-Identifier: Apache-2.0
"""A double of the orchestrator, as far as the command line can see it. For tests only.

It speaks the real wire format over a real UNIX socket, but nothing runs behind it: a job is what
a test says it prints, moves and ends. The real one is runtime/orchestrator/orchestrator.py; that
both answer the same way on the wire is checked in test_client.py, the real system in integration/.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
from doubles.cluster_state import Capsule, Host, Job, host_row, job_row
from doubles.suspensions import Suspensions, check_readable

from liveshift.criu_glue.capsule.output import HEADER, REWIND, STDOUT
from liveshift.errors import LiveshiftError, NotFound, Refused, Unreachable, to_wire
from liveshift.interposer.inspection import ProcessState
from liveshift.runtime import messages
from liveshift.runtime.messages import (
    Event,
    Message,
    MigrationRow,
    Phase,
)
from liveshift.runtime.model.steps import MigrationStep

LENGTH = struct.Struct("<I")
UNDER_WAY = (MigrationStep.PRECOPYING.value, MigrationStep.FREEZING.value)
CHUNK = 4096
"""Most bytes of output in one answer, whole records or not: a reader has to cope."""


class Orchestrator:
    """Answers at ``path`` between :meth:`start` and :meth:`stop`; a context manager for both."""

    def __init__(self, path: Path, hosts: int = 3) -> None:
        self.path = path
        self.hosts = {f"h{n}": Host(f"h{n}") for n in range(hosts)}
        self.jobs: dict[str, Job] = {}
        self.moves: dict[str, MigrationRow] = {}
        self.events: list[Event] = []
        self.processes: dict[str, list[ProcessState]] = {}  # of a capsule
        self.asks: list[Message] = []
        self.refuse: dict[type[Message], LiveshiftError] = {}  # what to answer, from now on
        self.evacuating: messages.Evacuating | None = None  # what a taint with a deadline answers
        self.prediction: messages.Prediction | None = None  # of every move and plan
        cost = messages.Cost(0.9, 0.6, 0.3, 1.25, 0.5, 0.4, 246_000_000, 240_000_000)
        self.cost: messages.Cost | None = cost  # of every move, at once
        self.warnings: list[str] = []  # of every plan
        self.shared = ["/", str(path.parent)]  # files.shared: where the command line is called
        self.hold_moves = False  # moves begun by an ask stay under way until finish_move()
        self.signals_end = True  # SIGTERM and SIGKILL do, at once
        self.changed = threading.Condition()
        self._listener: socket.socket | None = None
        self.rewind_ends = [("rewound", "runs again from s7")]  # kind and text
        self.suspensions = Suspensions()
        self.trouble = ""
        """What the orchestrator waits for before it can go on."""
        self._lines: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []

    # ---- being there ----

    def __enter__(self) -> Orchestrator:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        self.path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self.path))
        self._listener.listen()
        self._spawn(self._accept, self._listener)

    def stop(self) -> None:
        """Go away as after a crash: connections break, the socket's file stays."""
        assert self._listener is not None
        with self.changed:
            for line in (self._listener, *self._lines):
                with contextlib.suppress(OSError):
                    line.shutdown(socket.SHUT_RDWR)
            self._lines.clear()
            self.changed.notify_all()
        for thread in self._threads:
            thread.join(15)
            assert not thread.is_alive()
        self._threads.clear()
        self._listener.close()

    def _spawn(self, work: object, line: socket.socket) -> None:
        thread = threading.Thread(target=work, args=(line,), daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                line, _ = listener.accept()
            except OSError:
                return
            with self.changed:
                self._lines.add(line)
                self._spawn(self._converse, line)

    def _converse(self, line: socket.socket) -> None:
        with line, contextlib.suppress(OSError, EOFError):
            while True:
                (length,) = LENGTH.unpack(_receive(line, LENGTH.size))
                frame = messages.decode(_receive(line, length))
                assert frame.body is not None
                try:
                    raw = messages.encode_answer(frame.id, self._answer(frame.body, line))
                except LiveshiftError as error:
                    raw = messages.encode_error(frame.id, to_wire(error))
                line.sendall(LENGTH.pack(len(raw)) + raw)
        with self.changed:
            self._lines.discard(line)

    # ---- what a test makes happen ----

    def print(self, capsule: str, data: bytes, stream: int = STDOUT, at: float = 0.0) -> None:
        """The capsule's command writes; ``at``: when, in seconds since the epoch."""
        with self.changed:
            realtime_ns = int((at or time.time()) * 1e9)
            self._capsule(capsule).log += HEADER.pack(realtime_ns, len(data), stream) + data
            self.changed.notify_all()

    def cut_back(self, capsule: str, to: int, gone: str = "") -> None:
        """A rewind cuts the capsule's log back to so many bytes; ``gone``: why no host keeps the
        rest."""
        with self.changed:
            found = self._capsule(capsule)
            found.cut_off, found.log = found.log[to:], found.log[:to]
            found.rewound_at, found.gone = to, gone
            self.changed.notify_all()

    def end(self, capsule: str, code: int = 0) -> None:
        """The capsule's command ends; the job does with its last capsule."""
        with self.changed:
            job = self.jobs[capsule.partition("/")[0]]
            job.capsules[capsule].code = code
            if all(c.code is not None for c in job.capsules.values()):
                job.code = next((c.code for c in job.capsules.values() if c.code), 0)
            self.changed.notify_all()

    def begin_move(self, capsule: str, to: str, reason: str = "test", by: str = "root") -> str:
        """A move is under way, with half of its bytes across; returns its name."""
        with self.changed:
            moved = self._capsule(capsule)
            name = f"m{len(self.moves) + 1}"
            self.moves[name] = MigrationRow(
                name=name,
                capsule=capsule,
                source=moved.host,
                destination=to,
                reason=reason,
                by=by,
                epoch=moved.epoch,
                state=MigrationStep.FREEZING.value,
                asked=time.time(),
                seconds=0.5,
                frozen_s=0.2,
                image_bytes=0,
                bytes=123_000_000,
                expected_bytes=246_000_000,
                link_rate=0.0,
                phases=[],
                error=None,
                hint=None,
                predicted=self.prediction,
            )
            moved.migration = name
            self._tell(capsule, "move", f"{name} begins: {moved.host} → {to}", by, name)
            return name

    def precopying(self, name: str, rounds: messages.Rounds | None) -> None:
        """The move's memory is being copied while the job trains; it does not stand yet."""
        with self.changed:
            self.moves[name] = msgspec.structs.replace(
                self.moves[name], state=MigrationStep.PRECOPYING.value, frozen_s=0.0, precopy=rounds
            )
            self.changed.notify_all()

    def finish_move(self, name: str, error: LiveshiftError | None = None) -> None:
        """The move ends, with an error before its commit if there is one."""
        with self.changed:
            row = self.moves[name]
            moved = self._capsule(row.capsule)
            moved.migration = None
            if error is None:
                moved.host, moved.epoch = row.destination, moved.epoch + 1
            self.moves[name] = msgspec.structs.replace(
                row,
                epoch=moved.epoch,
                state=(MigrationStep.FAILED if error else MigrationStep.DONE).value,
                seconds=1.25,
                frozen_s=0.0 if isinstance(error, Refused) else 0.7,
                image_bytes=0 if error else 246_000_000,
                bytes=0 if error else 246_000_000,
                link_rate=0.0 if error else 612e6,
                phases=[
                    Phase("prepare", 0.0, 0.45, None, False, "12 tasks"),
                    *([] if error else [Phase("dump", 0.5, 0.4, 246_000_000, True)]),
                    *([] if error else [Phase("restore", 0.9, 0.3, None, True)]),
                ],
                error=str(error) if error else None,
                hint=error.hint if error else None,
                cost=None if error else self.cost,
            )
            kind = "not moved" if error else "moved"
            self._tell(row.capsule, "boundary", "paused after collective 7 of gloo", row.by, name)
            verb = "did not move" if error else "moved"
            text = f"{verb} {row.source} → {row.destination}"
            self._tell(row.capsule, kind, text, row.by, name)
            self.changed.notify_all()

    def end_before_move(self, name: str, code: int = 0) -> None:
        """The capsule's command ends by itself, and so does the move that was under way."""
        with self.changed:
            self.finish_move(name, Refused("its processes have gone"))
            row = self.moves[name]
            words = f"{row.capsule} ended with code {code} before it could move h1 → h2"
            ended = msgspec.structs.replace(row, state=MigrationStep.JOB_ENDED.value, error=words)
            self.moves[name] = ended
            self.end(row.capsule, code)

    def move(self, capsule: str, to: str) -> None:
        self.finish_move(self.begin_move(capsule, to))

    def wait_for(self, what: type[Message], count: int = 1, timeout: float = 20.0) -> Message:
        """The ``count``-th ask of a kind, once it has come."""
        with self.changed:

            def come() -> list[Message]:
                return [ask for ask in self.asks if isinstance(ask, what)]

            assert self.changed.wait_for(lambda: len(come()) >= count, timeout), self.asks
            return come()[count - 1]

    # ---- what it answers ----

    def _answer(self, ask: Message, line: socket.socket) -> Message | None:
        with self.changed:
            self.asks.append(ask)
            self.changed.notify_all()
            if error := self.refuse.get(type(ask)):
                raise error
            match ask:
                case messages.RunJob():
                    return self._run(ask)
                case messages.GetStatus():
                    return self._status(ask.job)
                case messages.ReadOutput():
                    return self._output(ask, line)
                case messages.ReadRepeated():
                    return self._repeated(ask)
                case messages.GetInspection():
                    capsule = self._capsule(ask.capsule)
                    seen = self.processes.get(capsule.name, [])
                    return messages.Inspection(capsule.name, capsule.host, seen)
                case messages.SignalJob():
                    self._signal(ask)
                    return None
                case messages.RewindJob():
                    return self._rewind(ask)
                case messages.SnapshotJob():
                    return self.suspensions.snapshot(self._job(ask.job), ask, self._tell)
                case messages.SuspendJob():
                    return self.suspensions.suspend(self._job(ask.job), ask, self._tell)
                case messages.WithdrawOrder():
                    return self.suspensions.withdraw()
                case messages.ResumeJob():
                    if ask.source and ask.job not in self.jobs:
                        self._run(messages.RunJob(ask.job, 2, ["train"], {}, "/", 0, []))
                    return self.suspensions.resume(self._job(ask.job), ask, self._tell)
                case messages.EndUnknown():
                    return messages.UnknownEnded(self._host(ask.host).state == "lost")
                case messages.SetTaint():
                    self._taint(ask)
                    return self.evacuating if ask.within or ask.severity else None
                case messages.PlanEvacuation():
                    return self.evacuating or messages.Evacuating(ask.host, 0.0, 0.0, False, [])
                case messages.Untaint():
                    self._host(ask.host).taint = None
                    return None
                case messages.Cordon():
                    self._host(ask.host).cordon = "root"
                    return None
                case messages.Uncordon():
                    host = self._host(ask.host)
                    host.taint = host.cordon = None
                    return None
                case messages.Migrate():
                    return self._migrate(ask)
                case messages.Cancel():
                    return None
                case messages.GetMigration():
                    if ask.name not in self.moves:
                        raise NotFound(f'no migration "{ask.name}"')
                    return messages.MigrationDetails(self.moves[ask.name])
                case messages.WhoAmI():
                    may = ["read everybody's output"]
                    return messages.Me("root", "admin", "root", 0, "", "double", may, self.shared)
                case messages.GetEvents():
                    return messages.Events(list(self._events(ask)))
            raise LiveshiftError(f"the double does not know {type(ask).__name__}")

    def _run(self, ask: messages.RunJob) -> messages.Named:
        name = ask.name or f"job{len(self.jobs) + 1}"
        names = [f"{name}/{n}" for n in range(ask.nnodes)]
        hosts = list(self.hosts)
        capsules = {c: Capsule(c, hosts[n % len(hosts)]) for n, c in enumerate(names)}
        self.jobs[name] = Job(name, ask.argv, capsules)
        self._tell(name, "started", " ".join(ask.argv), "root")
        return messages.Named(name)

    def _status(self, only: str) -> messages.Status:
        jobs = [job_row(job) for job in self.jobs.values() if only in ("", job.name)]
        capsules = {each.name: each.host for job in jobs for each in job.capsules}
        hosts = [host_row(host, self._running()) for host in self.hosts.values()]
        moving = [row for row in self.moves.values() if row.state in UNDER_WAY]
        return messages.Status(
            cluster="double",
            time=time.time(),
            jobs=jobs,
            hosts=[host for host in hosts if not only or host.name in capsules.values()],
            moving=[row for row in moving if not only or row.capsule in capsules],
            trouble=self.trouble,
        )

    def _output(self, ask: messages.ReadOutput, line: socket.socket) -> messages.Output:
        capsule = self._capsule(ask.capsule)
        check_readable(self._job(ask.capsule.partition("/")[0]))
        epoch = capsule.epoch

        def news() -> bool:
            gone = line not in self._lines
            there = len(capsule.log) > capsule.place(ask.offset) or capsule.code is not None
            return there or gone or capsule.epoch != epoch

        self.changed.wait_for(news, ask.wait)
        if capsule.epoch != epoch:  # as when the source's agent hangs up in the middle of it
            raise Unreachable(f"{capsule.host} does not answer")
        at = max(ask.offset, capsule.kept_from)
        place, cut = capsule.place(at), capsule.rewound_at
        if cut is not None and place >= cut:
            at, cut = max(at, REWIND), None
        data = capsule.log[place : min(place + CHUNK, len(capsule.log) if cut is None else cut)]
        code = capsule.code if not data else None
        return messages.Output(data, at + len(data), code, at - ask.offset)

    def _repeated(self, ask: messages.ReadRepeated) -> messages.Repeated:
        capsule = self._capsule(ask.capsule)
        data = b"" if capsule.gone else capsule.cut_off[ask.offset - (capsule.rewound_at or 0) :]
        return messages.Repeated(data, ask.until, host=capsule.host, gone=capsule.gone)

    def _signal(self, ask: messages.SignalJob) -> None:
        self._job(ask.job).signals.append(ask.signum)
        if self.signals_end and ask.signum in (signal.SIGKILL, signal.SIGTERM):
            for capsule in self.jobs[ask.job].capsules.values():
                self.end(capsule.name, 128 + ask.signum)

    def _rewind(self, ask: messages.RewindJob) -> messages.RewindOrdered:
        if not ask.dry_run:
            self._tell(ask.job, "rewinding", "goes back to s7: root wants it", "root")
            for kind, text in self.rewind_ends:
                self._tell(ask.job, kind, text, "")
        where = {c.name: c.host for c in self.jobs[ask.job].capsules.values()}
        return messages.RewindOrdered(ask.job, "s7", "step 9", 21.6, where, 0.5)

    def _taint(self, ask: messages.SetTaint) -> None:
        self._host(ask.host).taint = ask.reason
        self._tell(ask.host, "tainted", f"tainted: {ask.reason}", "root")
        for capsule in self._running():
            if capsule.host != ask.host:
                continue
            free = self._free()
            if free is None:
                text = f"no spare can take {capsule.name} (add a host)"
                self._tell(capsule.name, "not moved", text, "root")
                continue
            name = self.begin_move(capsule.name, free, f"{ask.host} is tainted: {ask.reason}")
            if not self.hold_moves:
                self.finish_move(name)

    def _migrate(self, ask: messages.Migrate) -> Message:
        capsule = self._capsule(ask.capsule)
        if ask.to_gpu:
            return self._swap(capsule, ask)
        to = ask.to or self._free()
        if to is None or to == capsule.host:
            raise Refused(f"{capsule.name} cannot move to {to}", hint="name another host")
        if ask.dry_run:
            checks = [("destination", f"{to}, as asked"), ("CRIU", "4.2.1")]
            checks += [("warning", words) for words in self.warnings]
            return messages.Planned(
                capsule.name, capsule.host, to, checks, 250_000_000, 1_000, self.prediction
            )
        name = self.begin_move(capsule.name, to, ask.reason)
        if not self.hold_moves:
            self.finish_move(name)
        return messages.Named(name)

    def _swap(self, capsule: Capsule, ask: messages.Migrate) -> Message:
        way = f"{capsule.host} GPU 3", f"{capsule.host} GPU {ask.to_gpu.rpartition('/')[2]}"
        if ask.dry_run:
            checks = [("GPU", "H200, nobody else uses it"), ("device memory", "80 GiB")]
            return messages.Planned(capsule.name, *way, checks, 0, 0)
        name = self.begin_move(capsule.name, way[1], ask.reason)
        self.moves[name] = msgspec.structs.replace(
            self.moves[name],
            source=way[0],
            state=MigrationStep.DONE.value,
            seconds=1.25,
            frozen_s=0.7,
            bytes=0,
            expected_bytes=0,
            phases=[Phase("restore", 0.5, 0.7, None, True)],
            kind="swap",
        )
        capsule.migration = None
        return messages.Named(name)

    def _events(self, ask: messages.GetEvents) -> Iterator[Event]:
        known = {"", *self.jobs, *self.hosts, *(c.name for c in self._everyone())}
        if ask.subject not in known | set(self.moves):
            raise NotFound(f'nothing is known of "{ask.subject}"')
        for event in self.events:
            name = event.migration.name if event.migration else None
            about = (event.subject, event.subject.partition("/")[0], name, "")
            if event.number > ask.after and ask.subject in (*about, ""):
                row = self.moves[name] if name else None
                yield msgspec.structs.replace(event, migration=row)

    def _tell(
        self, subject: str, kind: str, text: str, by: str, migration: str | None = None
    ) -> None:
        row = self.moves[migration] if migration else None
        number = len(self.events) + 1
        self.events.append(Event(number, time.time(), subject, kind, text, by, row))

    def _job(self, name: str) -> Job:
        if name not in self.jobs:
            raise NotFound(f'no job "{name}"')
        return self.jobs[name]

    def _everyone(self) -> list[Capsule]:
        return [c for job in self.jobs.values() for c in job.capsules.values()]

    def _running(self) -> list[Capsule]:
        awake = (job for job in self.jobs.values() if not job.suspended)
        return [c for job in awake for c in job.capsules.values() if c.code is None]

    def _capsule(self, name: str) -> Capsule:
        found = [c for c in self._everyone() if c.name == name]
        if not found:
            raise NotFound(f'no capsule "{name}"', hint="`liveshift status` lists them")
        return found[0]

    def _host(self, name: str) -> Host:
        if name not in self.hosts:
            known = ", ".join(self.hosts)
            raise NotFound(f'no host "{name}" in this cluster', hint=f"its hosts are: {known}")
        return self.hosts[name]

    def _free(self) -> str | None:
        taken = {c.host for c in self._running()}
        taken |= {row.destination for row in self.moves.values() if row.state in UNDER_WAY}
        open_ = [h.name for h in self.hosts.values() if h.taint is None and h.cordon is None]
        able = (name for name in open_ if name not in taken)
        return next(able, None)


def _receive(line: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        part = line.recv(length - len(data))
        if not part:
            raise EOFError
        data += part
    return data
