# SPDX-License-Identifier: Apache-2.0
"""The inbox: complete only when the manifest says so, and closed to what no image has."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import memory_parts
import pytest
import xxhash
from descriptors import no_descriptor_left
from inbox_scene import Host, host
from memory_parts import BASE, PAGE, page
from waits import until

from liveshift.criu_glue.files.unpacking import Unpacker
from liveshift.criu_glue.memory.store.store import PAGES_FILE, MemoryStore
from liveshift.errors import LiveshiftError, NotFound, StepFailed
from liveshift.runtime.agent.arrival import inbox as inboxes
from liveshift.runtime.agent.departure.paused_silence import PAUSED_SILENCE_S
from liveshift.runtime.model import manifest

__all__ = ["host"]


CORE = "image:core-1001.img"
LOG = "output:" + "0" * 20
STOP = 100 << 20
"""Bytes that a stop will bring."""


def test_an_image_is_complete_once_its_manifest_has_come(host: Host) -> None:
    (host.source / "model.pt").write_bytes(b"weights")
    Path(os.fsdecode(os.fsencode(host.source) + b"/\xff")).write_bytes(b"x")
    host.send(CORE, b"registers")
    host.send("image:empty.img", b"")
    host.send(LOG, b"lines")
    host.send_tree("tree:1:tmp")
    host.send_tree(f"tree:1:carried:{host.carried}")
    assert (host.inbox.complete, host.landed().complete) == (False, False)
    with pytest.raises(NotFound, match="no complete image"):
        manifest.load(host.images)
    sent = host.finish(removed=manifest.as_bytes({"tmp": ["model.pt"]}))
    assert host.inbox.complete
    assert host.inbox.manifest == sent
    assert sorted(p.name for p in host.images.iterdir()) == [
        "came",
        "core-1001.img",
        "empty.img",
        "manifest",
    ]
    assert (host.images / "core-1001.img").read_bytes() == b"registers"
    assert (host.resident.sandbox.plan.log / LOG[7:]).read_bytes() == b"lines"
    assert (host.carried / "model.pt").read_bytes() == b"weights"

    again = host.landed()
    assert again.complete
    assert again.manifest == sent
    assert (
        again.place.came
        == host.inbox.place.came
        == {
            "tmp": {".", "\udcff"},
            str(host.carried): {".", "model.pt", "\udcff"},
        }
    )
    assert again.place.written == host.inbox.place.written
    assert again.bytes == host.inbox.bytes
    for inbox in (host.inbox, again):
        with pytest.raises(StepFailed, match="takes no more data"):
            inbox.write("image:late.img", memoryview(b"x"))
        inbox.close()


OTHERS = {
    "of another migration": {"migration": "m2"},
    "of another capsule": {"capsule": "gpt/2"},
    "of another size": {"streams": {CORE: (8, xxhash.xxh3_64_intdigest(b"registers"))}},
    "of other bytes": {"streams": {CORE: (9, 1)}},
    "without one": {"streams": {}},
    "with one more": {
        "streams": {
            CORE: (9, xxhash.xxh3_64_intdigest(b"registers")),
            "image:mm-1001.img": (0, xxhash.xxh3_64_intdigest(b"")),
        }
    },
    "with other pipes": {"pipes": {11: 3}},
    "with other trees": {"removed": {"carried:/etc": [b"passwd"]}},
    "of another version": {"version": 99},
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS.keys())
def test_a_manifest_that_says_otherwise_is_refused(host: Host, other: dict[str, object]) -> None:
    host.send(CORE, b"registers")
    with pytest.raises(LiveshiftError, match=r"manifest|complete|carried"):
        host.finish(**other)
    assert not host.inbox.complete
    assert not (host.images / "manifest").exists()


@pytest.mark.parametrize("raw", [b"", b"\xc1", b"\x87", b"\x91" * 100_000, b"\x80"])
def test_a_manifest_that_is_none_is_refused(host: Host, raw: bytes) -> None:
    with pytest.raises(LiveshiftError, match="the manifest is not understood"):
        host.end(raw)
    assert not host.inbox.complete


def test_a_manifest_is_not_taken_beyond_its_limit(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "LIMIT", 100)
    with pytest.raises(StepFailed, match="more than 100 bytes"):
        host.end(bytes(101))


def test_what_was_gone_again_at_the_freeze_has_not_come(host: Host) -> None:
    """Else an old copy of it that lies here would be taken for one that came, and stay."""
    for name in ("kept", "gone"):
        (host.source / name).write_text(name)
    host.send_tree(f"tree:1:carried:{host.carried}")
    removed = {f"carried:{host.carried}": ["gone"], "shm": ["never came"]}
    host.finish(removed=manifest.as_bytes(removed))
    assert host.inbox.place.came == {str(host.carried): {".", "kept"}}
    assert host.landed().place.came == host.inbox.place.came


def test_streams_must_end(host: Host) -> None:
    host.send(CORE, b"registers", end=False)
    with pytest.raises(StepFailed, match=r"core-1001\.img' did not end"):
        host.finish()


def test_nothing_comes_after_an_end(host: Host) -> None:
    host.send(CORE, b"registers")
    with pytest.raises(StepFailed, match="after its end"):
        host.send(CORE, b"more")


@pytest.mark.parametrize(
    "stream",
    [
        "image:",
        "image:../x.img",
        "image:/x.img",
        "image:x",
        "image:.x.img",
        "image:manifest",
        "image:restore-hook",
        "image:x.img\0",
        "image:x.img\n",
        "image:" + "x" * 80 + ".img",
        "image:criu.conf",
        "tree:3:tmp",
        "tree:1:",
        "tree:1:carried:/etc",
        "tree:1:/etc",
        "tree:1:carried:",
        "tree:tmp",
        "output:x",
        "",
        "x",
        "manifest:",
        "tree",
        "image",
    ],
)
def test_streams_that_no_image_has_are_refused(host: Host, stream: str) -> None:
    before = sorted(host.images.parent.parent.rglob("*"))
    with pytest.raises(StepFailed, match=r"no destination takes|not carried"):
        host.inbox.write(stream, memoryview(b"x"))
    host.inbox.close()
    assert sorted(host.images.parent.parent.rglob("*")) == before


def test_no_image_replaces_what_is_there(host: Host) -> None:
    (host.images / "core-1001.img").write_bytes(b"here")
    with pytest.raises(FileExistsError):
        host.send(CORE, b"x")
    (host.images / "mm-1.img").symlink_to("/etc/passwd")
    with pytest.raises(FileExistsError):
        host.send("image:mm-1.img", b"x")


def test_streams_are_counted(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inboxes, "OPEN", 3)
    for n in range(3):
        host.send(f"image:core-{n}.img", b"x", end=False)
    with pytest.raises(StepFailed, match="too many streams"):
        host.send("image:core-3.img", b"x")
    monkeypatch.setattr(inboxes, "STREAMS", 5)
    host.send("image:core-0.img", b"")
    host.send("image:core-3.img", b"x")
    host.send("image:core-4.img", b"x")
    with pytest.raises(StepFailed, match="too many streams"):
        host.send("image:core-5.img", b"x")
    host.inbox.close()


def test_a_closed_inbox_takes_nothing_and_leaves_nothing_open(host: Host) -> None:
    with no_descriptor_left():
        host.send(CORE, b"x", end=False)
        host.send(LOG, b"x", end=False)
        host.send("tree:1:tmp", bytes(10), end=False)
        host.inbox.close()
        host.inbox.close()
    with pytest.raises(StepFailed, match="takes no more data"):
        host.send(CORE, b"x")


def test_a_damaged_note_of_an_earlier_life_is_said(
    host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    host.send(CORE, b"x")
    host.finish()
    (host.images / "came").write_bytes(b"\xc1")
    assert not host.landed().complete
    assert "a list of what came is not understood" in caplog.text


def pages(many: int) -> memoryview:
    own = {BASE + n * PAGE: page(n) for n in range(many)}
    return memoryview(b"".join(memory_parts.chunks(7, own)))


def test_no_page_is_taken_by_a_host_that_has_no_memory_left(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.inbox.memory_limit = 1 << 30
    left = iter([inboxes.LEFT, 0, inboxes.LEFT])
    monkeypatch.setattr(inboxes, "memory_left", lambda: next(left, 5 << 20))
    looked = 0

    def fill() -> None:
        nonlocal looked
        for n in range(3 * inboxes.LOOK // (100 * PAGE) + 3):
            host.inbox.pages.write(1, pages(100), b"tag")
            looked = n

    monkeypatch.setattr(inboxes, "FREED_S", 0.1)
    with pytest.raises(StepFailed, match=r"no memory for more: 5\.24 MB are left"):
        fill()
    assert looked * 100 * PAGE > 2.9 * inboxes.LOOK, "twice it had some, or got some at once"


def test_a_holder_says_that_it_has_no_memory_before_its_source_takes_it_for_silent(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
    monkeypatch.setattr(inboxes, "time", clock)
    monkeypatch.setattr(inboxes, "memory_left", lambda: 5 << 20)
    with pytest.raises(StepFailed, match="no memory for more"):
        inboxes.need_memory()
    assert now[0] - 100.0 < 0.8 * PAUSED_SILENCE_S


@pytest.fixture
def in_memory() -> Iterator[Host]:
    """One whose images lie in a tmpfs, as those of hosts do."""
    with tempfile.TemporaryDirectory(prefix="ls-inbox-", dir="/dev/shm") as place:
        made = Host(Path(place))
        yield made
        made.inbox.forget_memory()


def test_memory_is_there_before_a_stop_brings_pages(in_memory: Host) -> None:
    """The file that takes them has so much memory; no CRIU is started early for what all comes
    while the job stands."""
    host, came = in_memory, list[object]()
    host.inbox.memory_limit = 1 << 30
    host.ahead.begin = came.append
    assert host.inbox.make_room() is False
    assert host.inbox.memory is None, "nothing is known of what will come"
    host.inbox.make_room(STOP)
    until(lambda: not host.inbox.make_room(STOP))
    file = host.images / PAGES_FILE
    assert STOP <= file.stat().st_blocks * 512 < STOP + (64 << 20)
    host.inbox.pages.write(1, pages(100), b"tag")
    assert came == []


def test_no_more_room_is_made_than_the_host_has_memory_for(
    in_memory: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, in_memory.inbox.memory_limit = in_memory, 1 << 30
    monkeypatch.setattr(inboxes, "memory_left", lambda: 2 * inboxes.LEFT + (32 << 20))
    host.inbox.make_room(STOP)
    until(lambda: not host.inbox.make_room(STOP))
    assert (host.images / PAGES_FILE).stat().st_blocks * 512 == 32 << 20


def test_pages_do_not_wait_for_a_disk(in_memory: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads that store them serve all images of this host."""
    host, may_go = in_memory, threading.Event()
    host.inbox.memory_limit = 1 << 30
    monkeypatch.setattr(Unpacker, "write", lambda *_: may_go.wait(20))
    with ThreadPoolExecutor(2) as threads:
        files = threads.submit(host.send, "tree:1:tmp", b"x", False)
        until(host.inbox._ordered.locked)
        threads.submit(host.inbox.pages.write, 1, pages(100), b"tag").result(10)
        assert not files.done()
        closing = threads.submit(host.inbox.close)
        until(lambda: host.inbox._closed)
        with pytest.raises(StepFailed, match="takes no pages"):
            host.inbox.pages.write(1, pages(100), b"tag")
        may_go.set()
        files.result(10)
        closing.result(10)


