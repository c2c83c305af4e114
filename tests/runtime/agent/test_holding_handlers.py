# SPDX-License-Identifier: Apache-2.0
"""What a host does as a holder of images: the orchestrator's requests, and the claims that end what
is not needed. Stores, files and the wire are real; capsules and orchestrator are stand-ins."""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import memory_parts
import msgspec
import pytest
from held_scene import MB, some_memory
from holding_handlers_scene import BUDGET, FIRST, SURVEY, Scene, hold, scene
from inbox_scene import Host
from memory_parts import PAGE
from preflight_scene import HERE
from waits import until_async
from wire_ends import LIMIT, key_directory

from liveshift.criu_glue.files.identity import Identity
from liveshift.errors import LiveshiftError, NotFound, Refused, SourceRefused, StepFailed
from liveshift.runtime import messages
from liveshift.runtime.agent import holding_handlers
from liveshift.runtime.agent.holding import saved_file, saved_image, saved_manifests
from liveshift.runtime.wire import LANES

__all__ = ["key_directory", "scene"]

# ---- a snapshot --------------------------------------------------------------------------------


def test_an_image_is_announced_then_compared_and_kept(scene: Scene) -> None:
    assert scene.hold(17) == messages.Holding(scene.endpoint, 0, 1)
    assert (scene.announced, scene.handlers.busy) == (["s17.1"], True)
    scene.take(17)
    assert scene.check(17).bytes >= 300 * PAGE
    assert (scene.numbers, scene.announced) == ([(17, True)], [])
    assert not scene.handlers.busy


def test_a_report_names_what_is_kept_and_not_what_comes(scene: Scene) -> None:
    assert scene.handlers.held() == []
    scene.keep(17)
    scene.hold(18)
    assert scene.handlers.held() == ["s17.1"]


def test_the_next_image_begins_where_the_one_before_stands(scene: Scene) -> None:
    scene.keep(17, incarnation=4)
    assert scene.keep(18) == messages.Holding(scene.endpoint, 17, 4)
    assert scene.numbers == [(17, True), (18, True)]
    with pytest.raises(Refused, match=r"s17 and s18 of gpt/1 are held here"):
        scene.hold(19)


def test_memory_that_differs_is_dropped_and_the_image_before_stays(scene: Scene) -> None:
    scene.keep(17)
    scene.hold(18)
    scene.take(18)
    with pytest.raises(StepFailed, match="is not what its source has sent"):
        scene.check(18, some_memory(1))
    assert (scene.numbers, scene.announced) == ([(17, True)], [])
    assert scene.hold(19).base == 17


def test_an_image_that_is_not_complete_is_not_kept(scene: Scene) -> None:
    scene.hold(17)
    with pytest.raises(StepFailed, match=r"s17\.1 is not complete"):
        scene.check(17)
    assert (scene.numbers, scene.announced) == ([(17, False)], ["s17.1"]), "it may come still"
    with pytest.raises(NotFound, match=r"h1 does not hold the image s16\.1"):
        scene.check(16)


def test_a_request_that_comes_again_does_not_disturb_what_comes(scene: Scene) -> None:
    first = scene.hold(17)
    inbox, taken = scene.inbox(17), scene.receiver._open["s17.1"]
    assert scene.hold(17) == first
    assert (scene.inbox(17), scene.receiver._open["s17.1"]) == (inbox, taken)
    assert scene.checked == 1


def test_what_was_not_kept_gives_way_to_the_next(scene: Scene) -> None:
    scene.hold(17)
    scene.take(17)
    assert scene.hold(18) == messages.Holding(scene.endpoint, 0, 1)
    assert (scene.numbers, scene.announced) == ([(18, False)], ["s18.1"])


@pytest.mark.parametrize("field", ["resident", "output", "single_size", "nameless"])
def test_an_image_that_does_not_fit_is_refused(scene: Scene, field: str) -> None:
    """Its files count too: they lie in memory here."""
    more: Any = {field: BUDGET + MB}
    large = replace(SURVEY, **more)
    with pytest.raises(Refused, match=r"h1 cannot hold the image of gpt/1: it takes"):
        scene.hold(17, large)
    assert (scene.numbers, scene.announced) == ([], [])


