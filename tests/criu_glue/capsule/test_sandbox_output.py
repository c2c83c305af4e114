# SPDX-License-Identifier: Apache-2.0
"""What a sandbox's command prints is kept whole and in order, and settling waits for it."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from captured import PYTHON
from hypothesis import given, settings
from hypothesis import strategies as st
from one_sandbox import Start, ended, netns, plan, records, said, start
from waits import until

from liveshift import units
from liveshift.criu_glue.capsule import output, sandboxes
from liveshift.criu_glue.capsule.output import HEADER, STDERR, STDOUT, OutputRecord
from liveshift.criu_glue.capsule.output_sender import BLOCK, OutputSender
from liveshift.criu_glue.capsule.sandboxes import SandboxPlan
from liveshift.criu_glue.capsule.tree import tasks
from liveshift.errors import LiveshiftError
from liveshift.runtime.agent.host.running_capsule import RunningCapsule

__all__ = ["netns", "plan", "start"]


some_records = st.lists(
    st.builds(OutputRecord, st.integers(0, 2**64 - 1), st.integers(0, 2), st.binary(max_size=50)),
    max_size=8,
)


def packed(these: list[OutputRecord]) -> bytes:
    return b"".join(HEADER.pack(r.realtime_ns, len(r.data), r.stream) + r.data for r in these)


@settings(deadline=None, database=None)
@given(some_records, st.integers(0, 500))
def test_records_are_cut_where_they_end(these: list[OutputRecord], cut: int) -> None:
    raw = packed(these)
    assert list(output.split(raw)) == these
    assert output.whole(raw) == len(raw)
    part = raw[:cut]
    kept = list(output.split(part))
    assert kept == these[: len(kept)]
    assert part[: output.whole(part)] == packed(kept)
    assert output.whole(part + raw[cut:]) == len(raw)


@pytest.mark.root
def test_output_is_kept_in_order_and_whole(start: Start) -> None:
    program = "import os\nfor n in range(2000): os.write(1 + n % 2, b'%d ' % n * (n % 50))"
    before = time.time_ns()
    stands = start(PYTHON, "-Sc", program)
    assert ended(stands) == "exit 0"
    for stream, odd in ((STDOUT, 0), (STDERR, 1)):
        expected = "".join(f"{n} " * (n % 50) for n in range(odd, 2000, 2))
        assert said(stands, stream) == expected
    times = [r.realtime_ns for r in records(stands)]
    assert before <= times[0] <= times[-1] <= time.time_ns()


@pytest.mark.root
def test_output_after_a_rewind_has_offsets_of_its_own(start: Start, plan: SandboxPlan) -> None:
    """The image brings what was printed before the snapshot, and process 1 writes behind it."""
    output.begin_after_rewind(plan.log, 2)
    before = packed([OutputRecord(1, STDOUT, b"before\n")])
    output.segment(plan.log, 0).write_bytes(before)
    stands = start(PYTHON, "-Sc", "print('after')")
    assert ended(stands) == "exit 0"
    assert output.segments(plan.log) == [0, 2 * output.REWIND]
    assert said(stands) == "before\nafter\n"
    assert output.read(plan.log, len(before), 1 << 20)[0] == 2 * output.REWIND


@pytest.mark.root
def test_settling_waits_for_what_a_stopped_task_has_written(start: Start) -> None:
    program = "import os, signal\nwhile True: os.write(1, b'x' * 60000); os.kill(os.getpid(), 19)"
    stands = start(PYTHON, "-Sc", program)
    for count in range(1, 20):
        until(lambda: [t for t in tasks(stands) if t.status() == "stopped"])
        output.settle(stands)
        assert len(said(stands)) == count * 60000
        assert output.written(stands).end == output.size(stands.plan.log)
        os.kill(tasks(stands)[0].pid, signal.SIGCONT)
        until(lambda: len(said(stands)) > count * 60000 or not stands.alive())  # noqa: B023 - called in this turn only


@pytest.mark.root
def test_settling_says_what_did_not_settle_and_who_has_ended(start: Start) -> None:
    wait = "until [ -e /tmp/go ]; do sleep 0.01; done"
    stands = start("sh", "-c", f"{wait}; echo late; exec sleep 60")
    os.kill(stands.init, signal.SIGSTOP)
    (stands.root / "tmp/go").touch()
    until(lambda: output._in_pipes(stands))
    with pytest.raises(LiveshiftError, match="process 1 of gpt-1 did not settle"):
        output.settle(stands, deadline_s=0.1)
    os.kill(stands.init, signal.SIGCONT)
    output.settle(stands)
    assert said(stands) == "late\n"
    sandboxes.end(stands)
    with pytest.raises(LiveshiftError, match="gpt-1 has ended: its first process is gone"):
        output.settle(stands)


# ---- rotation ------------------------------------------------------------------------------------

LINES = "import os\nfor n in range({}): os.write(1, b'%09d\\n' % n)"
"""Prints so many numbered lines of 10 bytes, each a record unless process 1 is slow."""


@pytest.mark.root
def test_old_output_goes_and_what_is_left_keeps_its_offset(start: Start, plan: SandboxPlan) -> None:
    small = replace(plan, log_max=100_000, log_keep=3)
    stands = start(PYTHON, "-Sc", LINES.format(100_000), plan=small)
    assert ended(stands) == "exit 0"
    kept = output.segments(plan.log)
    assert len(kept) == 3
    assert output.size(plan.log) <= 300_000
    at, raw = output.read(plan.log, 0, 1 << 20)
    assert at == kept[0] >= 1_000_000 - 300_000, "the first offset that is there"
    assert raw == output.segment(plan.log, kept[0]).read_bytes()
    lines = "".join(r.data.decode() for r in records(stands)).split()
    assert lines == [f"{n:09}" for n in range(100_000 - len(lines), 100_000)]
    last = output.segment(plan.log, kept[-1]).stat().st_size + kept[-1]
    assert output.read(plan.log, last, 1 << 20) == (last, b"")


@pytest.mark.root
def test_a_log_that_came_from_elsewhere_goes_on_at_its_end(start: Start, plan: SandboxPlan) -> None:
    plan.log.mkdir()
    came = packed([OutputRecord(1, STDOUT, b"came "), OutputRecord(2, STDOUT, b"along ")])
    output.segment(plan.log, 7000).write_bytes(came)
    stands = start("echo", "here")
    assert ended(stands) == "exit 0"
    assert said(stands) == "came along here\n"
    assert output.segments(plan.log) == [7000]


# ---- a full disk ---------------------------------------------------------------------------------


@pytest.fixture
def tiny_disk(plan: SandboxPlan) -> Iterator[Path]:
    """The log's own file system, of 256 KiB."""
    plan.log.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tiny", plan.log], check=True)
    yield plan.log
    subprocess.run(["umount", plan.log], check=True)


