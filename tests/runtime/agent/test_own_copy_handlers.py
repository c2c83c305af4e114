# SPDX-License-Identifier: Apache-2.0
"""A host keeps copies of its own capsules' images. They come without the wire, and they give way.
Stores and files are real; capsules and orchestrator are stand-ins."""

from __future__ import annotations

import asyncio
import shutil
from types import SimpleNamespace

import memory_parts
import msgspec
import pytest
import xxhash
from held_scene import CORE, Source
from holding_handlers_scene import FIRST, Scene, hold, scene
from waits import until_async
from wire_ends import key_directory

from liveshift.runtime import messages
from liveshift.runtime.agent.host import host_facts
from liveshift.runtime.model import manifest
from liveshift.runtime.model.manifest import Manifest
from liveshift.runtime.wire import PAGE_TABLE

__all__ = ["key_directory", "scene"]


def own(number: int) -> messages.Hold:
    return msgspec.structs.replace(hold(number), source="h1", own=True)


def test_an_own_copy_comes_without_the_wire_and_without_checks(scene: Scene) -> None:
    """Its host runs the capsule: it can restore it."""
    holding = asyncio.run(scene.handlers.hold(own(17)))
    assert (holding.endpoint, holding.base, scene.checked) == ("", 0, 0)
    inbox = scene.handlers.own_inbox("s17.1")
    assert inbox is scene.inbox(17)
    assert not inbox.by_wire
    assert "s17.1" not in scene.receiver._open
    assert scene.handlers.own_inbox("s16.1") is None


def test_the_inbox_of_another_hosts_image_is_not_given_to_a_source(scene: Scene) -> None:
    scene.hold(17)
    assert scene.handlers.own_inbox("s17.1") is None


def test_an_own_copy_is_kept_without_the_streams_of_the_lanes(scene: Scene) -> None:
    """The manifest lists them, since the holder gets them."""
    asyncio.run(scene.handlers.hold(own(17)))
    inbox = scene.inbox(17)
    source = Source(inbox)
    for pid, pages in FIRST.items():
        for chunk in memory_parts.chunks(pid, pages):
            inbox.take_pages(memoryview(chunk))
    source.send(CORE, b"registers")
    source.send(PAGE_TABLE, msgspec.msgpack.encode(memory_parts.table(FIRST)))
    digests = {s: (len(d), xxhash.xxh3_64_intdigest(d)) for s, d in source.sent.items()}
    lanes = {"memory:1": (99, 5)}
    found = Manifest(manifest.VERSION, "s17.1", "gpt/1", 7, digests | lanes, {}, {}, [])
    for raw in (manifest.encode(found), b""):
        inbox.write(manifest.STREAM, memoryview(raw))
    assert scene.check(17).bytes > 0
    assert scene.numbers == [(17, True)]
    scene.handlers.close()
    scene.again()
    assert scene.numbers == [(17, True)], "a restarted agent has it too"


def test_an_own_copy_that_has_not_come_keeps_no_agent_from_a_restart(scene: Scene) -> None:
    """It may never come: the source may have failed to write it."""
    asyncio.run(scene.handlers.hold(own(17)))
    assert not scene.handlers.busy
    scene.hold(18)
    assert scene.handlers.busy


def test_own_copies_go_when_the_host_is_short_of_memory(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    asyncio.run(scene.handlers.hold(own(17)))
    spare = [1, -1]
    monkeypatch.setattr(host_facts, "memory_to_spare", lambda _: spare.pop(0) if spare else 1)

    async def beats() -> None:
        claiming = asyncio.ensure_future(scene.handlers.keep_claiming())
        await until_async(lambda: not scene.numbers)
        claiming.cancel()

    asyncio.run(beats())
    assert spare == []


@pytest.mark.parametrize(
    ("available", "free", "dropped"), [(100, 100, False), (99, 200, True), (200, 99, True)]
)
def test_own_copies_make_room_for_a_capsule_that_comes(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, available: int, free: int, dropped: bool
) -> None:
    asyncio.run(scene.handlers.hold(own(17)))
    monkeypatch.setattr(host_facts, "memory_to_spare", lambda _: available)
    usage = SimpleNamespace(free=free)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    scene.handlers.make_room(100, besides="gpt/1")
    assert scene.numbers == [(17, False)]
    scene.handlers.make_room(100, besides="gpt/0")
    assert bool(scene.numbers) is not dropped
