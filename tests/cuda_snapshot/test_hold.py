# SPDX-License-Identifier: Apache-2.0
"""Threads of real processes are held, and notice nothing of it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from held_threads import Counters, build
from waits import until

from liveshift import ptrace
from liveshift.cuda_snapshot import threads
from liveshift.cuda_snapshot.hold import ThreadHold, spared_threads
from liveshift.errors import StepFailed

pytestmark = pytest.mark.root

KINDS = ["busy:busy", "sleep:sleep", "poll:poll", "futex:futex", "read:read", "liveshift:busy"]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("held"))


class Subject:
    """One run of held_threads."""

    def __init__(self, program: Path, path: Path, kinds: list[str], processes: int) -> None:
        path.touch()
        self.counters = Counters(path, kinds)
        command = [str(program), str(path), str(processes), *kinds]
        self.process = subprocess.Popen(command, start_new_session=True)
        until(lambda: self.counters.all_began(processes))
        self.pids = [self.counters.row("signals", p).tid for p in range(processes)]

    @property
    def pid(self) -> int:
        return self.process.pid

    def runs(self, *names: str, process: int = 0) -> None:
        """All of them get on."""
        before = self.counters.done(process)
        until(lambda: all(self.counters.done(process)[n] > before[n] + 2 for n in names))

    def stands(self, *names: str, process: int = 0) -> None:
        before = self.counters.done(process)
        time.sleep(0.15)  # three times what any of them takes
        now = self.counters.done(process)
        assert {n: now[n] for n in names} == {n: before[n] for n in names}


class Subjects:
    def __init__(self, program: Path, directory: Path) -> None:
        self._program = program
        self._directory = directory
        self._made: list[Subject] = []

    def start(self, kinds: list[str] = KINDS, processes: int = 1) -> Subject:
        path = self._directory / f"counters-{len(self._made)}"
        self._made.append(Subject(self._program, path, kinds, processes))
        return self._made[-1]

    def close(self) -> None:
        for subject in self._made:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(subject.pid, signal.SIGKILL)
            subject.process.wait(10)


@pytest.fixture
def subjects(program: Path, tmp_path: Path) -> Iterator[Subjects]:
    made = Subjects(program, tmp_path)
    yield made
    made.close()


OTHERS = ("busy", "sleep", "poll", "futex", "read")


def state(tid: int) -> str:
    text = Path(f"/proc/{tid}/stat").read_text()
    return text.rsplit(")", 1)[1].split()[0]


def states(pid: int) -> set[str]:
    found = set()
    for tid in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended since
            found.add(state(int(tid)))
    return found


def came(subject: Subject, signals: int) -> None:
    until(lambda: subject.counters.row("signals").done >= signals)
    assert subject.counters.row("signals").done == signals


def service(pid: int) -> set[int]:
    return spared_threads(pid, -1)


def test_all_but_the_spared_threads_stand_still_and_then_go_on_undisturbed(
    subjects: Subjects,
) -> None:
    subject = subjects.start()
    subject.runs(*OTHERS, "liveshift")
    held = ThreadHold(subject.pid, service)
    for _ in range(3):
        held.begin(5)
        assert len(held.held) == len(KINDS)  # the first thread too
        subject.stands(*OTHERS)
        subject.runs("liveshift")
        assert not held.lost()
        held.end()
        assert held.held == frozenset()
        subject.runs(*OTHERS, "liveshift")
    held.end()  # may be said again
    assert subject.counters.wrong() == {}, "a system call came back early, or failed"


def test_a_signal_sent_meanwhile_comes_afterwards_and_once(subjects: Subjects) -> None:
    subject = subjects.start(["busy:busy"])
    held = ThreadHold(subject.pid)
    for turn in range(1, 4):
        held.begin(5)
        os.kill(subject.pid, signal.SIGUSR1)
        subject.stands("busy")
        assert subject.counters.row("signals").done == turn - 1
        held.end()
        came(subject, turn)
        subject.runs("busy")
        assert subject.counters.row("signals").done == turn


def test_signals_that_come_while_a_hold_begins_and_ends_are_neither_lost_nor_doubled(
    subjects: Subjects,
) -> None:
    subject = subjects.start(["busy:busy", "sleep:forever"])
    sent, enough, over = 0, threading.Event(), threading.Event()

    def hold_and_let_go() -> None:
        held, turns = ThreadHold(subject.pid), 0
        while turns < 200 or not enough.is_set():
            held.begin(5)
            held.end()
            turns += 1
        over.set()

    holding = threading.Thread(target=hold_and_let_go)
    holding.start()
    try:
        while not over.is_set():
            os.kill(subject.pid, signal.SIGUSR1)
            sent += 1
            # A second one of a number that is still pending is none: wait until it was handled.
            came(subject, sent)
            if sent > 50:
                enough.set()
    finally:
        enough.set()  # when this fails the thread is to end, too
        holding.join()
    subject.runs("busy")
    assert subject.counters.row("signals").done == sent > 50


def test_what_was_stopped_is_held_too_and_on_sigcont_only_the_spared_go_on(
    subjects: Subjects,
) -> None:
    subject = subjects.start(KINDS, processes=2)
    for pid in subject.pids:
        os.kill(pid, signal.SIGSTOP)
    until(lambda: all(states(pid) == {"T"} for pid in subject.pids))
    holds = [ThreadHold(pid, service) for pid in subject.pids]
    for held in holds:
        held.begin(5)
    subject.stands(*OTHERS, "liveshift")
    os.kill(subject.pids[0], signal.SIGCONT)
    subject.stands(*OTHERS)
    subject.runs("liveshift")
    subject.stands(*OTHERS, "liveshift", process=1)
    # Stopped again under the hold, it stays so when the hold ends.
    os.kill(subject.pids[0], signal.SIGSTOP)
    for held in holds:
        held.end()
    for p, pid in enumerate(subject.pids):
        until(lambda: states(pid) == {"T"})  # noqa: B023 - called in this turn only
        subject.stands(*OTHERS, "liveshift", process=p)
    for p, pid in enumerate(subject.pids):
        os.kill(pid, signal.SIGCONT)
        subject.runs(*OTHERS, "liveshift", process=p)
        assert subject.counters.wrong(p).keys() <= {"futex"}


TRACER = """
import sys, time
from liveshift.cuda_snapshot.hold import ThreadHold, spared_threads
held = ThreadHold(int(sys.argv[1]), lambda pid: spared_threads(pid, -1), kill_on_exit={kill})
held.begin(5)
{then}
print("held", flush=True)
time.sleep(600)
"""


@contextlib.contextmanager
def tracer(pid: int, kill: bool, then: str = "") -> Iterator[subprocess.Popen[str]]:
    """An agent that holds, and is killed at last."""
    code = textwrap.dedent(TRACER.format(kill=kill, then=then))
    command = [sys.executable, "-c", code, str(pid)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as agent:
        try:
            assert agent.stdout is not None
            assert agent.stdout.readline() == "held\n"
            yield agent
        finally:
            agent.kill()


def test_the_end_of_the_agent_kills_what_it_holds_if_it_is_to(subjects: Subjects) -> None:
    subject = subjects.start()
    with tracer(subject.pid, kill=True):
        subject.stands(*OTHERS)
    assert subject.process.wait(10) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("kills", "then"), [(False, ""), (True, "held.spare_from_exit()")], ids=["never", "spared"]
)
def test_else_the_end_of_the_agent_lets_it_go_on(
    subjects: Subjects, kills: bool, then: str
) -> None:
    subject = subjects.start()
    with tracer(subject.pid, kill=kills, then=then):
        subject.stands(*OTHERS)
    subject.runs(*OTHERS, "liveshift")
    assert subject.counters.wrong() == {}


def test_a_hold_that_kills_at_its_holders_end_does_not_when_it_is_ended(
    subjects: Subjects,
) -> None:
    subject = subjects.start()
    held = ThreadHold(subject.pid, service, kill_on_exit=True)
    held.begin(5)
    held.end()
    subject.runs(*OTHERS, "liveshift")


def test_a_process_that_is_killed_while_it_is_held_is_gone_for_its_parent(
    subjects: Subjects,
) -> None:
    subject = subjects.start()
    with tracer(subject.pid, kill=True) as agent:
        subject.process.kill()
        assert subject.process.wait(10) == -signal.SIGKILL
        assert agent.poll() is None


def test_a_hold_ends_well_when_what_it_held_was_killed(subjects: Subjects) -> None:
    subject = subjects.start(["busy:busy"], processes=2)
    _, child = subject.pids
    held = ThreadHold(child, kill_on_exit=True)
    held.begin(5)
    os.kill(child, signal.SIGKILL)
    until(lambda: not held.held)
    assert held.lost()
    assert state(child) == "Z"
    with pytest.raises(StepFailed, match=f"hold: process {child} was killed while it was held"):
        held.spare_from_exit()
    held.end()
    subject.runs("busy")


def test_what_has_ended_needs_no_holding() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    zombie = subprocess.Popen(["true"])
    until(lambda: state(zombie.pid) == "Z")
    for pid in (gone.pid, zombie.pid):
        held = ThreadHold(pid)
        held.begin(5)
        assert held.held == frozenset()
        held.end()
    zombie.wait()


def test_threads_may_come_and_go_while_a_hold_begins(tmp_path: Path) -> None:
    code = "import threading\nwhile True: threading.Thread(target=int).start()"
    with subprocess.Popen([sys.executable, "-c", code]) as busy:
        for _ in range(20):
            held = ThreadHold(busy.pid)
            held.begin(10)
            assert states(busy.pid) <= {"t", "Z", "X"}
            held.end()
        busy.kill()


def test_what_a_debugger_has_is_said_in_words_and_let_go(subjects: Subjects) -> None:
    subject = subjects.start(["busy:busy"])
    with tracer(subject.pid, kill=False) as agent:
        with pytest.raises(StepFailed) as failed:
            ThreadHold(subject.pid).begin(5)
        says = f"of process {subject.pid} is traced already, by process {agent.pid} (python"
        assert says in failed.value.message
        assert failed.value.hint == "end the debugger or tracer and try again"
        assert ptrace.next_event() is None
        subject.stands("busy")
    subject.runs("busy")


@pytest.fixture
def in_vfork(tmp_path: Path) -> Iterator[int]:
    """A process that waits in vfork: its child, before it execs, waits for a FIFO's writer. Another
    thread of it sleeps."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    code = (
        "import os, threading, time; "
        "threading.Thread(target=time.sleep, args=(600,), daemon=True).start(); "
        "os.posix_spawn('/bin/sleep', ['sleep', '600'], {}, "
        f"file_actions=[(os.POSIX_SPAWN_OPEN, 0, {str(fifo)!r}, os.O_RDONLY, 0)]); "
        "print('spawned', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
        until(lambda: state(parent.pid) == "D" and children.read_text().split())
        (child,) = map(int, children.read_text().split())
        until(lambda: state(child) == "S")
        try:
            yield parent.pid
            os.close(os.open(fifo, os.O_WRONLY))
            assert parent.stdout is not None
            assert parent.stdout.readline() == b"spawned\n"
        finally:
            os.kill(child, signal.SIGKILL)
            parent.kill()


