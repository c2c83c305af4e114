# SPDX-License-Identifier: Apache-2.0
"""What a room's command prints is kept whole and in order, and settling waits for it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from captured import PYTHON, as_root, until
from hypothesis import given, settings
from hypothesis import strategies as st
from one_room import Start, ended, netns, plan, said, start

from liveshift.criu_glue import output, room
from liveshift.criu_glue.output import HEADER, MARK, STDERR, STDOUT, Record
from liveshift.criu_glue.room import Room, RoomPlan
from liveshift.criu_glue.survey import tasks
from liveshift.errors import LiveshiftError

__all__ = ["netns", "plan", "start"]


records = st.lists(
    st.builds(Record, st.integers(0, 2**64 - 1), st.integers(0, 2), st.binary(max_size=50)),
    max_size=8,
)


def packed(these: list[Record]) -> bytes:
    return b"".join(HEADER.pack(r.realtime_ns, len(r.data), r.stream) + r.data for r in these)


@settings(deadline=None, database=None)
@given(records, st.integers(0, 500))
def test_records_are_cut_where_they_end(these: list[Record], cut: int) -> None:
    raw = packed(these)
    assert list(output.split(raw)) == these
    assert output.whole(raw) == len(raw)
    part = raw[:cut]
    kept = list(output.split(part))
    assert kept == these[: len(kept)]
    assert part[: output.whole(part)] == packed(kept)
    assert output.whole(part + raw[cut:]) == len(raw)


@as_root
def test_output_is_kept_in_order_and_whole(start: Start) -> None:
    program = "import os\nfor n in range(2000): os.write(1 + n % 2, b'%d ' % n * (n % 50))"
    before = time.time_ns()
    stands = start(PYTHON, "-Sc", program)
    assert ended(stands) == "exit 0"
    for stream, odd in ((STDOUT, 0), (STDERR, 1)):
        expected = "".join(f"{n} " * (n % 50) for n in range(odd, 2000, 2))
        assert said(stands, stream) == expected
    times = [r.realtime_ns for r in output.split(stands.plan.log.read_bytes())]
    assert before <= times[0] <= times[-1] <= time.time_ns()


@as_root
def test_settling_waits_for_what_a_stopped_task_has_written(start: Start) -> None:
    program = "import os, signal\nwhile True: os.write(1, b'x' * 60000); os.kill(os.getpid(), 19)"
    stands = start(PYTHON, "-Sc", program)
    for count in range(1, 20):
        until(lambda: [t for t in tasks(stands) if t.status() == "stopped"])
        output.settle(stands)
        assert len(said(stands)) == count * 60000
        marks = [r for r in output.split(stands.plan.log.read_bytes()) if r.stream == MARK]
        assert len(marks) == count
        os.kill(tasks(stands)[0].pid, signal.SIGCONT)
        until(lambda n=count: len(said(stands)) > n * 60000 or not stands.alive())


def test_settling_does_not_stumble_over_a_record_that_is_just_being_written(
    tmp_path: Path,
) -> None:
    plan = RoomPlan(tmp_path, tmp_path, "gpt-1", "", 0, 0, ())
    before, late, mark = (packed([Record(1, n, d)]) for n, d in ((1, b"a"), (1, b"late"), (0, b"")))
    program = (
        "import signal, sys\n"
        f"log = open({str(plan.log)!r}, 'ab', buffering=0)\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])\n"
        f"log.write({before + late[:9]!r}); print('half of it', flush=True)\n"
        "signal.sigwait([signal.SIGUSR1])\n"
        f"log.write({late[9:]!r}); log.write({mark!r}); sys.stdin.read()\n"
    )
    one = subprocess.Popen([PYTHON, "-Sc", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert one.stdin is not None
    assert one.stdout is not None
    with one.stdin, one.stdout:
        one.stdout.readline()
        output.settle(Room(plan, one.pid, room.started(one.pid)), len(before))
        assert [r.data for r in output.split(plan.log.read_bytes())] == [b"a", b"late", b""]
    assert one.wait(10) == 0


@as_root
def test_settling_a_room_that_has_ended_says_so(start: Start) -> None:
    stands = start("sleep", "60")
    os.kill(stands.init, signal.SIGSTOP)
    with pytest.raises(LiveshiftError, match="process 1 of gpt-1 did not settle"):
        output.settle(stands, deadline_s=0.1)
    os.kill(stands.init, signal.SIGCONT)