def test_only_the_first_image_is_checked_against_this_host(scene: Scene) -> None:
    scene.keep(17)
    scene.hold(18)
    assert scene.checked == 1
    worse = replace(SURVEY, problems=(("it has a device open", "close it"),))
    with pytest.raises(SourceRefused, match="it has a device open"):
        scene.hold(19, worse)


def test_an_image_needs_a_number(scene: Scene) -> None:
    with pytest.raises(LiveshiftError, match='cannot have the name "m1"'):
        asyncio.run(scene.handlers.hold(msgspec.structs.replace(hold(17), image="m1")))


# ---- a rewind ----------------------------------------------------------------------------------


@pytest.mark.parametrize("restarted", [False, True])
def test_what_a_reservation_needs_is_known_also_after_a_restart(
    scene: Scene, restarted: bool
) -> None:
    scene.keep(17)
    if restarted:
        scene.handlers.close()
        scene.again()
    found = asyncio.run(scene.handlers.facts(messages.GetHeld("s17.1", "gpt/1")))
    assert (found.survey, found.facts) == (SURVEY, HERE)
    pages = sum(len(pages) for pages in FIRST.values())
    assert pages * PAGE < found.image_bytes < pages * PAGE + MB
    scene.hold(18)
    with pytest.raises(NotFound, match=r"s18\.1 was not kept"):
        asyncio.run(scene.handlers.facts(messages.GetHeld("s18.1", "gpt/1")))


def test_an_image_is_compared_if_that_is_asked_for(scene: Scene) -> None:
    scene.keep(17)
    look = messages.GetHeld("s17.1", "gpt/1")
    compared = msgspec.structs.replace(look, compare=True)
    assert asyncio.run(scene.handlers.facts(compared)).facts == HERE
    capsule, _ = scene.handlers._images.find("s17.1")
    capsule.generations[0]._compared = 0.0
    (capsule.directory / "s17" / "core-1001.img").write_bytes(b"another")
    assert asyncio.run(scene.handlers.facts(look)).facts == HERE
    with pytest.raises(NotFound, match=r"s17\.1 is damaged"):
        asyncio.run(scene.handlers.facts(compared))
    assert scene.numbers == []


def test_an_image_goes_over_the_wire_and_stays(scene: Scene, tmp_path: Path) -> None:
    scene.table.host = "h0"
    scene.keep(17)
    there = Host(tmp_path / "there")
    there.inbox.memory_limit = 1 << 30
    scene.receiver.expect("m1", "h0", there.inbox, LIMIT, there.inbox.pages, LANES)
    request = messages.ForwardHeld("s17.1", "m1", "gpt/1", "h1", scene.endpoint)
    try:
        for image in ("s16.1", "s18.1"):
            with pytest.raises(NotFound):
                asyncio.run(scene.handlers.forward(msgspec.structs.replace(request, image=image)))
        assert asyncio.run(scene.handlers.forward(request)) == messages.Frozen(7, [])
        assert there.inbox.complete
        assert there.inbox.memory is not None
        assert memory_parts.content(there.inbox.memory) == FIRST
    finally:
        there.inbox.forget_memory()
    assert (scene.numbers, scene.handlers.busy) == ([(17, True)], False)


def test_an_image_for_the_holder_itself_needs_no_wire(scene: Scene) -> None:
    scene.keep(17)
    there = Host(scene.top / "there")
    there.inbox.memory_limit = 1 << 30
    request = messages.ForwardHeld("s17.1", "m1", "gpt/1", "h1", "tcp://nowhere:1")
    with pytest.raises(NotFound, match="h1 has not reserved a sandbox for m1"):
        asyncio.run(scene.handlers.forward(request))
    scene.incoming["m1"] = cast(Any, SimpleNamespace(inbox=there.inbox))
    assert asyncio.run(scene.handlers.forward(request)) == messages.Frozen(7, [])
    assert there.inbox.complete
    assert there.inbox.memory is not None
    assert there.inbox.memory.lent
    assert memory_parts.content(there.inbox.memory) == FIRST
    there.inbox.forget_memory()
    assert (scene.numbers, scene.handlers.busy) == ([(17, True)], False)


# ---- a directory -------------------------------------------------------------------------------


