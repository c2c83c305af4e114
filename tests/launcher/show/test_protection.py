# SPDX-License-Identifier: Apache-2.0
"""What ``status`` shows of the snapshots of a job, suspended or not."""

from __future__ import annotations

import time
from io import StringIO

import msgspec
import pytest
from rich.console import Console

from liveshift.launcher.show import protection, status_tables
from liveshift.runtime.messages import NOT_YET, CapsuleRow, JobRow, ProtectionRow, Status

KEPT = ProtectionRow(0.0, "s17", 3661.0, 1_200_000_000, ["h2", "h3"])
GONE = "h3, which keeps s17, is not up"


def suspended(row: ProtectionRow | None) -> JobRow:
    capsules = [
        CapsuleRow(
            name=f"gpt/{n}",
            index=n,
            state="suspended",
            host="",
            epoch=3,
            address=f"10.99.1.{n + 2}",
            ranks=[],
            pids=0,
            resident=0,
            collectives=0,
            rate=12.3,
            code=None,
            migration=None,
        )
        for n in range(2)
    ]
    return JobRow("gpt", "suspended", "train", 0, 0.0, 12.3, None, capsules, row)


def lines(row: ProtectionRow | None, *, wide: bool) -> list[str]:
    return [line.plain for line in protection.lines([suspended(row)], wide=wide)]


def test_that_a_job_has_only_begun_is_no_warning() -> None:
    """``status`` shows a job without a snapshot as unprotected, but for its first seconds."""

    def said(why_not: str, *, wide: bool) -> list[str]:
        job = msgspec.structs.replace(
            suspended(ProtectionRow(30.0, why_not=why_not)), state="running"
        )
        return [line.plain for line in protection.lines([job], wide=wide)]

    assert said(NOT_YET, wide=False) == []
    assert said(NOT_YET, wide=True) == [f"gpt: unprotected: {NOT_YET}"]
    assert said("h2 has no room", wide=False) == ["gpt: unprotected: h2 has no room"]


@pytest.mark.parametrize("state", ["running", "suspended"])
@pytest.mark.parametrize("row", [ProtectionRow(), KEPT])
@pytest.mark.parametrize(("ago", "recent"), [(0.0, 1), (3599.0, 1), (3600.0, 0)])
def test_where_the_last_rewind_led_is_shown_for_an_hour_and_of_one_job_and_in_wide(
    row: ProtectionRow, state: str, ago: float, recent: int
) -> None:
    at = time.mktime(time.strptime("2026-11-02 14:03:12", "%Y-%m-%d %H:%M:%S"))
    back = msgspec.structs.replace(row, rewound_to=at, repeated_s=22.4, rewound_ago_s=ago)
    job = msgspec.structs.replace(suspended(back), state=state)
    said = "gpt: rewound to boundary of 2026-11-02 14:03:12, 22 s of training repeated"
    for wide, one, count in ((False, False, recent), (True, False, 1), (False, True, 1)):
        found = [line.plain for line in protection.lines([job], wide=wide, rewinds=one)]
        assert found.count(said) == count
        written, status = StringIO(), Status("c", 1.0, [job], [], [])
        Console(width=300, file=written).print(*status_tables.parts(status, wide=wide, one=one))
        assert written.getvalue().count(said) == count


@pytest.mark.parametrize("wide", [False, True])
def test_a_suspended_job_shows_since_when_and_where_it_is(wide: bool) -> None:
    said = "gpt: suspended 1 h 01 min ago; s17 is 1.20 GB in the memory of h2, h3"
    assert lines(KEPT, wide=wide) == [said]


@pytest.mark.parametrize("wide", [False, True])
def test_a_suspended_job_that_cannot_be_resumed_now_shows_why(wide: bool) -> None:
    found = lines(msgspec.structs.replace(KEPT, why_not=GONE), wide=wide)
    assert found[1:] == [f"gpt: cannot be resumed now: {GONE}"]


