# SPDX-License-Identifier: Apache-2.0
"""A held image comes to a destination as its source would have sent it, as often as it is needed.
The wire is real, at both ends."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from held_scene import CORE, LOG, Holder, Source, holder, note, packed, some_memory
from inbox_scene import Host
from memory_parts import BASE, PAGE, content, digest, page
from wire_ends import LIMIT, key_directory, receiver, senders

from liveshift.errors import NotFound, StepFailed
from liveshift.runtime.messages import Frozen
from liveshift.runtime.wire import LANES, Lanes, Sender

__all__ = ["holder", "key_directory", "senders"]

FIRST = some_memory(count=2000)
CHANGED = {7: {BASE + n * PAGE: page(9000 + n) for n in range(20)}}
SECOND = {7: FIRST[7] | CHANGED[7], 8: FIRST[8]}
LARGE = os.urandom(3 << 20)


class Target:
    """A destination, which gets images as m1; the wire to it."""

    def __init__(
        self, place: Path, key_directory: Path, senders: Callable[..., Sender], lanes: list[Lanes]
    ) -> None:
        self.host = Host(place)
        self.host.inbox.memory_limit = 1 << 30
        here, endpoint = receiver(key_directory)
        here.expect("m1", "h0", self.host.inbox, LIMIT, self.host.inbox.pages, LANES)
        self.sender = senders("m1", endpoint, key_directory)
        self.lanes = Lanes(self.sender, f"tcp://{here.pages.address}", 2)
        lanes.append(self.lanes)

    def get(self, holder: Holder, number: int) -> Frozen:
        return holder.capsule.forward(number, self.sender, self.lanes)

    @property
    def memory(self) -> object:
        assert self.host.inbox.memory is not None
        return content(self.host.inbox.memory)


@pytest.fixture
def target(
    key_directory: Path, senders: Callable[..., Sender], tmp_path: Path
) -> Iterator[Callable[[], Target]]:
    lanes: list[Lanes] = []
    made: list[Target] = []

    def make() -> Target:
        made.append(Target(tmp_path / f"t{len(made)}", key_directory, senders, lanes))
        return made[-1]

    yield make
    for each in lanes:
        each.close()
    for one in made:
        one.host.inbox.forget_memory()


def test_a_held_image_comes_whole_to_a_destination(
    target: Callable[[], Target], tmp_path: Path
) -> None:
    """Images, output, memory, and both passes of the directories, with names that were removed."""
    there = target()
    host, carried = there.host, there.host.carried
    with tempfile.TemporaryDirectory(prefix="ls-held-", dir="/dev/shm") as place:
        holder = Holder(Path(place), carried=(carried,))
        source = Source(holder.images.expect(note(17)))
        ahead, rest = tmp_path / "ahead", tmp_path / "rest"
        parts = ((ahead, 1e9, ("kept", "changed", "gone")), (rest, 2e9, ("changed", "new")))
        for top, written, files in parts:
            top.mkdir()
            for name in files:
                (top / name).write_text(f"{name} {top.name}")
                os.utime(top / name, (written, written))
        source.send("tree:1:tmp", packed(ahead))
        source.send(f"tree:1:carried:{carried}", packed(ahead))
        source.send_pages(FIRST)
        source.send(LOG, b"lines")
        source.send(CORE, b"registers")
        source.send("image:pages-1.img", LARGE)
        source.send("image:empty.img", b"")
        source.send("tree:2:tmp", packed(rest))
        source.send("tree:2:shm", packed(rest))
        source.send(f"tree:2:carried:{carried}", packed(rest))
        source.end_memory(FIRST)
        removed = {"tmp": ["gone"], f"carried:{carried}": ["gone"]}
        sent = source.finish(removed)
        holder.capsule.held(17, digest(FIRST))
        before = holder.files()
        frozen = there.get(holder, 17)
        assert holder.files() == before, "it stays, for a further one"
        holder.images.close()
    assert (frozen.image_bytes, frozen.phases) == (7, [])
    assert host.inbox.complete
    found = host.inbox.manifest
    assert (found.migration, found.capsule) == ("m1", "gpt/1")
    assert (found.pipes, found.gone(), found.epoll) == (sent.pipes, removed, [])
    assert there.memory == FIRST
    for name, data in (("core-1001", b"registers"), ("pages-1", LARGE), ("empty", b"")):
        assert (host.images / f"{name}.img").read_bytes() == data
    assert (host.resident.sandbox.plan.log / LOG[7:]).read_bytes() == b"lines"
    for top in (host.resident.sandbox.plan.tmp, carried):
        assert {path.name: path.read_text() for path in top.iterdir()} == {
            "kept": "kept ahead",
            "changed": "changed rest",
            "gone": "gone ahead",  # who restores the image removes it, as the manifest says
            "new": "new rest",
        }
    shm = host.resident.sandbox.root / "dev/shm"
    assert sorted(path.name for path in shm.iterdir()) == ["changed", "new"]
    trees = {stream for stream in found.streams if stream.startswith("tree:")}
    assert trees == {stream for stream in sent.streams if stream.startswith("tree:")}


def test_each_generation_goes_as_it_was_also_after_a_restart(
    holder: Holder, target: Callable[[], Target]
) -> None:
    holder.hold(17, FIRST)
    holder.hold(18, SECOND, CHANGED)
    for number, memory in ((17, FIRST), (18, SECOND), (17, FIRST)):
        there = target()
        there.get(holder, number)
        assert there.memory == memory
        assert (there.host.images / "core-1001.img").read_bytes() == b"registers of %d" % number
        holder.again()


def test_the_copy_of_a_capsules_own_host_goes_to_another_one_too(
    holder: Holder, target: Callable[[], Target]
) -> None:
    """No holder has the image any more, and the capsule leaves a host that lives."""
    for number, pages, memory in ((17, FIRST, FIRST), (18, CHANGED, SECOND)):
        inbox = holder.images.expect(msgspec.structs.replace(note(number), own=True))
        inbox.by_wire = True  # as the scene's source sends
        source = Source(inbox)
        source.send_pages(pages)
        source.send(CORE, b"registers")
        source.end_memory(memory)
        source.finish()
        holder.capsule.held(number, digest(memory))
    there = target()
    there.get(holder, 18)
    assert there.host.inbox.complete
    assert there.memory == SECOND
    assert (there.host.images / "core-1001.img").read_bytes() == b"registers"


def test_a_generation_goes_while_the_next_one_comes(
    holder: Holder, target: Callable[[], Target]
) -> None:
    holder.hold(17, FIRST)
    there = target()
    source = Source(holder.images.expect(note(18)))
    send, passed = there.sender.send, list[str]()

    def meanwhile(stream: str, data: bytes | memoryview) -> None:
        if not passed:
            source.send_pages(CHANGED)
        passed.append(stream)
        send(stream, data)

    there.sender.send = meanwhile  # type: ignore[method-assign]
    there.get(holder, 17)
    assert passed
    assert there.memory == FIRST
    source.end_memory(SECOND)
    source.finish()
    holder.capsule.held(18, digest(SECOND))


def test_a_generation_that_is_dropped_is_sent_no_further_and_goes_after_that(
    holder: Holder, target: Callable[[], Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    holder.hold(17, FIRST)
    there, capsule = target(), holder.capsule
    pages, sent = there.lanes.pages, list[int]()

    def meanwhile(chunk: memoryview, release: Callable[[], None]) -> None:
        if not sent:
            holder.images.drop("s17.1")
            assert capsule.used() > 2000 * PAGE, "it is still read"
        sent.append(len(chunk))
        pages(chunk, release)

    monkeypatch.setattr(there.lanes, "pages", meanwhile)
    with pytest.raises(StepFailed, match=r"s17\.1 is not held any more"):
        capsule.forward(17, there.sender, there.lanes)
    assert len(sent) == 1
    assert not there.host.inbox.complete
    assert holder.left() == []
    with pytest.raises(NotFound, match="s17 is not in"):
        capsule.forward(17, there.sender, there.lanes)


def test_an_image_that_was_not_kept_is_not_sent(
    holder: Holder, target: Callable[[], Target]
) -> None:
    holder.take(17, FIRST)
    with pytest.raises(NotFound, match=r"s17\.1 was not kept"):
        target().get(holder, 17)


def test_an_image_of_which_a_file_is_gone_is_not_sent_in_part(
    holder: Holder, target: Callable[[], Target]
) -> None:
    holder.hold(17, FIRST)
    (holder.directory / "gpt.1/s17/output" / LOG[7:]).unlink()
    there = target()
    with pytest.raises(NotFound, match="is gone"):
        there.get(holder, 17)
    assert not there.host.inbox.complete