def test_pages_of_two_lanes_are_stored_at_the_same_time(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each thread waits in the store for the other one. What is not stored yet does not count."""
    host.inbox.memory_limit = 1 << 30
    both, write = threading.Barrier(2), MemoryStore.write
    counted: list[dict[str, tuple[int, int]]] = []

    def together(self: MemoryStore, chunk: memoryview) -> None:
        both.wait(20)
        counted.append(host.inbox.pages.streams())
        both.wait(20)
        write(self, chunk)

    monkeypatch.setattr(MemoryStore, "write", together)
    chunk = pages(8)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda lane: host.inbox.pages.write(lane, chunk, b"tag"), (1, 2)))
    assert counted == [{}, {}]
    streams = host.inbox.pages.streams()
    assert {name: size for name, (size, _) in streams.items()} == {
        "memory:1": len(chunk),
        "memory:2": len(chunk),
    }


def test_a_closed_inbox_waits_for_the_threads_that_still_write_pages(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page that one of them brings late must not come into another image."""
    host.inbox.memory_limit = 1 << 30
    begun, go_on, order = threading.Event(), threading.Event(), list[str]()

    def slow(_store: MemoryStore, _chunk: memoryview) -> None:
        begun.set()
        go_on.wait(20)
        order.append("written")

    def close() -> None:
        host.inbox.close()
        go_on.set()
        host.inbox.wait_for_writers()
        order.append("waited")

    monkeypatch.setattr(MemoryStore, "write", slow)
    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(host.inbox.pages.write, 1, pages(8), b"tag")
        assert begun.wait(20)
        close()
        written.result(20)
    assert order == ["written", "waited"]
    with pytest.raises(StepFailed, match="takes no pages"):
        host.inbox.pages.write(1, pages(8), b"tag")
    host.inbox.wait_for_writers()


def test_an_image_whose_memory_was_lost_again_is_not_complete(host: Host) -> None:
    lost: Any = SimpleNamespace(lost="it has ended", halt=lambda: None)
    host.inbox.ahead = lost
    host.send(CORE, b"core")
    with pytest.raises(StepFailed, match="put in place in advance is lost: it has ended"):
        host.finish()
    assert not host.inbox.complete
    assert not host.landed().complete
