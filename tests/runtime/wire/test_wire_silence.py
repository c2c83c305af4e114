# SPDX-License-Identifier: Apache-2.0
"""While a job is paused for a snapshot, a holder that answers nothing is given up soon."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from wire_ends import arriving, key_directory, sender_to

from liveshift.errors import StepFailed
from liveshift.runtime.wire import Sender
from liveshift.runtime.wire.silence import Silence

__all__ = ["key_directory"]

LIMIT_S, LONG_S = 0.6, 4.0


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Lets so many seconds pass at once, by the clock that both ends read."""
    real, ahead = time.monotonic, [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: real() + ahead[0])

    def go(seconds: float) -> None:
        ahead[0] += seconds

    return go


@pytest.fixture
def senders() -> Iterator[Callable[[str, Path], Sender]]:
    made: list[Sender] = []

    def make(endpoint: str, keys: Path) -> Sender:
        made.append(sender_to("m1", endpoint, keys))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_a_destination_that_hangs_is_given_up_soon(
    key_directory: Path, senders: Callable[[str, Path], Sender]
) -> None:
    """Its patience is 10 s. What came before the pause does not count."""
    _, endpoint, inbox = arriving(key_directory)
    sender = senders(endpoint, key_directory)
    sender.send("a", b"1")
    sender.finish()
    inbox.open.clear()
    sender.send("a", b"2")
    time.sleep(2 * LIMIT_S)
    began = time.monotonic()
    sender.silence.begin(LIMIT_S)
    with pytest.raises(StepFailed, match=r"h1 has taken no image bytes for 0\.6 s"):
        sender.finish()
    assert LIMIT_S < time.monotonic() - began < 5
    assert sender.silence.broken
    inbox.open.set()


def test_one_that_is_slow_is_not(
    key_directory: Path, senders: Callable[[str, Path], Sender]
) -> None:
    _, endpoint, inbox = arriving(key_directory)
    sender = senders(endpoint, key_directory)
    sender.silence.begin(20.0)
    inbox.open.clear()
    threading.Timer(0.5, inbox.open.set).start()
    sender.send("a", b"1")
    sender.finish()
    assert 0.4 < sender.silence.longest < 10
    assert not sender.silence.broken


def test_answers_that_nobody_has_read_are_no_silence(
    key_directory: Path, senders: Callable[[str, Path], Sender], later: Callable[[float], None]
) -> None:
    """After the output the source sends nothing before the lock and the barrier."""
    _, endpoint, _ = arriving(key_directory)
    sender = senders(endpoint, key_directory)
    sender.send("output", b"1")
    sender.silence.begin(LONG_S)
    later(2 * LONG_S)
    sender.send("a", b"2")
    sender.finish()
    assert sender.silence.longest < LONG_S
    assert not sender.silence.broken


def test_a_silence_that_nobody_has_seen_does_not_end_the_pause_at_once(
    key_directory: Path, senders: Callable[[str, Path], Sender], later: Callable[[float], None]
) -> None:
    _, endpoint, inbox = arriving(key_directory)
    sender = senders(endpoint, key_directory)
    inbox.open.clear()
    sender.send("output", b"1")
    sender.silence.begin(LONG_S)
    later(2 * LONG_S)
    threading.Timer(0.3, inbox.open.set).start()
    sender.finish()
    assert not sender.silence.broken


def test_an_answer_on_any_lane_ends_the_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    silence = Silence()
    assert not silence.too_long(0.0), "no limit yet"
    silence.begin(2.0)
    one, other = 99.0, 101.0  # since when the two lanes wait
    now[0] = 101.5
    assert not silence.too_long(one)
    silence.heard(one)
    now[0] = 103.4
    assert not silence.too_long(one)
    assert not silence.too_long(other)
    assert silence.longest == 1.5
    now[0] = 103.6
    assert not silence.broken
    assert silence.too_long(one)
    assert silence.broken


def test_a_lane_that_begins_to_wait_has_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    silence = Silence()
    silence.begin(2.0)
    now[0] = 110.0  # nothing was sent meanwhile
    assert not silence.too_long(109.0)
    silence.heard(109.0)
    assert silence.longest == 1.0