@pytest.mark.root
def test_what_a_full_disk_loses_is_counted_where_it_is_missing(
    tiny_disk: Path, start: Start
) -> None:
    """No task waits for the disk, and no byte is lost without being counted."""
    filler = tiny_disk / "filler"
    program = (
        "import os, signal\n"
        "def lines(count):\n"
        "    for n in range(count): os.write(1, b'%09d\\n' % n)\n"
        "    os.kill(os.getpid(), 19)\n"
        "lines(100); lines(30_000); lines(50)\n"
    )
    stands = start(PYTHON, "-Sc", program)
    resident = RunningCapsule(None, 1, None, stands)  # type: ignore[arg-type]

    def next_part() -> output.Written:
        until(lambda: [t for t in tasks(stands) if t.status() == "stopped"])
        output.settle(stands)
        return output.written(stands)

    before = next_part()
    assert (before.lost, before.error, resident.output_trouble()) == (0, 0, "")
    with contextlib.suppress(OSError):
        filler.write_bytes(bytes(256 << 10))
    os.kill(tasks(stands)[0].pid, signal.SIGCONT)
    full = next_part()
    assert full.error == errno.ENOSPC
    assert full.lost + output.size(tiny_disk) == full.end
    lost = f"{units.size(full.lost)} of its output were lost"
    assert f"{lost}: {tiny_disk} cannot be written to: No space" in resident.output_trouble()
    filler.unlink()
    os.kill(tasks(stands)[0].pid, signal.SIGCONT)
    after = next_part()
    assert (after.error, after.lost) == (0, full.lost)
    assert resident.output_trouble().endswith("could not be written to for a time")
    assert said(stands).endswith("".join(f"{n:09}\n" for n in range(50)))
    at, missing = 0, 0
    while (found := output.read(tiny_disk, at, 4096))[1]:
        missing += found[0] - at
        at = found[0] + len(found[1])
    assert (at, missing) == (after.end, after.lost), "as a reader sees it"


@pytest.mark.root
def test_a_disk_that_is_full_again_and_again_costs_no_older_output(
    tiny_disk: Path, start: Start, plan: SandboxPlan
) -> None:
    filler = tiny_disk / "filler"
    program = (
        "import os\nfor n in range(1000):\n    os.write(1, b'%05d\\n' % n + b'x' * 5000)\n"
        "    os.kill(os.getpid(), 19)\n"
    )
    stands = start(PYTHON, "-Sc", program, plan=replace(plan, log_max=200_000, log_keep=3))

    def next_part() -> output.Written:
        until(lambda: [t for t in tasks(stands) if t.status() == "stopped"])
        output.settle(stands)
        found = output.written(stands)
        os.kill(tasks(stands)[0].pid, signal.SIGCONT)
        return found

    next_part()
    for _ in range(6):
        with contextlib.suppress(OSError):
            filler.write_bytes(bytes(256 << 10))
        until(lambda: next_part().error == errno.ENOSPC)
        filler.unlink()
        until(lambda: next_part().error == 0)
    assert len(output.segments(tiny_disk)) > 3
    assert said(stands).startswith("00000\n")


