# SPDX-License-Identifier: Apache-2.0
"""A userfaultfd is opened in real processes, which do not notice."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from memory_subject import Subject, state, subject
from waits import until

from liveshift import ptrace
from liveshift.criu_glue.memory.source import source_engine, userfault
from liveshift.criu_glue.memory.source.userfault import Untrackable

pytestmark = pytest.mark.root


@pytest.fixture
def job() -> Iterator[Subject]:
    with subject() as started:
        yield started


def opened(pid: int) -> None:
    """Once, and closed again; nothing of it is left."""
    before = sorted(os.listdir(f"/proc/{pid}/fd"))
    fd = userfault.open_in(pid)
    assert os.readlink(f"/proc/self/fd/{fd}") == "anon_inode:[userfaultfd]"
    os.close(fd)
    assert sorted(os.listdir(f"/proc/{pid}/fd")) == before


# Calls in which a thread waits. They return 0 after 0.3 s, or when the test lets the thread go on.
WAITS = {
    "nanosleep": "libc.usleep(300000)",
    "poll": "libc.poll(None, 0, 300)",
    "select": "libc.select(0, None, None, None, (ctypes.c_long * 2)(0, 300000))",
    "ppoll": "libc.ppoll(None, 0, (ctypes.c_long * 2)(0, 300000000), ctypes.byref(mask))",
    "futex": "int(not lock.acquire())",
    "read": "libc.read(r, buffer, 1) - 1",
    "recv": "libc.recv(a.fileno(), buffer, 1, 0) - 1",
    "wait4": "int(libc.waitpid(sleeper.pid, None, 0) != sleeper.pid)",
    "flock": "libc.flock(other, 2)",
}
OWN_TIMEOUT = ("nanosleep", "poll", "select", "ppoll")
"""These calls end by themselves, on a busy machine perhaps before the test has seen them wait."""

# System calls of x86-64, for those of the C library that are not named as theirs.
NUMBERS = {
    **{"nanosleep": (35, 230), "poll": (7,), "select": (23, 270), "ppoll": (271,), "futex": (202,)},
    **{"read": (0,), "recv": (45,), "wait4": (61,), "flock": (73,)},
}

SETUP = """import subprocess, socket, fcntl
r, w = os.pipe(); a, b = socket.socketpair(); buffer = ctypes.create_string_buffer(8)
mask = ctypes.create_string_buffer(b"\\xff" * 128)
held, other = os.open("/proc/self/exe", 0), os.open("/proc/self/exe", 0)
fcntl.flock(held, 2); lock = threading.Lock(); lock.acquire()
sleeper = subprocess.Popen(["sleep", "1000"])
late = lambda: (os.write(w, b"x"), b.send(b"x"), fcntl.flock(held, 8), lock.release())
wake = lambda: (open(go).read(), late(), os.kill(sleeper.pid, signal.SIGKILL))
threading.Thread(target=wake, daemon=True).start()"""


def waits_in(pid: int, call: str) -> bool:
    """Whether the first thread does, and not for its next order (proc(5), /proc/[pid]/syscall)."""
    number, first, *_ = [*Path(f"/proc/{pid}/syscall").read_text().split(), ""]
    return number in map(str, NUMBERS[call]) and (number, first) != ("0", "0x0")


def answered(job: Subject) -> bool:
    assert job.process.stdout is not None
    readable, _, _ = select.select([job.process.stdout], [], [], 0)
    return bool(readable)


@pytest.mark.parametrize("call", WAITS)
def test_what_a_thread_waits_in_is_not_interrupted(job: Subject, call: str, tmp_path: Path) -> None:
    go = tmp_path / "go"
    os.mkfifo(go)
    job.do(f"go = {str(go)!r}")
    for line in SETUP.splitlines():
        job.do(line)
    job.do("def timed(f): t = time.monotonic(); v = f(); return v, time.monotonic() - t")
    assert job.process.stdin is not None
    assert job.process.stdout is not None
    pending = False
    while not pending:
        print(f"timed(lambda: {WAITS[call]})", file=job.process.stdin, flush=True)
        until(lambda: waits_in(job.pid, call) or answered(job))
        opened(job.pid)
        pending = not answered(job)
        if not pending:
            assert call in OWN_TIMEOUT
            assert eval(job.process.stdout.readline())[0] == 0
    for _ in range(20):
        opened(job.pid)
    if call not in OWN_TIMEOUT:
        assert not answered(job)
        go.write_text("now")
    value, seconds = eval(job.process.stdout.readline())
    assert value == 0
    if call in OWN_TIMEOUT:
        assert seconds > 0.2


def test_a_poll_without_timeout_is_still_known_as_one() -> None:
    """The kernel's restart_syscall(2) has no name of the call that it goes on with. A dump that
    interrupts it made the poll return EINTR: the worker of Varnish ended after each first
    snapshot."""
    code = "import ctypes; print(ctypes.CDLL(None).poll(None, 0, -1), flush=True)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        try:
            call = Path(f"/proc/{process.pid}/syscall")
            poll = str(NUMBERS["poll"][0])
            until(lambda: call.read_text().split()[0] == poll)
            for _ in range(3):
                opened(process.pid)
                until(lambda: call.read_text() != "running\n")
                assert call.read_text().split()[0] == poll
            assert process.poll() is None
        finally:
            process.kill()


def test_a_process_that_computes_and_takes_signals_goes_on(job: Subject) -> None:
    job.do("count = [0]")
    job.do("signal.signal(signal.SIGALRM, lambda *_: count.__setitem__(0, count[0] + 1))")
    job.do("signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)")
    job.do("sums = []")
    job.do(
        "[threading.Thread(target=lambda: sums.append(sum(range(10**7)))).start() for _ in '123']"
    )
    for _ in range(100):
        opened(job.pid)
    job.do("[t.join() for t in threading.enumerate() if t is not threading.current_thread()]")
    assert job.do("set(sums)") == f"{{{sum(range(10**7))}}}"
    assert job.number("len(sums)") == 3
    before = job.number("count[0]")
    until(lambda: job.number("count[0]") > before)


def test_the_masks_of_its_threads_stay(job: Subject) -> None:
    job.do("signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGRTMIN})")
    mask = job.do("open('/proc/self/status').read().split('SigBlk:')[1].split()[0]")
    opened(job.pid)
    assert job.do("open('/proc/self/status').read().split('SigBlk:')[1].split()[0]") == mask
    assert int(mask, 16)


def test_a_stopped_process_stays_stopped(job: Subject) -> None:
    os.kill(job.pid, signal.SIGSTOP)
    until(lambda: state(job.pid) == "T")
    for _ in range(10):
        opened(job.pid)
        # Let go of, it is awake in the kernel until it stops again (ptrace(2), PTRACE_DETACH).
        until(lambda: state(job.pid) == "T")
    time.sleep(0.05)
    assert state(job.pid) == "T"
    os.kill(job.pid, signal.SIGCONT)
    assert job.do("1 + 1") == "2"


def test_stopped_and_continued_all_the_time(job: Subject) -> None:
    """SIGSTOP cannot be kept away meanwhile."""
    ended = threading.Event()

    def stop_and_go() -> None:
        while not ended.is_set():
            os.kill(job.pid, signal.SIGSTOP)
            os.kill(job.pid, signal.SIGCONT)

    thread = threading.Thread(target=stop_and_go)
    thread.start()
    try:
        for _ in range(50):
            opened(job.pid)
    finally:
        ended.set()
        thread.join()
    assert job.do("1 + 1") == "2"


FILTER = """
code = [(0x20, 0, 0, 0), (0x15, 0, 1, 323), (6, 0, 0, 0x80000000), (6, 0, 0, 0x7fff0000)]
raw = b"".join(struct.pack("<HBBI", *one) for one in code)
program = ctypes.create_string_buffer(raw)
head = ctypes.create_string_buffer(struct.pack("<HxxxxxxQ", len(code), ctypes.addressof(program)))
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, head, 0, 0) == 0
"""


def test_a_seccomp_filter_that_would_kill_it_does_not_and_stays(job: Subject) -> None:
    job.do("import struct")
    for line in FILTER.strip().splitlines():
        job.do(line)
    for _ in range(5):
        opened(job.pid)
    assert job.do("1 + 1") == "2"
    assert job.process.stdin is not None
    print("libc.syscall(323, 0)", file=job.process.stdin, flush=True)
    assert job.process.wait(10) == -signal.SIGSYS


def test_one_that_is_traced_is_left_alone(job: Subject) -> None:
    ptrace.seize(job.pid)
    try:
        with pytest.raises(Untrackable, match=rf"process {os.getpid()} traces it"):
            userfault.open_in(job.pid)
    finally:
        ptrace.interrupt(job.pid)
        until(ptrace.next_event)
        ptrace.detach(job.pid)
    opened(job.pid)


def test_one_that_has_ended_is_said_to(job: Subject) -> None:
    job.process.kill()
    until(lambda: state(job.pid) == "Z")
    with pytest.raises((ProcessLookupError, Untrackable)):
        userfault.open_in(job.pid)
    job.process.wait()
    with pytest.raises((FileNotFoundError, ProcessLookupError)):
        userfault.open_in(job.pid)


def test_one_that_ends_meanwhile_does_no_harm() -> None:
    for _ in range(20):
        with subject() as short:
            assert short.process.stdin is not None
            print("os._exit(0)", file=short.process.stdin, flush=True)
            with contextlib.suppress(Untrackable, FileNotFoundError, ProcessLookupError):
                os.close(userfault.open_in(short.pid))


def test_one_that_runs_another_program_all_the_time_goes_on(tmp_path: Path) -> None:
    """Led to where the old one made its system calls, the new one would be ended by SIGSEGV."""
    script = tmp_path / "again"
    script.write_text('#!/bin/sh\nexec "$0"\n')
    script.chmod(0o700)
    with ended(subprocess.Popen([script])) as process:
        taken = 0
        for _ in range(300):
            with contextlib.suppress(Untrackable):
                os.close(userfault.open_in(process.pid))
                taken += 1
            assert process.poll() is None
        assert taken > 30


def test_one_whose_first_thread_has_ended_is_refused_in_words(job: Subject) -> None:
    """The kernel shows nobody the memory of such a process, and CRIU cannot dump it."""
    job.do("threading.Thread(target=signal.pause, daemon=True).start()")
    assert job.process.stdin is not None
    print("libc.syscall(60, 0)", file=job.process.stdin, flush=True)
    until(lambda: state(job.pid) == "Z")
    assert len(os.listdir(f"/proc/{job.pid}/task")) == 2
    with pytest.raises(Untrackable, match="it has no vdso"):
        userfault.open_in(job.pid)


@contextlib.contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """It is, whatever happens."""
    with process:
        try:
            yield process
        finally:
            process.kill()


def compiled(source: Path, *options: str) -> Path:
    program = source.with_suffix("")
    subprocess.run(["gcc", *options, "-o", program, source], check=True, capture_output=True)
    return program


def test_a_program_of_32_bits_is_refused_in_words(tmp_path: Path) -> None:
    source = tmp_path / "wait.S"
    source.write_text(".globl _start\n_start: mov $29, %eax\nint $0x80\njmp _start\n")
    program = compiled(source, "-m32", "-nostdlib", "-static")
    with ended(subprocess.Popen([program])) as process:
        until(lambda: state(process.pid) == "S")
        with pytest.raises(Untrackable, match="64-bit code"):
            userfault.open_in(process.pid)
        until(lambda: state(process.pid) == "S")


SEQUENCE = r"""
#include <stdio.h>
#include <sys/rseq.h>
static volatile long aborts;
int main(void) {
    char *area = (char *)__builtin_thread_pointer() + __rseq_offset;
    printf("%lx\n", (long)&aborts);
    fflush(stdout);
    __asm__ volatile(
        ".pushsection .data.sections, \"aw\"\n .balign 32\n"
        "9: .long 0, 0\n .quad 1f, 2f - 1f, 4f\n .popsection\n"
        "3: leaq 9b(%%rip), %%rax\n movq %%rax, 8(%0)\n"
        "1: jmp 1b\n"
        "2: nop\n"
        ".long 0x53053053\n"
        "4: incq (%1)\n jmp 3b\n" : : "r"(area), "r"(&aborts) : "rax", "memory");
}
"""


def test_a_restartable_sequence_is_aborted_as_ever(tmp_path: Path) -> None:
    """Led out of it and back by somebody else, it would go on as if nothing had been, together
    with another thread of that processor. This one would then never be aborted again."""
    source = tmp_path / "sequence.c"
    source.write_text(SEQUENCE)
    with ended(subprocess.Popen([compiled(source)], stdout=subprocess.PIPE)) as process:
        assert process.stdout is not None
        counter = int(process.stdout.readline(), 16)

        def aborts() -> int:
            with open(f"/proc/{process.pid}/mem", "rb", buffering=0) as memory:
                memory.seek(counter)
                return int.from_bytes(memory.read(8), "little")

        until(lambda: aborts() > 3)
        for _ in range(20):
            with contextlib.suppress(Untrackable):
                opened(process.pid)
            before = aborts()
            until(lambda before=before: aborts() > before + 1)  # type: ignore[misc]


def test_it_takes_less_than_five_milliseconds(job: Subject) -> None:
    taken = []
    for _ in range(50):
        began = time.perf_counter()
        opened(job.pid)
        taken.append(time.perf_counter() - began)
    # A busy machine makes most of them longer, so a low quantile is looked at.
    assert sorted(taken)[10] < 0.005


def test_a_kernel_that_cannot_follow_memory_says_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = f"Linux {os.uname().release}"
    assert userfault.probe() == ""
    with monkeypatch.context() as without:
        without.setattr(userfault, "_USERFAULTFD", 100_000)  # no system call has that number
        assert userfault.probe() == f"{here} gives no userfaultfd: Function not implemented"
    with monkeypatch.context() as without:
        without.setattr(source_engine, "known_categories", lambda: 0)
        assert userfault.probe() == f"{here} has no PAGEMAP_SCAN, 6.7 has it"
    with monkeypatch.context() as elsewhere:
        machine = type(os.uname())(("Linux", "n", "6.12", "v", "aarch64"))
        elsewhere.setattr(os, "uname", lambda: machine)
        assert userfault.probe() == "liveshift cannot follow memory on aarch64 yet"