@pytest.fixture
def kept() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="liveshift-", dir="/var/lib") as name:
        yield Path(name)


@pytest.mark.root
def test_an_image_is_saved_found_and_loaded_again(scene: Scene, kept: Path) -> None:
    scene.keep(17)
    save = messages.SaveHeld("s17.1", "gpt/1", str(kept))
    saved = asyncio.run(scene.handlers.save(save))
    assert saved.bytes > 0
    assert sorted(path.name for path in (kept / "gpt").iterdir()) == ["s17.1"]
    read = messages.ReadManifest("gpt", "", str(kept))
    with pytest.raises(NotFound, match="has no whole snapshot of gpt"):
        asyncio.run(scene.handlers.read_manifest(read))
    write = messages.WriteManifest("gpt", "s17", str(kept), b'{"time":5}\nsigned\n')
    asyncio.run(scene.handlers.write_manifest(write))
    assert asyncio.run(scene.handlers.read_manifest(read)).data == write.data
    with pytest.raises(Refused, match="has a snapshot s17 of gpt already"):
        asyncio.run(scene.handlers.save(save))
    scene.handlers._images.drop("s17.1")
    load = messages.LoadHeld("s3.1", "gpt/1", str(kept), "s17.1", saved.digest, 5, 2)
    checked = scene.checked
    asyncio.run(scene.handlers.load(load))
    assert (scene.numbers, scene.checked) == ([(3, True)], checked + 1)
    facts = asyncio.run(scene.handlers.facts(messages.GetHeld("s3.1", "gpt/1")))
    assert facts.survey == SURVEY.in_place()


