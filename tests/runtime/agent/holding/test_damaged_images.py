# SPDX-License-Identifier: Apache-2.0
"""A bit of a held image flips: the image is restored nowhere and saved nowhere; that is said."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
from held_scene import CORE, LOG, Holder, Source, holder, note, packed, some_memory
from inbox_scene import Host
from memory_parts import digest, page

from liveshift.errors import LiveshiftError, NotFound, StepFailed
from liveshift.runtime.agent.arrival.inbox import Inbox
from liveshift.runtime.agent.holding import held_generation, kept_sums

__all__ = ["holder"]

MEMORY = some_memory()
LARGE = b"x" * (1 << 20)

Damage = Callable[[Path], None]


@pytest.fixture
def target() -> Iterator[Inbox]:
    """Of a capsule that is restored on the holder's host."""
    with tempfile.TemporaryDirectory(prefix="ls-held-", dir="/dev/shm") as top:
        inbox = Host(Path(top)).inbox
        inbox.memory_limit = 1 << 30
        yield inbox
        inbox.forget_memory()


@pytest.fixture
def held(holder: Holder, tmp_path: Path) -> Holder:
    """One image, with all that an image may consist of."""
    (tmp_path / "file").write_text("in a directory")
    source = Source(holder.images.expect(note(17)))
    source.send_pages(MEMORY)
    source.send("tree:1:tmp", packed(tmp_path))
    source.send(LOG, b"lines")
    source.send(CORE, b"registers")
    source.send("image:pages-1.img", LARGE)
    source.end_memory(MEMORY)
    source.finish()
    holder.capsule.held(17, digest(MEMORY))
    return holder


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 4]))


def in_memory(top: Path) -> None:
    path = top / "memory"
    flip(path, path.read_bytes().index(page(100)) + 77)


def in_file(pattern: str) -> Damage:
    def damage(top: Path) -> None:
        (path,) = (each for each in top.glob(f"s17/{pattern}") if each.is_file())
        flip(path, path.stat().st_size // 2)

    return damage


def missing(top: Path) -> None:
    (top / "s17" / "core-1001.img").unlink()


DAMAGES = {
    "a page of memory": in_memory,
    "s17/core-1001.img": in_file("core-1001.img"),
    "s17/pages-1.img": in_file("pages-1.img"),
    "s17/output/": in_file("output/*"),
    "s17/trees/": in_file("trees/*"),
    "s17/manifest": in_file("manifest"),
    "s17/core-1001.img is gone": missing,
}


@pytest.mark.parametrize("where", DAMAGES)
@pytest.mark.parametrize("restarted", [False, True])
def test_it_is_not_restored_and_not_held_any_more(
    held: Holder, target: Inbox, where: str, restarted: bool
) -> None:
    capsule = held.capsule
    if restarted:
        held.again()
        capsule = held.capsule
    DAMAGES[where](capsule.directory)
    with pytest.raises(NotFound, match=r"the image s17\.1 is damaged") as refused:
        capsule.hand_over(17, target)
    assert (
        where.split()[0].removeprefix("s17/") in str(refused.value) or where == "a page of memory"
    )
    assert not target.complete
    with pytest.raises(NotFound):
        held.images.find("s17.1")
    assert held.left() == []
    held.hold(18, MEMORY)  # all of it comes again
    assert held.memory(18) == MEMORY


def test_what_is_whole_is_restored_again_and_again(held: Holder, target: Inbox) -> None:
    capsule = held.again().find("s17.1")[0]
    with tempfile.TemporaryDirectory(prefix="ls-held-", dir="/dev/shm") as top:
        first = Host(Path(top)).inbox
        first.memory_limit = 1 << 30
        capsule.hand_over(17, first)
        assert first.complete
        first.forget_memory()
    capsule.hand_over(17, target)
    assert target.complete


@pytest.mark.root
def test_it_is_not_saved(held: Holder) -> None:
    capsule = held.capsule
    in_memory(capsule.directory)
    with TemporaryDirectory(prefix="liveshift-", dir="/var/lib") as name:
        with pytest.raises(LiveshiftError, match="is damaged"):
            capsule.save(17, Path(name) / "gpt" / "s17.1")
        assert not (Path(name) / "gpt" / "s17.1").exists()


def test_the_earlier_generation_outlives_the_damage_of_the_later_one(
    held: Holder, target: Inbox
) -> None:
    held.hold(18, MEMORY, {})
    flip(held.capsule.directory / "s18" / "core-1001.img", 0)
    with pytest.raises(NotFound, match=r"the image s18\.1 is damaged"):
        held.capsule.hand_over(18, target)
    assert held.numbers() == [(17, True)]
    assert held.memory(17) == MEMORY


def test_a_comparison_finds_the_damage_before_the_image_is_needed(held: Holder) -> None:
    held.capsule.compare(17)
    assert held.numbers() == [(17, True)]
    held.again()
    in_memory(held.capsule.directory)
    with pytest.raises(NotFound, match=r"the image s17\.1 is damaged"):
        held.capsule.compare(17)
    assert held.left() == []


def test_what_was_just_compared_is_not_read_again(
    held: Holder, target: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job waits while its image is sent on."""
    looks: list[Path] = []
    damage = kept_sums.damage

    def look(images: Path, memory: Callable[[], bytes]) -> str:
        looks.append(images)
        return damage(images, memory)

    monkeypatch.setattr(kept_sums, "damage", look)
    held.capsule.compare(17)
    held.capsule.hand_over(17, target)
    assert target.complete
    assert len(looks) == 1
    monkeypatch.setattr(held_generation, "COMPARED_S", 0.0)
    held.capsule.compare(17)
    assert len(looks) == 2


def test_an_image_whose_sums_cannot_be_read_is_not_used_and_not_removed(
    held: Holder, target: Inbox
) -> None:
    sums = held.capsule.directory / "s17" / "sums"
    sums.write_bytes(b"\xc1")
    with pytest.raises(StepFailed, match=r"s17/sums cannot be read") as refused:
        held.capsule.hand_over(17, target)
    assert "remove that file" in str(refused.value.hint)
    assert held.numbers() == [(17, True)]
    sums.unlink()
    held.capsule.hand_over(17, target)
    assert target.complete


def test_sums_of_a_later_version_are_understood(held: Holder, target: Inbox) -> None:
    sums = held.capsule.directory / "s17" / "sums"
    later = msgspec.msgpack.decode(sums.read_bytes()) | {"algorithm": "xxh3"}
    sums.write_bytes(msgspec.msgpack.encode(later))
    held.capsule.hand_over(17, target)
    assert target.complete


def test_sums_are_written_as_a_whole(held: Holder, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image with half of them could not be used."""
    images = held.capsule.directory / "s17"
    before = (images / "sums").read_bytes()

    def full(path: Path, data: bytes) -> int:
        with path.open("wb") as file:
            file.write(data[:3])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        kept_sums.write(images, b"digest")
    assert (images / "sums").read_bytes() == before
