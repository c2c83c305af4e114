# SPDX-License-Identifier: Apache-2.0
"""Threads of a real process are inside a library called libcuda, or outside of it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from waits import until

from liveshift.cuda_snapshot import threads
from liveshift.cuda_snapshot.hold import ThreadHold
from liveshift.cuda_snapshot.whereabouts import Whereabouts
from liveshift.errors import StepFailed

pytestmark = pytest.mark.root

LIBRARY = """
#include <pthread.h>
#include <unistd.h>
volatile long passed;
void driver_waits(void) { for (;;) { usleep(100000000); passed++; } }
void driver_computes(void) { for (;;) passed++; }
void driver_returns(void) { usleep(2000); }
static void *own(void *unused) { (void)unused; driver_waits(); return 0; }
void driver_starts(void) { pthread_t one; pthread_create(&one, 0, own, 0); }
"""

PROGRAM = """
#define _GNU_SOURCE
#include <pthread.h>
#include <string.h>
#include <unistd.h>
void driver_waits(void), driver_computes(void), driver_returns(void), driver_starts(void);
static volatile long passed;
static void computes(void) { for (;;) passed++; }
static void waits(void) { for (;;) pause(); }
static void now_and_then(void) { for (;;) { driver_returns(); usleep(2000); } }
static void *begin(void *what) { ((void (*)(void))what)(); return 0; }
static void start(const char *name, void (*what)(void)) {
    pthread_t one;
    pthread_create(&one, 0, begin, (void *)what);
    pthread_setname_np(one, name);
}
int main(int count, char **words) {
    driver_starts();
    for (int i = 1; i < count; i++) {
        if (!strcmp(words[i], "in-waits")) start(words[i], driver_waits);
        if (!strcmp(words[i], "in-computes")) start(words[i], driver_computes);
        if (!strcmp(words[i], "out-waits")) start(words[i], waits);
        if (!strcmp(words[i], "out-computes")) start(words[i], computes);
        if (!strcmp(words[i], "sometimes")) start(words[i], now_and_then);
    }
    write(1, "x", 1);
    waits();
}
"""


class Start:
    def __init__(self, program: Path) -> None:
        self._program = program
        self.begun: list[subprocess.Popen[bytes]] = []

    def __call__(self, *kinds: str) -> int:
        one = subprocess.Popen([self._program, *kinds], stdout=subprocess.PIPE)
        self.begun.append(one)
        assert one.stdout is not None
        assert one.stdout.read(1) == b"x"
        until(lambda: set(kinds) <= {threads.name(tid) for tid in threads.of(one.pid)})
        until(lambda: all(there(one.pid, tid) for tid in threads.of(one.pid)))
        return one.pid


def there(pid: int, tid: int) -> bool:
    """Whether a thread has entered the function in which it stays: it sleeps, or has computed."""
    fields = Path(f"/proc/{pid}/task/{tid}/stat").read_text().rpartition(")")[2].split()
    return fields[0] == "S" or int(fields[11]) > 2 or threads.name(tid) == "sometimes"


@pytest.fixture(scope="module", params=["-O0", "-O2", "-O2 -fomit-frame-pointer"])
def program(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    folder = tmp_path_factory.mktemp("whereabouts")
    (folder / "library.c").write_text(LIBRARY)
    (folder / "program.c").write_text(PROGRAM)
    compiler = [*os.environ.get("CC", "cc").split(), *request.param.split(), "-pthread"]
    library, program = folder / "libcuda.so.1", folder / "program"
    shared = [*compiler, "-shared", "-fPIC", "-o", library, folder / "library.c"]
    subprocess.run(shared, check=True)
    linked = [*compiler, "-o", program, folder / "program.c", library, f"-Wl,-rpath,{folder}"]
    subprocess.run(linked, check=True)
    return program


@pytest.fixture
def start(program: Path) -> Iterator[Start]:
    made = Start(program)
    yield made
    for one in made.begun:
        with one:
            one.kill()


def test_who_is_inside_is_told_whether_it_waits_or_computes(start: Start) -> None:
    pid = start("in-waits", "in-computes", "out-waits", "out-computes")
    hold = ThreadHold(pid)
    hold.begin(10)
    inside = Whereabouts(pid).inside(hold.held)
    names = {threads.name(tid) for tid in inside}
    hold.end()
    assert names == {"in-waits", "in-computes"}


def test_of_threads_that_are_not_held_those_that_wait_are_seen(start: Start) -> None:
    pid = start("in-waits", "in-computes", "out-waits")
    look = Whereabouts(pid)
    until(lambda: {threads.name(tid) for tid in look.inside(threads.of(pid))} == {"in-waits"})


def test_a_hold_begins_while_all_are_outside(start: Start) -> None:
    pid = start("sometimes", "out-computes")
    for _ in range(5):
        hold = ThreadHold(pid)
        hold.begin_outside(10, 30)
        assert Whereabouts(pid).inside(hold.held) == []
        assert len(hold.held) == 4
        hold.end()


def test_who_does_not_run_at_all_is_taken_for_one_that_is_outside(start: Start) -> None:
    """As a thread on whose stack an address of the driver is left over."""
    pid = start("in-waits", "sometimes")
    hold = ThreadHold(pid)
    hold.begin_outside(10, 30)
    names = {threads.name(tid) for tid in Whereabouts(pid).inside(hold.held)}
    hold.end()
    assert names == {"in-waits"}


def test_a_thread_that_never_comes_out_is_named_and_no_thread_is_held(start: Start) -> None:
    pid = start("in-computes", "out-waits")
    hold = ThreadHold(pid)
    with pytest.raises(
        StepFailed, match=r"in-computes.* was inside a call of the CUDA driver each"
    ):
        hold.begin_outside(10, 0.3)
    assert not hold.held
    assert all(threads.tracer(tid) == 0 for tid in threads.of(pid))


def test_of_a_process_that_has_ended_nothing_is_said(start: Start) -> None:
    pid = start("in-waits")
    start.begun[0].kill()
    start.begun[0].wait()
    assert Whereabouts(pid).inside([pid]) == []
