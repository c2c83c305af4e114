# SPDX-License-Identifier: Apache-2.0
"""Which peers have not answered, and for how long, is read off the kernel's tables."""

from __future__ import annotations

import os

import pytest

from liveshift.criu_glue.survey.unanswered import parse, timeouts, unanswered

HEAD = "  sl  local_address rem_address st tx_queue rx_queue tr tm->when retrnsmt uid timeout inode"
TICKS = os.sysconf("SC_CLK_TCK")
AGAIN, FULL_WINDOW = "01", "04"  # what the kernel waits for


def row(state: str, timer: str, left_s: float, times: int, timeout_s: float, peer: str = "") -> str:
    left, timeout = round(left_s * TICKS), round(timeout_s * TICKS)
    queue, waits = "00000640:00000000", f"{timer}:{left:08X}"
    rest = f"{times:08X}     0        0 4711 2 0000000000000000 {timeout} 4 30 10 -1"
    return f"   0: 0101630A:8E5C {peer or '0201630A:1388'} {state} {queue} {waits} {rest}"


def read(*rows: str) -> list[tuple[str, float]]:
    return list(parse("\n".join((HEAD, *rows)) + "\n"))


@pytest.mark.parametrize(
    ("left_s", "times", "timeout_s", "waited_s"),
    [(0.4, 1, 0.4, 0.2), (0.1, 1, 0.4, 0.5), (0.8, 2, 0.8, 0.6), (1.5, 4, 3.2, 4.7)],
)
def test_a_timeout_that_doubles_says_when_it_began(
    left_s: float, times: int, timeout_s: float, waited_s: float
) -> None:
    ((peer, seconds),) = read(row("01", AGAIN, left_s, times, timeout_s))
    assert peer == "10.99.1.2"
    assert seconds == pytest.approx(waited_s)


def test_only_what_was_sent_again_counts() -> None:
    assert read(row("01", AGAIN, 0.1, 0, 0.2)) == [], "it was sent just now"
    assert read(row("01", FULL_WINDOW, 0.1, 3, 1.6)) == [], "the peer's kernel answers"
    assert read(row("02", AGAIN, 0.1, 3, 1.6)) == [], "it was never connected"
    assert read("   0: 0101630A:8E5C 0201630A:1388 06 0:0 03:00000100 0 0 0 0 3 0") == []


def test_an_address_in_a_table_of_ipv6_is_read_too() -> None:
    mapped = "0000000000000000FFFF00000201630A:1388"
    ((peer, _),) = read(row("01", AGAIN, 0.1, 2, 0.8, mapped))
    assert peer == "10.99.1.2"


def test_a_process_that_has_ended_waits_for_nobody() -> None:
    nobody = 2**22 + 1
    assert unanswered(nobody, "10.99.1.0/24") == {}
    assert timeouts(nobody) == 0
    assert timeouts(os.getpid()) >= 0
