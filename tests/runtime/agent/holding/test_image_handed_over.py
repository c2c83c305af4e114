# SPDX-License-Identifier: Apache-2.0
"""A holder gives an image to a capsule that is restored on its own host: the files are copied, and
the memory is not."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from held_scene import CORE, LOG, Holder, Source, note, packed, some_memory
from inbox_scene import Host
from memory_parts import BASE, PAGE, content, digest, page

from liveshift.errors import NotFound, StepFailed

FIRST = some_memory(count=2000)
CHANGED = {7: {BASE + n * PAGE: page(9000 + n) for n in range(2000)}}
SECOND = {7: FIRST[7] | CHANGED[7], 8: FIRST[8]}


class Place:
    """A host that holds images, and restores one as m1."""

    def __init__(self, top: Path) -> None:
        self.holder = Holder(top)
        self.host = Host(top)
        self.host.inbox.memory_limit = 1 << 30

    @property
    def memory(self) -> object:
        assert self.host.inbox.memory is not None
        return content(self.host.inbox.memory)

    def taken(self) -> int:
        """Bytes of memory that the pages take, at the holder and for the restore."""
        paths = {
            p.stat().st_ino: p.stat().st_blocks * 512 for p in self.host.images.rglob("memory")
        }
        found = self.holder.directory.rglob("memory")
        return sum((paths | {p.stat().st_ino: p.stat().st_blocks * 512 for p in found}).values())


@pytest.fixture
def place() -> Iterator[Place]:
    with tempfile.TemporaryDirectory(prefix="ls-held-", dir="/dev/shm") as top:
        made = Place(Path(top))
        yield made
        made.host.inbox.forget_memory()
        made.holder.images.close()


def test_it_comes_whole_and_its_memory_takes_no_more_room(place: Place, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in a directory")
    source = Source(place.holder.images.expect(note(17)))
    source.send_pages(FIRST)
    source.send("tree:1:tmp", packed(tmp_path))
    source.send(LOG, b"lines")
    source.send(CORE, b"registers")
    source.end_memory(FIRST)
    sent = source.finish({"tmp": ["gone"]})
    place.holder.capsule.held(17, digest(FIRST))
    before, taken = place.holder.files(), place.taken()
    frozen = place.holder.capsule.hand_over(17, place.host.inbox)
    assert (frozen.image_bytes, frozen.phases) == (7, [])
    assert place.host.inbox.complete
    assert place.memory == FIRST
    assert place.taken() == taken > 2000 * PAGE
    found = place.host.inbox.manifest
    assert (found.migration, found.capsule) == ("m1", "gpt/1")
    assert (found.pipes, found.gone()) == (sent.pipes, {"tmp": ["gone"]})
    assert (place.host.images / "core-1001.img").read_bytes() == b"registers"
    assert (place.host.resident.sandbox.plan.log / LOG[7:]).read_bytes() == b"lines"
    assert (place.host.resident.sandbox.plan.tmp / "file").read_text() == "in a directory"
    assert place.holder.files() == before, "it stays, for a further restore"


def test_the_restore_may_change_its_images(place: Place) -> None:
    """CRIU's images are edited before a restore. The holder's must stay as they came."""
    place.holder.hold(17, FIRST)
    place.holder.capsule.hand_over(17, place.host.inbox)
    (place.host.images / "core-1001.img").write_bytes(b"edited")
    assert (place.holder.directory / "gpt.1/s17/core-1001.img").read_bytes() == b"registers of 17"


def test_its_memory_stays_until_the_restore_has_ended(place: Place) -> None:
    place.holder.hold(17, FIRST)
    place.holder.capsule.hand_over(17, place.host.inbox)
    place.holder.hold(18, SECOND, CHANGED)
    place.holder.images.drop("s17.1")
    assert place.memory == FIRST
    both = place.taken()
    place.host.inbox.forget_memory()
    assert place.taken() <= both - 1900 * PAGE
    assert place.holder.memory(18) == SECOND


def test_a_restarted_agent_has_it_still(place: Place) -> None:
    place.holder.hold(17, FIRST)
    place.holder.capsule.hand_over(17, place.host.inbox)
    place.host.inbox.forget_memory()  # closes the store, as the end of an agent does
    place.holder.again()
    found = place.host.landed()
    assert found.complete
    assert found.memory is not None
    assert content(found.memory) == FIRST
    assert found.memory.lent, "so its pages are not used up"
    found.forget_memory()
    assert place.holder.memory(17) == FIRST


def test_an_image_that_was_not_kept_is_not_handed_over(place: Place) -> None:
    place.holder.take(17, FIRST)
    with pytest.raises(NotFound, match=r"s17\.1 was not kept"):
        place.holder.capsule.hand_over(17, place.host.inbox)
    assert not place.host.inbox.complete


def test_a_second_image_does_not_come_into_the_same_inbox(place: Place) -> None:
    place.holder.hold(17, FIRST)
    place.holder.capsule.hand_over(17, place.host.inbox)
    with pytest.raises(StepFailed, match="is closed and takes no more data"):
        place.holder.capsule.hand_over(17, place.host.inbox)
    assert place.memory == FIRST


def test_an_inbox_that_has_pages_does_not_take_over_others(place: Place) -> None:
    place.holder.hold(17, FIRST)
    Source(place.host.inbox).send_pages(SECOND)
    with pytest.raises(StepFailed, match=r"cannot be lent|cannot take over"):
        place.holder.capsule.hand_over(17, place.host.inbox)
    place.holder.images.drop("s17.1")
    assert place.holder.left() == [], "nothing of it is lent any more"


def test_an_image_of_which_a_file_is_gone_is_not_handed_over_in_part(place: Place) -> None:
    place.holder.hold(17, FIRST)
    (place.holder.directory / "gpt.1/s17/output" / LOG[7:]).unlink()
    with pytest.raises(NotFound, match="is gone"):
        place.holder.capsule.hand_over(17, place.host.inbox)
    assert not place.host.inbox.complete