@pytest.mark.parametrize("wide", [False, True])
def test_a_suspended_job_shows_which_host_it_depends_on(wide: bool) -> None:
    found = lines(msgspec.structs.replace(KEPT, alone=["h2"]), wide=wide)
    assert found[1:] == ["gpt: h2 has the only copy of an image of it, so far"]
    found = lines(msgspec.structs.replace(KEPT, alone=["h2", "h3"]), wide=wide)
    assert found[1:] == ["gpt: h2, h3 have the only copy of an image of it, so far"]


@pytest.mark.parametrize("every", [0.0, 30.0])
def test_a_suspended_job_without_an_image_does_not_show_one(every: float) -> None:
    """As after a journal was put back from a backup."""
    row = ProtectionRow(every, why_not="no snapshot is complete yet" if every else "")
    for line in lines(row, wide=False):
        assert "in the memory of" not in line


def test_a_suspended_job_is_not_called_unprotected_or_stale() -> None:
    row = msgspec.structs.replace(KEPT, every=30.0, trouble="h2 has no room", would_wait="if h0 …")
    found = " ".join(lines(row, wide=True))
    assert "unprotected" not in found
    assert "no later snapshot" not in found
    assert "if h0" not in found


def test_without_a_rewind_none_is_shown() -> None:
    running = msgspec.structs.replace(suspended(KEPT), state="running")
    for wide in (False, True):
        found = [line.plain for line in protection.lines([running], wide=wide, rewinds=True)]
        assert not any("rewound" in line for line in found)


def test_a_job_that_goes_back_is_shown_as_rewinding() -> None:
    capsules = [
        msgspec.structs.replace(capsule, state="starting", host="h2")
        for capsule in suspended(KEPT).capsules
    ]
    job = msgspec.structs.replace(suspended(KEPT), state="rewinding", capsules=capsules)
    for wide in (False, True):
        written = StringIO()
        shown = Status("c", 1.0, [job], [], [])
        Console(width=300, file=written).print(*status_tables.parts(shown, wide=wide))
        lines = [" ".join(line.split()) for line in written.getvalue().splitlines()]
        assert any(line.startswith("gpt rewinding 12.3") for line in lines), lines
        assert any(line.startswith("gpt/0 starting h2 3") for line in lines), lines


def test_a_suspended_job_has_no_rate_and_no_host_in_the_table() -> None:
    status = Status("c", 1.0, [suspended(KEPT)], [], [])
    for wide in (False, True):
        written = StringIO()
        Console(width=300, file=written).print(status_tables.jobs(status, wide=wide))
        shown = written.getvalue()
        assert shown.count("suspended") == 3, "the job and its two capsules"
        assert "12.3" not in shown


@pytest.mark.parametrize("wide", [False, True])
def test_what_a_person_must_know_of_a_silence_is_shown(wide: bool) -> None:
    says = "h0 and its kernel are silent. If h0 is dead: `liveshift rewind gpt --lost h0`"
    row = msgspec.structs.replace(KEPT, silent=says)
    job = msgspec.structs.replace(suspended(row), state="running")
    assert f"gpt: {says}" in [line.plain for line in protection.lines([job], wide=wide)]


@pytest.mark.parametrize("state", ["running", "rewinding"])
@pytest.mark.parametrize("wide", [False, True])
def test_what_a_rewind_waits_for_is_shown(state: str, wide: bool) -> None:
    """What a failure would cost now is not said beside it: one is there."""
    row = msgspec.structs.replace(
        KEPT, rewinding="waits: no host has room for gpt/1", would_wait="if h0 died, it would wait"
    )
    job = msgspec.structs.replace(suspended(row), state=state)
    said = [line.plain for line in protection.lines([job], wide=wide)]
    assert "gpt: waits: no host has room for gpt/1" in said
    assert not any("if h0 died" in line or "if a host failed" in line for line in said)
