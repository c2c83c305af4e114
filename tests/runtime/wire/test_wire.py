# SPDX-License-Identifier: Apache-2.0
"""Image bytes over real ZeroMQ with CURVE on loopback: intact, credited, resumed, refused.

Between sender and receiver stands, where a test needs it, either a TCP proxy that breaks
connections or a middle man who holds both keys and so can lose, repeat, swap and damage chunks.
"""

from __future__ import annotations

import hashlib
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from waits import until
from wire_ends import (
    LIMIT,
    Inbox,
    arriving,
    expected,
    impatient,
    key_directory,
    quick,
    receiver,
    send_all,
    senders,
    traffic,
)
from wire_mishaps import FATES, Fate, MiddleMan, Proxy, unanswered

from liveshift.errors import StepFailed
from liveshift.runtime.wire import Sender, image_worker, lane
from liveshift.runtime.wire.ordered_lane import WINDOW

__all__ = ["impatient", "key_directory", "quick", "senders", "unanswered"]


# ---- the plain way -----------------------------------------------------------------------------


def test_bulk_bytes_arrive_intact(key_directory: Path, senders: Callable[..., Sender]) -> None:
    here, endpoint, inbox = arriving(key_directory)
    sender = senders("m1", endpoint, key_directory, "h0", "h1")
    rng = random.Random(1)
    block = rng.randbytes(1 << 20)
    sent = hashlib.sha256()
    for n in range(64):
        data = block[n * 1000 :] + block[: n * 1000]
        sent.update(data)
        sender.send("image:pages-1.img", data)
    sender.send("image:pages-1.img", b"")
    sender.finish()
    got = bytes(inbox.streams["image:pages-1.img"])
    assert hashlib.sha256(got).digest() == sent.digest()
    assert inbox.ended == ["image:pages-1.img"]
    assert sender.bytes == here.received("m1") == 64 << 20
    assert sender.streams == {"image:pages-1.img": 64 << 20}


