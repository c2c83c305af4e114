# SPDX-License-Identifier: Apache-2.0
"""Timers that were set to an absolute time run out once, and not too early, after a restore."""

from __future__ import annotations

from pathlib import Path

import pytest
from captured import Sink, sink
from one_sandbox import said
from sandbox_trees import SandboxMaker, criu, dumped, new_sandboxes, place
from waits import until

from liveshift.criu_glue.criu.restore import RestoringTree
from liveshift.criu_glue.criu.tool import Criu
from liveshift.criu_glue.images import timerfds
from liveshift.criu_glue.images.image_kinds import ImageFile
from liveshift.criu_glue.images.protobuf import ProtobufMessage
from liveshift.errors import StepFailed

__all__ = ["criu", "new_sandboxes", "place", "sink"]

TIMERS = """
import ctypes
libc = ctypes.CDLL(None)
class Times(ctypes.Structure):
    _fields_ = [(name, ctypes.c_long) for name in ("each_s", "each_ns", "s", "ns")]
def timer(clock, flags, s=0.0, each=0):
    fd = libc.timerfd_create(clock, 0o4000)
    times = Times(each, 0, int(s), round(s % 1 * 1e9))
    assert not libc.timerfd_settime(fd, flags, ctypes.byref(times), None)
    return fd
def ticks(fd):
    try:
        return int.from_bytes(os.read(fd, 8), "little")
    except BlockingIOError:
        return 0
while not 0.8 < time.monotonic() % 1 < 0.85:  # the more of the second is over, the worse it was
    time.sleep(0.001)
now = time.monotonic()
due = now + 3
due_of_day = time.time() + 3
once, of_day, relative = timer(1, 1, due), timer(0, 1, due_of_day), timer(1, 0, 3.0)
each = timer(1, 1, due, 1)
cancelled = timer(0, 3, time.time() + 1000)
over, unread, unset = timer(1, 1, now), timer(1, 1, now), timer(1, 1)
assert ticks(over) == ticks(unread) == 1
del unread; unread = timer(1, 1, now)
os.write(1, b"ready\\n")
while not os.path.exists("/tmp/look"):
    time.sleep(0.005)
    if ticks(once):
        os.write(1, b"once %.3f\\n" % (time.monotonic() - due))
    if ticks(of_day):
        os.write(1, b"day %.3f\\n" % (time.time() - due_of_day))
    if ticks(relative):
        os.write(1, b"relative %.3f\\n" % (time.monotonic() - due))
    if ticks(each):
        os.write(1, b"each %.3f\\n" % (time.monotonic() - due))
    if ticks(over) or ticks(unset):
        os.write(1, b"again\\n")
os.write(1, b"unread %d\\n" % ticks(unread))
time.sleep(600)
"""


def flags(images: Path) -> list[int]:
    """Of the timers with flags, in order."""
    entries = map(ProtobufMessage, ImageFile(images / "files.img").entries)
    timers = [timer for entry in entries if (timer := entry.message(12)) is not None]
    return sorted(timer.uint(6) for timer in timers if timer.uint(6))


@pytest.mark.root
def test_absolute_timers_run_out_once_and_when_they_should(
    criu: Criu, new_sandboxes: SandboxMaker, place: Path, sink: Sink
) -> None:
    here, there = new_sandboxes.start(TIMERS), new_sandboxes.empty()
    until(lambda: "ready" in said(here))
    left = dumped(criu, here, there, place, sink)
    assert flags(left.images) == [1] * 7 + [3]
    for _ in range(2):
        timerfds.make_relative(left.images)
        assert flags(left.images) == [3], "its flag has the program notice changes of the clock"
    left.end()
    tree = RestoringTree(there, left.images)
    tree.bring_up(criu, left.pipes, 60)
    tree.let_run(60)
    until(lambda: said(there).count("each") > 1)
    (there.root / "tmp/look").touch()
    until(lambda: "unread" in said(there))
    words = [line.split() for line in said(there).splitlines()]
    late = {
        word: float(value) for word, value in reversed([each for each in words if len(each) == 2])
    }
    assert "again" not in said(there), "one that is over, or was never set, does not run out"
    assert late.pop("unread") == 1.0, "that it had run out is kept"
    assert late.keys() == {"once", "day", "relative", "each"}
    assert min(late.values()) >= 0.0, "none of them too early"
    assert late["once"] == pytest.approx(late["relative"], abs=0.1)
    assert late["each"] == pytest.approx(late["relative"], abs=0.1)


def test_a_damaged_image_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StepFailed, match=r"the image lacks files.img"):
        timerfds.make_relative(tmp_path)
    (tmp_path / "files.img").write_bytes(b"")
    with pytest.raises(StepFailed):
        timerfds.make_relative(tmp_path)