def test_a_directory_that_hangs_takes_no_thread_from_other_work(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    back = threading.Event()
    monkeypatch.setattr(saved_manifests, "read", lambda *_: back.wait(20))
    monkeypatch.setattr(saved_manifests, "drop", lambda *_: back.wait(20))
    monkeypatch.setattr(saved_manifests, "write", lambda *_: back.wait(20))
    monkeypatch.setattr(saved_manifests, "check_free", lambda *_: back.wait(20))
    monkeypatch.setattr(scene.handlers._images, "load", lambda *_: back.wait(20))
    monkeypatch.setattr(holding_handlers, "cut_back", lambda *_: back.wait(20))
    scene.keep(17)
    here = scene.handlers
    asked: list[Any] = [
        here.read_manifest(messages.ReadManifest("gpt", "", "/kept")),
        here.write_manifest(messages.WriteManifest("gpt", "s17", "/kept", b"")),
        here.load(messages.LoadHeld("s3.1", "gpt/1", "/kept", "s17.1", "digest", 5, 2)),
        here.save(messages.SaveHeld("s17.1", "gpt/1", "/kept")),
        here.drop_saved(messages.DropSaved("s17.2", "gpt/2", "/kept")),
        here.cut_back(messages.CutBack("gpt", 0, 0, [], {}, 60.0)),
    ]

    async def story() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        hanging = [asyncio.ensure_future(each) for each in asked]
        try:
            await asyncio.sleep(0.05)
            async with asyncio.timeout(5):
                await here.facts(messages.GetHeld("s17.1", "gpt/1"))
            assert not any(each.done() for each in hanging)
        finally:
            back.set()
            await asyncio.gather(*hanging, return_exceptions=True)

    asyncio.run(story())


def test_an_agent_that_loads_an_image_does_not_restart(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order would be lost with it, and the job would not be resumed."""
    seen: list[bool] = []
    monkeypatch.setattr(scene.handlers._images, "load", lambda *_: seen.append(scene.handlers.busy))
    load = messages.LoadHeld("s3.1", "gpt/1", "/kept", "s17.1", "digest", 5, 2)
    asyncio.run(scene.handlers.load(load))
    assert (seen, scene.handlers.busy) == ([True], False)


@pytest.mark.root
def test_an_attempt_to_save_that_fails_late_harms_no_later_one(
    scene: Scene, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The orchestrator has waited long enough for the first one, and a person has tried again."""
    scene.keep(17)
    write, begun, fails = saved_file.write, threading.Event(), threading.Event()

    def slow(source: Path, target: Path) -> saved_file.SavedFile:
        if not begun.is_set():
            begun.set()
            assert fails.wait(60)
            raise OSError("the server was away for minutes")
        return write(source, target)

    monkeypatch.setattr(saved_file, "write", slow)
    request = messages.SaveHeld("s17.1", "gpt/1", str(kept))

    async def play() -> messages.Saved:
        first = asyncio.create_task(scene.handlers.save(request))
        await until_async(begun.is_set)
        second = asyncio.create_task(scene.handlers.save(request))
        await asyncio.wait({second}, timeout=0.5)
        assert scene.handlers.busy
        fails.set()
        with pytest.raises(StepFailed, match="the server was away"):
            await first
        return await second

    saved = asyncio.run(play())
    image = saved_image.read(kept / "gpt" / "s17.1", saved.digest)
    assert {path.name for path in kept.rglob("*.zst")} >= {"core-1001.img.zst", "memory.zst"}
    assert image.capsule == "gpt/1"
    assert not scene.handlers.busy


def test_files_are_cut_back_by_one_request_at_a_time(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job writes again after an answer: no earlier request may cut then."""
    at_work, most = list[int](), list[int]()

    def cut(
        _: object,
        sizes: dict[bytes, int],
        until: float,
        identities: dict[bytes, Identity],
        appended: list[bytes],
    ) -> tuple[list[str], list[str]]:
        assert 0 < until - time.monotonic() <= 60
        assert identities == {b"/shared/log": Identity(7, 5, 0o644)}
        assert appended == [b"/shared/log"]
        at_work.append(1)
        most.append(len(at_work))
        threading.Event().wait(0.1)
        at_work.pop()
        return [os.fsdecode(path) for path in sizes], []

    monkeypatch.setattr(holding_handlers, "cut_back", cut)
    log, which = b"/shared/log", Identity(7, 5, 0o644)
    order = messages.CutBack("gpt", 1000, 1000, [], {log: 5}, 60.0, {log: which}, [log])

    async def play() -> list[messages.CutBackDone]:
        return await asyncio.gather(*(scene.handlers.cut_back(order) for _ in range(3)))

    assert asyncio.run(play()) == [messages.CutBackDone(["/shared/log"], [])] * 3
    assert most == [1, 1, 1]


# ---- claims ------------------------------------------------------------------------------------


def claiming(scene: Scene, done: Callable[[], object]) -> None:
    async def claim() -> None:
        work = asyncio.create_task(scene.handlers.keep_claiming())
        await until_async(done)
        work.cancel()

    asyncio.run(claim())


def test_it_claims_for_what_it_keeps_and_for_what_comes(scene: Scene) -> None:
    scene.keep(17)
    scene.hold(18)
    claiming(scene, lambda: len(scene.claims) >= 4)
    assert {claim.migration for claim in scene.claims} == {"s17.1", "s18.1"}
    first = scene.claims[0]
    assert (first.capsule, first.side) == ("gpt/1", "held")
    assert {claim.migration: claim.ready for claim in scene.claims} == {
        "s17.1": True,
        "s18.1": False,
    }
    assert (first.epoch, first.rewinds) == (3, 1)
    assert scene.numbers == [(17, True), (18, False)]


def test_a_ruling_ends_an_image_and_only_a_ruling_does(scene: Scene) -> None:
    scene.keep(17)
    scene.hold(18)
    scene.ruled = LiveshiftError("the journal cannot be written")
    claiming(scene, lambda: len(scene.claims) >= 4)
    assert scene.numbers == [(17, True), (18, False)]
    scene.ruled = messages.Ruled("end", 3)
    claiming(scene, lambda: not scene.numbers)
    assert scene.announced == []
    assert not scene.table.factory.images("held").exists()
    assert scene.hold(19).base == 0


def test_the_image_before_gives_way_without_a_ruling_once_a_newer_one_is_complete(
    scene: Scene,
) -> None:
    """A job may take its snapshots as often as claims are sent."""
    scene.keep(17)
    scene.keep(18)
    with pytest.raises(Refused, match=r"s17 and s18 of gpt/1 are held here"):
        scene.hold(19)
    request = msgspec.structs.replace(hold(19), newest=18)
    assert asyncio.run(scene.handlers.hold(request)).base == 18
    assert scene.numbers == [(18, True), (19, False)]
    assert scene.claims == []
