# SPDX-License-Identifier: Apache-2.0
"""A holder, and the snapshots that a source sends to it. Store and files are real."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import memory_parts
import msgspec
import pytest
import xxhash
from memory_parts import BASE, PAGE, ZEROS, Pages, page
from preflight_scene import HERE, NOTHING

from liveshift.criu_glue.files import trees
from liveshift.criu_glue.files.trees import Tree
from liveshift.runtime.agent.arrival.inbox import Inbox
from liveshift.runtime.agent.holding.held_capsule import HeldCapsule
from liveshift.runtime.agent.holding.held_images import HELD, HeldImages
from liveshift.runtime.agent.holding.held_note import HeldNote
from liveshift.runtime.agent.host.running_capsule import CapsuleFactory
from liveshift.runtime.config.cluster import Files, Paths
from liveshift.runtime.messages import CapsuleSpec
from liveshift.runtime.model import manifest
from liveshift.runtime.model.manifest import Manifest
from liveshift.runtime.wire import PAGE_TABLE

SPEC = CapsuleSpec("gpt/1", "gpt", 1, ["train"], {}, "/", 1000, 1000, [], "")
CORE = "image:core-1001.img"
LOG = "output:" + "0" * 20
MB = 1 << 20
BUDGET = 64 * MB

Memory = dict[int, Pages]
"""By inner pid."""


def note(number: int, *, size: int = 8 * MB, rewritten: int = 0, index: int = 1) -> HeldNote:
    spec = msgspec.structs.replace(SPEC, name=f"gpt/{index}", index=index)
    name = f"s{number}.{index}"
    return HeldNote(name, number, "h0", spec, NOTHING, HERE, 3, 1, 64 * MB, size, rewritten)


def some_memory(seed: int = 0, count: int = 300) -> Memory:
    """Two processes: ``count`` pages and one of zeros, and two further pages."""
    first = {BASE + n * PAGE: page(seed + n) for n in range(count)}
    return {7: first | {BASE + 1000 * PAGE: ZEROS}, 8: {BASE + n * PAGE: page(n) for n in (1, 3)}}


def packed(top: Path) -> bytes:
    """A directory as its stream."""
    tree, sent = Tree("x", top), list[bytes]()
    trees.pack(tree, trees.listing(tree), sent.append)
    return b"".join(sent)


class Source:
    """Sends one image to an inbox, under the name ``migration`` or the one that is expected."""

    def __init__(self, inbox: Inbox, migration: str = "") -> None:
        self._inbox = inbox
        self._migration = migration or inbox.place.migration
        self.sent: dict[str, bytes] = {}

    def send(self, stream: str, data: bytes, end: bool = True) -> None:
        self.sent[stream] = self.sent.get(stream, b"") + data
        for chunk in [data] * bool(data) + [b""] * end:
            self._inbox.write(stream, memoryview(chunk))

    def send_pages(self, memory: Mapping[int, Pages], incarnation: int = 1) -> None:
        for pid, pages in memory.items():
            for chunk in memory_parts.chunks(pid, pages, incarnation):
                self._inbox.pages.write(1, memoryview(chunk), b"tag")

    def end_memory(self, memory: Mapping[int, Pages]) -> None:
        self._inbox.pages.write(1, memoryview(b""), b"end")
        self.send(PAGE_TABLE, msgspec.msgpack.encode(memory_parts.table(memory)))

    def finish(self, removed: Mapping[str, list[str]] | None = None) -> Manifest:
        digests = {s: (len(d), xxhash.xxh3_64_intdigest(d)) for s, d in self.sent.items()}
        streams = digests | self._inbox.pages.streams()
        names = manifest.as_bytes(removed or {})
        who = (self._migration, self._inbox.place.capsule)
        found = Manifest(manifest.VERSION, *who, 7, streams, {11: 20}, names, [])
        raw = manifest.encode(found)
        for chunk in (raw, b""):
            self._inbox.write(manifest.STREAM, memoryview(chunk))
        return found


class Holder:
    """h1, which holds images of gpt/1, and of others where a test says so."""

    def __init__(self, top: Path, budget: int = BUDGET, carried: tuple[Path, ...] = ()) -> None:
        paths = Paths(state=top / "state", run=top / "run", keys=top / "keys")
        cluster: Any = SimpleNamespace(paths=paths, files=Files(carried=carried))
        self.factory = CapsuleFactory(cluster, "h1")
        self.budget = budget
        self.directory = self.factory.images(HELD)
        self.images = HeldImages.recover(self.factory, budget)

    def again(self) -> HeldImages:
        """As a restarted agent has it."""
        self.images.close()
        self.images = HeldImages.recover(self.factory, self.budget)
        return self.images

    @property
    def capsule(self) -> HeldCapsule:
        """The one that is here."""
        return self.images.find(self.images.generations()[-1].note.migration)[0]

    def take(
        self,
        number: int,
        memory: Memory,
        changed: Mapping[int, Pages] | None = None,
        index: int = 1,
    ) -> None:
        """Take an image of this memory, of which the source has sent what has ``changed``."""
        source = Source(self.images.expect(note(number, index=index)))
        source.send_pages(memory if changed is None else changed)
        source.send(CORE, b"registers of %d" % number)
        source.send(LOG, b"lines until %d" % number)
        source.end_memory(memory)
        source.finish()

    def hold(
        self,
        number: int,
        memory: Memory,
        changed: Mapping[int, Pages] | None = None,
        index: int = 1,
    ) -> None:
        """Take an image and keep it."""
        self.take(number, memory, changed, index)
        capsule, _ = self.images.find(f"s{number}.{index}")
        state = capsule.held(number, memory_parts.digest(memory))
        assert (state.number, state.image_bytes) == (number, 7)

    def memory(self, number: int) -> Memory:
        """What a generation consists of."""
        store = self.capsule._store
        assert store is not None
        with store.view(number) as view:
            return memory_parts.content(view)

    def numbers(self) -> list[tuple[int, bool]]:
        """The generations that are here, and whether each is kept."""
        return [(g.number, g.kept) for g in self.images.generations()]

    def left(self) -> list[str]:
        """The capsules of which a directory is left."""
        return sorted(p.name for p in self.directory.iterdir()) if self.directory.exists() else []

    def files(self) -> list[str]:
        return sorted(
            str(path.relative_to(self.directory))
            for path in self.directory.rglob("*")
            if path.is_file()
        )


@pytest.fixture
def holder() -> Iterator[Holder]:
    """One whose images lie in a tmpfs, as those of hosts do."""
    with tempfile.TemporaryDirectory(prefix="ls-held-", dir="/dev/shm") as place:
        made = Holder(Path(place))
        yield made
        made.images.close()
