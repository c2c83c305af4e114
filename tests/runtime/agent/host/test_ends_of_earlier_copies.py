# SPDX-License-Identifier: Apache-2.0
"""What a host does with copies from before a rewind: they are gone before anything new is here.

Capsules, migrations and the network are stand-ins that note what is done to them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from fleet_scene import CLUSTER

from liveshift.criu_glue.network import network
from liveshift.criu_glue.network.overlay import Overlay
from liveshift.errors import LiveshiftError, Refused
from liveshift.runtime.agent.host.capsule_table import CapsuleTable
from liveshift.runtime.agent.host.running_capsule import CapsuleFactory, overlay_of
from liveshift.runtime.config import cluster as config
from liveshift.runtime.messages import Book, Locate, Reserve

SUBNET = "10.99.7.0/24"
BEFORE = Book("gpt", 7, SUBNET, {"10.99.7.1": ("h0", 3), "10.99.7.2": ("h1", 3)}, 1)
AFTER = Book("gpt", 7, SUBNET, {"10.99.7.1": ("h0", 5), "10.99.7.2": ("h2", 5)}, 2)


class Capsule:
    """A copy of a capsule here, which notes what is done to it, and may fail."""

    def __init__(self, scene: Scene, name: str, rewinds: int, epoch: int = 3) -> None:
        job, _, index = name.partition("/")
        self.spec = SimpleNamespace(name=name, job=job, index=int(index))
        self.overlay = Overlay(7 if job == "gpt" else 8, SUBNET, rewinds)
        self.epoch = epoch
        self.code: int | None = None
        self.leaving = False
        self.still = False
        self.removed = True  # it has no directory
        self._scene = scene

    def end_silently(self) -> None:
        assert self.leaving, "its end is no news"
        self._scene.do(f"end {self.spec.name}")

    def remove(self) -> None:
        self._scene.do(f"remove {self.spec.name}")


class Scene:
    """The table of h0, which knows the book from before the second rewind."""

    def __init__(self, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        self.fails: dict[str, Exception] = {}
        self.lets_run: Capsule | None = None
        cluster = config.parse(CLUSTER.replace("{state}", str(state))).cluster
        self.table = CapsuleTable(cluster, "h0", lambda _: None, self.drop_earlier)
        self.table.books["gpt"] = BEFORE
        self.entered: dict[str, str | None] = {}

        def raise_overlay(_: CapsuleFactory, book: Book, **__: object) -> Overlay:
            self.do(f"raise {book.rewinds}")
            return overlay_of(book)

        def locate(_: Overlay, where: Mapping[str, str | None]) -> None:
            self.do("locate")
            self.entered |= where

        monkeypatch.setattr(CapsuleFactory, "raise_overlay", raise_overlay)
        monkeypatch.setattr(network, "locate", locate)

    def do(self, what: str) -> None:
        self.done.append(what)
        if what in self.fails:
            raise self.fails[what]

    async def drop_earlier(self, book: Book) -> None:
        self.do(f"drop {book.rewinds}")
        if self.lets_run is not None:
            self.has(self.lets_run)

    def has(self, capsule: Capsule) -> Capsule:
        self.table.capsules[capsule.spec.name] = cast(Any, capsule)
        return capsule

    def copy(self, name: str, rewinds: int, epoch: int = 3) -> Capsule:
        return self.has(Capsule(self, name, rewinds, epoch))

    def locate(self, book: Book) -> None:
        asyncio.run(self.table.locate(Locate(book)))

    @property
    def names(self) -> list[str]:
        return sorted(self.table.capsules)


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(tmp_path, monkeypatch)


def test_the_host_says_which_rewinds_it_has_heard_of(scene: Scene) -> None:
    assert scene.table.rewinds() == {"gpt": 1}
    scene.copy("gpt/0", 2)  # its book was not entered yet
    scene.copy("other/0", 0)
    assert scene.table.rewinds() == {"gpt": 2}


# ---- their end ---------------------------------------------------------------------------------


def test_earlier_copies_end_before_the_new_book_counts(scene: Scene) -> None:
    scene.copy("gpt/0", 1)
    scene.copy("other/0", 0)
    scene.locate(AFTER)
    assert scene.done == [
        "end gpt/0",
        "drop 2",
        "end gpt/0",  # it may have come to the table meanwhile
        "remove gpt/0",
        "raise 2",
        "locate",
    ]
    assert scene.names == ["other/0"]
    assert scene.entered == {"10.99.7.1": None, "10.99.7.2": "10.88.0.12"}
    assert scene.table.books["gpt"] == AFTER


def test_all_are_ended_before_the_first_is_removed(scene: Scene) -> None:
    scene.copy("gpt/0", 0)
    scene.copy("gpt/1", 1)
    asyncio.run(scene.table.end_earlier(AFTER))
    assert sorted(scene.done[:2]) == ["end gpt/0", "end gpt/1"]
    assert scene.done[-2:] == ["remove gpt/0", "remove gpt/1"]
    assert scene.names == []


def test_one_whose_command_has_ended_goes_too(scene: Scene) -> None:
    scene.copy("gpt/0", 1).code = 0
    asyncio.run(scene.table.end_earlier(AFTER))
    assert scene.done[-1] == "remove gpt/0"
    assert scene.names == []


def test_one_that_a_migration_let_run_meanwhile_is_ended_too(scene: Scene) -> None:
    scene.lets_run = Capsule(scene, "gpt/0", 1)
    asyncio.run(scene.table.end_earlier(AFTER))
    assert scene.done == ["drop 2", "end gpt/0", "remove gpt/0"]
    assert scene.names == []


def test_it_is_known_which_of_them_were_not_frozen(scene: Scene) -> None:
    """After a suspension they are, unless they went on by themselves."""
    scene.copy("gpt/0", 1).still = True
    scene.copy("gpt/1", 1)
    scene.copy("other/0", 0)
    scene.lets_run = Capsule(scene, "gpt/2", 1)
    asyncio.run(scene.table.end_earlier(AFTER))
    scene.lets_run = None
    for _ in range(2):  # the first answer may have been lost
        asyncio.run(scene.table.end_earlier(AFTER))
        assert scene.table.ended_running(AFTER) == ["gpt/1", "gpt/2"]
    assert scene.table.ended_running(msgspec.structs.replace(AFTER, rewinds=3)) == []
    asyncio.run(scene.table.end_earlier(msgspec.structs.replace(AFTER, rewinds=3)))
    assert scene.table.ended_running(msgspec.structs.replace(AFTER, rewinds=3)) == []


def test_a_book_that_comes_late_does_not_change_that(scene: Scene) -> None:
    scene.copy("gpt/0", 1)
    asyncio.run(scene.table.end_earlier(AFTER))
    scene.copy("gpt/1", 0)
    asyncio.run(scene.table.end_earlier(BEFORE))
    assert scene.table.ended_running(AFTER) == ["gpt/0"]


def test_the_end_of_a_freeze_that_comes_after_the_end_of_its_capsule_does_not_count(
    scene: Scene,
) -> None:
    copy = scene.copy("gpt/0", 1)
    copy.still = True

    async def thaw(_: Book) -> None:
        copy.still = False

    scene.table._drop_earlier = thaw
    asyncio.run(scene.table.end_earlier(AFTER))
    assert scene.table.ended_running(AFTER) == []


def test_the_copies_of_the_rewind_itself_stay(scene: Scene) -> None:
    scene.copy("gpt/0", 2, epoch=5)
    for _ in range(2):
        scene.locate(AFTER)
    assert scene.names == ["gpt/0"]
    assert "end gpt/0" not in scene.done
    assert scene.done.count("raise 2") == 1


def test_a_job_that_was_never_rewound_has_no_earlier_copies(scene: Scene) -> None:
    scene.table.books.clear()
    scene.copy("gpt/0", 0)
    scene.locate(Book("gpt", 7, SUBNET, {"10.99.7.1": ("h0", 3)}))
    assert scene.done == ["raise 0", "locate"]
    assert scene.names == ["gpt/0"]


@pytest.mark.parametrize("step", ["end gpt/0", "drop 2", "remove gpt/0"])
def test_what_cannot_be_ended_stays_and_is_tried_again(scene: Scene, step: str) -> None:
    scene.copy("gpt/0", 1)
    scene.fails[step] = Refused("it does not end")
    with pytest.raises(Refused, match="does not end"):
        scene.locate(AFTER)
    assert scene.names == ["gpt/0"]
    assert scene.table.books["gpt"] == BEFORE, "none of its addresses counts"
    with pytest.raises(Refused, match="gpt/0 from before rewind 2 of its job is left on h0"):
        scene.table.refuse_older(reserve("gpt/0", 5, AFTER))
    scene.fails.clear()
    scene.locate(AFTER)
    assert (scene.names, scene.table.books["gpt"]) == ([], AFTER)


def test_one_that_is_back_meanwhile_is_not_taken_from_the_table(scene: Scene) -> None:
    """Two orders to end the earlier copy come, and a sandbox is reserved between their ends."""
    earlier, newer = scene.copy("gpt/0", 1), Capsule(scene, "gpt/0", 2, epoch=5)

    def remove() -> None:
        scene.has(newer)

    earlier.remove = remove  # type: ignore[method-assign]
    asyncio.run(scene.table.end_earlier(AFTER))
    assert cast(Any, scene.table.capsules["gpt/0"]) is newer


# ---- the books ---------------------------------------------------------------------------------


def test_a_late_book_of_an_earlier_number_changes_nothing(scene: Scene) -> None:
    scene.locate(AFTER)
    scene.done.clear()
    late = Book("gpt", 7, SUBNET, {"10.99.7.1": ("h1", 9)}, 1)
    scene.locate(late)
    assert "locate" not in scene.done
    assert scene.table.books["gpt"] == AFTER


def test_the_first_line_of_a_new_number_brings_all_addresses_again(scene: Scene) -> None:
    """It may come from the restore of one capsule; the new VXLAN knows nothing."""
    scene.locate(Book("gpt", 7, SUBNET, {"10.99.7.1": ("h0", 5)}, 2))
    assert scene.entered == {"10.99.7.1": None, "10.99.7.2": "10.88.0.11"}
    assert scene.table.books["gpt"].where == {"10.99.7.1": ("h0", 5), "10.99.7.2": ("h1", 3)}


def test_a_number_that_could_not_be_entered_comes_again(scene: Scene) -> None:
    scene.fails["raise 2"] = LiveshiftError("network: no")
    with pytest.raises(LiveshiftError, match="network: no"):
        scene.locate(AFTER)
    assert scene.table.books["gpt"] == BEFORE
    scene.fails.clear()
    scene.locate(AFTER)
    assert scene.entered == {"10.99.7.1": None, "10.99.7.2": "10.88.0.12"}


# ---- reservations ------------------------------------------------------------------------------


def reserve(name: str, epoch: int, book: Book) -> Reserve:
    job, _, index = name.partition("/")
    spec = SimpleNamespace(name=name, job=job, index=int(index))
    return cast(Reserve, SimpleNamespace(spec=spec, epoch=epoch, book=book))


@pytest.mark.parametrize(
    ("name", "epoch", "refused"),
    [
        ("gpt/0", 6, ""),  # a later move
        ("gpt/0", 5, ""),  # the rewind has given it this address
        ("gpt/0", 4, "gpt/0 came under epoch 4, and 5 is known here"),
        ("gpt/1", 6, ""),
        ("gpt/1", 5, "gpt/1 came under epoch 5, and 5 is known here"),  # h2 has it
    ],
)
def test_an_epoch_is_taken_once_and_by_its_host(
    scene: Scene, name: str, epoch: int, refused: str
) -> None:
    scene.locate(AFTER)
    request = reserve(name, epoch, AFTER)
    if refused:
        with pytest.raises(Refused, match=refused):
            scene.table.refuse_older(request)
    else:
        scene.table.refuse_older(request)


def test_an_epoch_under_which_a_copy_has_run_here_is_not_taken_again(scene: Scene) -> None:
    scene.locate(AFTER)
    scene.copy("gpt/0", 2, epoch=5).code = 0
    with pytest.raises(Refused, match="came under epoch 5, and 5 is known here"):
        scene.table.refuse_older(reserve("gpt/0", 5, AFTER))


def test_a_reservation_from_before_a_rewind_is_refused(scene: Scene) -> None:
    scene.locate(AFTER)
    with pytest.raises(Refused, match="gpt/0 is from before rewind 2 of its job"):
        scene.table.refuse_older(reserve("gpt/0", 9, BEFORE))