def test_two_migrations_at_once_do_not_mix(
    key_directory: Path, senders: Callable[..., Sender]
) -> None:
    here, endpoint = receiver(key_directory)
    inboxes = {"m1": Inbox(), "m2": Inbox()}
    here.expect("m1", "h0", inboxes["m1"], LIMIT)
    here.expect("m2", "h2", inboxes["m2"], LIMIT)
    jobs = {"m1": ("h0", traffic(1)), "m2": ("h2", traffic(2))}
    threads = [
        threading.Thread(
            target=send_all, args=(senders(name, endpoint, key_directory, host, "h1"), chunks)
        )
        for name, (host, chunks) in jobs.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for name, (_, chunks) in jobs.items():
        assert inboxes[name].streams == expected(chunks)


def test_an_image_whose_disk_hangs_keeps_no_other_image_waiting(
    key_directory: Path, senders: Callable[..., Sender], impatient: None
) -> None:
    """Its own source gives up, and no chunk of it is lost that was taken."""
    here, endpoint = receiver(key_directory)
    hangs, well = Inbox(), Inbox()
    hangs.open.clear()
    here.expect("m1", "h0", hangs, LIMIT)
    here.expect("m2", "h2", well, LIMIT)
    stuck = senders("m1", endpoint, key_directory, "h0", "h1")
    last = WINDOW - 1  # more wait for an acknowledgement
    for n in range(last):
        stuck.send("tree:1:tmp", bytes([n]))
    until(lambda: hangs.writes == 1)
    chunks = traffic(1)
    send_all(senders("m2", endpoint, key_directory, "h2", "h1"), chunks)
    assert well.streams == expected(chunks)
    with pytest.raises(StepFailed, match="h1 has taken no image bytes for 1 s"):
        stuck.finish()
    assert hangs.writes == 1
    hangs.open.set()
    until(lambda: hangs.writes == last)
    assert hangs.streams == {"tree:1:tmp": bytes(range(last))}


def test_more_chunks_than_a_source_has_in_flight_do_not_wait(
    key_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_worker, "WAITING", 2)
    taken: list[Any] = []
    may_go, at_work = threading.Event(), threading.Event()

    def take(chunk: Any) -> None:
        at_work.set()
        may_go.wait(20)
        taken.append(chunk)

    worker = image_worker.ImageWorker(take)
    chunks: Any = range(5)
    worker.put(chunks[0])
    assert at_work.wait(20)
    for chunk in chunks[1:]:
        worker.put(chunk)
    may_go.set()
    until(lambda: len(taken) == 3)
    assert taken == [0, 1, 2], "what is dropped is sent again"


def test_an_image_without_work_has_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A holder expects hundreds of images, for as long as their jobs run."""
    monkeypatch.setattr(image_worker, "IDLE_S", 0.05)
    taken: list[Any] = []
    worker = image_worker.ImageWorker(taken.append)
    chunk: Any = "chunk"
    before = set(threading.enumerate())
    for _ in range(2):
        taken.clear()
        worker.put(chunk)
        until(lambda: taken)
        until(lambda: set(threading.enumerate()) <= before)


def test_no_more_than_the_credit_is_in_flight(
    key_directory: Path, senders: Callable[..., Sender], quick: None
) -> None:
    _, endpoint, inbox = arriving(key_directory)
    inbox.open.clear()
    sender = senders("m1", endpoint, key_directory, "h0", "h1")
    chunks = [("output", bytes([n % 251]) * 1000) for n in range(2 * WINDOW)]
    thread = threading.Thread(target=send_all, args=(sender, chunks))
    thread.start()
    time.sleep(0.8)  # four times SEND_AGAIN_S: what waits at the receiver is sent again meanwhile
    assert sender.bytes <= WINDOW * 1000
    inbox.open.set()
    thread.join(20)
    assert not thread.is_alive()
    assert inbox.streams == expected(chunks)
    assert inbox.writes == len(chunks)  # what came twice was written once


# ---- when the way between them is bad ----------------------------------------------------------


def test_a_broken_connection_is_resumed_without_loss(
    key_directory: Path, senders: Callable[..., Sender], quick: None
) -> None:
    here, _, inbox = arriving(key_directory)
    proxy = Proxy(int(here.address.rpartition(":")[2]))
    sender = senders("m1", proxy.endpoint, key_directory, "h0", "h1")
    chunks = traffic(8, 400, largest=60_000)
    for n, (stream, data) in enumerate(chunks):
        if n in (50, 51, 200, 390):
            proxy.cut()
        sender.send(stream, data)
    proxy.cut()
    sender.finish()
    assert proxy.connections >= 4
    assert inbox.streams == expected(chunks)
    assert inbox.writes == len(chunks)
    proxy.close()


def test_a_destination_that_has_gone_is_given_up(
    key_directory: Path, senders: Callable[..., Sender], impatient: None
) -> None:
    """In good time, although nobody takes what is sent again and again."""
    here, _, _ = arriving(key_directory)
    proxy = Proxy(int(here.address.rpartition(":")[2]))
    sender = senders("m1", proxy.endpoint, key_directory, "h0", "h1")
    send_all(sender, traffic(9, 10))
    proxy.close()
    failed: list[BaseException] = []

    def send() -> None:
        try:
            send_all(sender, traffic(10, 10 * WINDOW))
        except StepFailed as error:
            failed.append(error)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive(), "the sender waits for ever"
    assert "h1 has taken no image bytes for 1 s" in str(failed[0])


@pytest.mark.parametrize(
    "fate",
    [
        *FATES,
        pytest.param(lambda n, _: "lose" if n in (0, 1) else "pass", id="the first ones lost"),
    ],
)
def test_a_bad_way_is_mended_and_not_flooded(
    key_directory: Path,
    senders: Callable[..., Sender],
    quick: None,
    unanswered: list[lane.Lane],
    fate: Fate,
) -> None:
    _, endpoint, inbox = arriving(key_directory)
    middle = MiddleMan(key_directory, endpoint, fate)
    began = time.monotonic()
    sender = senders("m1", middle.endpoint, key_directory, "h0", "h1")
    chunks = traffic(11)
    send_all(sender, chunks)
    middle.close()
    assert inbox.streams == expected(chunks)
    assert inbox.writes == len(chunks)
    # One window again for a mishap, not one for each chunk that was on its way behind it.
    assert middle.mishaps
    assert middle.seen < len(chunks) + (middle.mishaps + len(unanswered) + 2) * WINDOW
    assert len(unanswered) * lane.SEND_AGAIN_S <= time.monotonic() - began