@pytest.mark.root
def test_what_is_lost_at_the_very_end_is_seen_too(tiny_disk: Path, start: Start) -> None:
    with contextlib.suppress(OSError):
        (tiny_disk / "filler").write_bytes(bytes(256 << 10))
    stands = start(PYTHON, "-Sc", "print('x' * 1000)")
    assert ended(stands) == "exit 0"
    assert output.read(tiny_disk, 0, 4096) == (1001 + HEADER.size, b"")


# ---- to another host -----------------------------------------------------------------------------


@pytest.mark.root
@pytest.mark.parametrize("keep", [1000, 3])
def test_a_log_is_sent_while_it_grows_each_byte_once_and_little_at_a_time(
    start: Start, plan: SandboxPlan, tmp_path: Path, keep: int
) -> None:
    """The pre-copy sends what is there, the freeze only what came since. With ``keep`` 3
    segments go while they are being sent."""
    program = (
        "import os, signal\nfor part in range(4):\n"
        "    for n in range(50): os.write(1, b'%d' % part * 60000)\n"
        "    os.kill(os.getpid(), 19)\n"
    )
    there = tmp_path / "there"
    there.mkdir()
    sizes: list[int] = []
    ended_ones: list[str] = []

    def take(stream: str, data: bytes) -> None:
        kind, _, name = stream.partition(":")
        assert (kind, stream in ended_ones) == ("output", False)
        with (there / name).open("ab") as file:
            file.write(data)
        ended_ones.extend([] if data else [stream])
        sizes.append(len(data))

    stands = start(PYTHON, "-Sc", program, plan=replace(plan, log_max=400_000, log_keep=keep))
    sender, peaks = OutputSender(stands), list[int]()
    seen = 0
    for _ in range(4):
        until(lambda: seen < output.written(stands).end < output.UNKNOWN)  # noqa: B023 - called in this turn only
        until(lambda: [t for t in tasks(stands) if t.status() == "stopped"])
        output.settle(stands)
        seen = output.written(stands).end
        before = sum(sizes)
        tracemalloc.start()
        sender.send_new(take)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert sum(sizes) - before <= 50 * 60_100, "what is new, and no more"
        os.kill(tasks(stands)[0].pid, signal.SIGCONT)
    sender.close()
    assert max(sizes) <= BLOCK
    assert max(peaks) < 2 * BLOCK, "an agent has no more of it in memory at a time"
    assert sum(sizes) == output.size(there)
    if keep == 1000:
        assert sum(sizes) == output.size(plan.log) > 12_000_000
    for begins in output.segments(plan.log):
        assert (
            output.segment(there, begins)
            .read_bytes()
            .startswith(
                output.segment(plan.log, begins).read_bytes()[
                    : output.segment(there, begins).stat().st_size
                ]
            )
        )


@pytest.mark.root
def test_a_gap_at_the_end_moves_too(tiny_disk: Path, start: Start) -> None:
    with contextlib.suppress(OSError):
        (tiny_disk / "filler").write_bytes(bytes(256 << 10))
    stands = start(PYTHON, "-Sc", "import os; os.write(1, b'x' * 984); os.kill(os.getpid(), 19)")
    until(lambda: [t for t in tasks(stands) if t.status() == "stopped"])
    output.settle(stands)
    sent: list[tuple[str, bytes]] = []
    OutputSender(stands).finish(lambda stream, data: sent.append((stream, data)))
    assert sent == [(f"output:{1000:020}", b"")]


@pytest.mark.root
def test_a_log_moves_though_nothing_was_printed_between_two_rewinds(
    start: Start, plan: SandboxPlan
) -> None:
    """Each rewind has begun a segment, and both are empty. Only the last one may still grow: the
    other is not sent, so a job that is rewound often and prints little has no more files for it."""
    for rewinds in (1, 2):
        output.begin_after_rewind(plan.log, rewinds)
    before = packed([OutputRecord(1, STDOUT, b"before\n")])
    output.segment(plan.log, 0).write_bytes(before)
    stands = start("sleep", "60")
    sent: list[tuple[str, bytes]] = []
    sender = OutputSender(stands)
    sender.send_new(lambda stream, data: sent.append((stream, data)))
    sender.finish(lambda stream, data: sent.append((stream, data)))
    first, last = (f"output:{n * output.REWIND:020}" for n in (0, 2))
    assert sent == [(first, before), (first, b""), (last, b"")]