def test_a_thread_that_cannot_be_stopped_is_named_and_all_go_on(in_vfork: int) -> None:
    pid = in_vfork
    began = time.monotonic()
    with pytest.raises(StepFailed) as failed:
        ThreadHold(pid).begin(0.2)
    assert 0.2 <= time.monotonic() - began < 2
    says = rf"hold: thread {pid} \(python.*\) of process {pid}, in state D"
    assert failed.match(says + r".*, did not stop within 0\.2 s")
    assert [threads.tracer(tid) for tid in threads.of(pid)] == [0, 0]
    assert ptrace.next_event() is None


def test_spared_are_the_service_thread_and_the_drivers_by_either_number(
    subjects: Subjects,
) -> None:
    subject = subjects.start(["liveshift:forever", "cuda0:forever", "liveshift down:forever"])
    ours, drivers = (subject.counters.row(name).tid for name in ("liveshift", "cuda0"))
    assert spared_threads(subject.pid, drivers) == {ours, drivers}
    assert spared_threads(subject.pid, -1) == {ours}
    subject.process.kill()
    subject.process.wait()
    with pytest.raises(ProcessLookupError):
        spared_threads(subject.pid, drivers)


def test_spared_are_all_threads_that_only_the_driver_names_so(subjects: Subjects) -> None:
    named = ["cuda-EvtHandlr", "cuda00006000019"]  # as stack traces of users show them
    subject = subjects.start([f"{name}:forever" for name in (*named, "cuda worker", "cudaface")])
    assert spared_threads(subject.pid, -1) == {subject.counters.row(name).tid for name in named}


def test_the_drivers_thread_may_go_by_its_number_in_the_capsule(
    program: Path, tmp_path: Path
) -> None:
    path = tmp_path / "counters"
    path.touch()
    counters = Counters(path, ["cuda0:forever"])
    command = ["unshare", "--pid", "--fork", "--kill-child"]
    command += [str(program), str(path), "1", "cuda0:forever"]
    with subprocess.Popen(command) as outer:
        until(counters.all_began)
        children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text()
        (pid,) = map(int, children.split())
        (thread,) = {int(tid) for tid in os.listdir(f"/proc/{pid}/task")} - {pid}
        assert spared_threads(pid, counters.row("cuda0").tid) == {thread}
        outer.kill()


ABOUT_AS_HERE = 'echo $(($0 + 8)) > /proc/sys/kernel/ns_last_pid; "$@"'


def test_a_number_that_two_threads_have_is_the_one_that_it_is_here(
    program: Path, tmp_path: Path
) -> None:
    """In the capsule the threads are numbered about as here, each as one of the others is. If other
    processes take many numbers meanwhile, none is, and it is tried again."""
    assert any(two_had_the_same(program, tmp_path / f"counters-{n}") for n in range(50))


def two_had_the_same(program: Path, path: Path) -> bool:
    """Whether a number was that of two threads; then it was the one that it is here."""
    kinds = [f"cuda{n}:forever" for n in range(14)]
    last = Path("/proc/loadavg").read_text().split()[-1]
    command = ["unshare", "--pid", "--fork", "--kill-child", "sh", "-c", ABOUT_AS_HERE, last]
    path.touch()
    counters = Counters(path, kinds)
    with subprocess.Popen([*command, program, path, "1", *kinds]) as outer:
        try:
            until(counters.all_began)
            (pid,) = {
                process.pid
                for process in psutil.Process(outer.pid).children(recursive=True)
                if process.name() == program.name
            }
            there = {tid: threads.innermost(tid) for tid in threads.of(pid)}
            twice = [tid for tid in there if tid in there.values() and there[tid] != tid]
            for tid in twice:
                assert spared_threads(pid, tid) == {tid}
            return bool(twice)
        finally:
            outer.kill()
