# SPDX-License-Identifier: Apache-2.0
"""An inbox with what it uses of its host."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import xxhash

from liveshift.criu_glue.capsule.mounts import Placement
from liveshift.criu_glue.files import trees
from liveshift.criu_glue.files.trees import Tree
from liveshift.runtime.agent.arrival.image_place import SandboxPlace
from liveshift.runtime.agent.arrival.inbox import Inbox
from liveshift.runtime.model import manifest
from liveshift.runtime.model.manifest import Manifest


@dataclass(frozen=True)
class Plan:
    tmp: Path
    log: Path
    uid: int = 0
    gid: int = 0
    groups: tuple[int, ...] = ()


@dataclass(frozen=True)
class SandboxDouble:
    plan: Plan
    root: Path


@dataclass(frozen=True)
class Spec:
    name: str = "gpt/1"


@dataclass(frozen=True)
class Resident:
    sandbox: SandboxDouble
    spec: Spec = Spec()


class Host:
    """A destination as the inbox knows it, and the streams that a source would send to it."""

    def __init__(self, place: Path) -> None:
        for name in ("images/m1", "tmp", "root/dev/shm", "source", "log"):
            (place / name).mkdir(parents=True)
        self.images = place / "images" / "m1"
        self.source = place / "source"
        self.carried = place / "carried"
        self.resident = Resident(SandboxDouble(Plan(place / "tmp", place / "log"), place / "root"))
        self.ahead: Any = SimpleNamespace(begin=lambda *_, **__: None, halt=lambda: None, lost="")
        self.inbox = self.again()
        self.sent: dict[str, bytes] = {}

    def again(self) -> Inbox:
        resident: Any = self.resident
        place = SandboxPlace(self.images, resident, Placement((), (str(self.carried),)))
        return Inbox(place, None, 0, self.ahead)

    def landed(self) -> Inbox:
        """As an agent that was started anew has it."""
        inbox = self.again()
        inbox.recover_image()
        return inbox

    def send(self, stream: str, data: bytes, end: bool = True) -> None:
        self.sent[stream] = self.sent.get(stream, b"") + data
        for chunk in [data] * bool(data) + [b""] * end:
            self.inbox.write(stream, memoryview(chunk))

    def send_tree(self, stream: str) -> None:
        tree = Tree("x", self.source)
        sent: list[bytes] = []
        trees.pack(tree, trees.listing(tree), sent.append)
        self.send(stream, b"".join(sent))

    def manifest(self, **other: object) -> Manifest:
        digests = {s: (len(d), xxhash.xxh3_64_intdigest(d)) for s, d in self.sent.items()}
        fields = {
            "version": manifest.VERSION,
            "migration": "m1",
            "capsule": "gpt/1",
            "image_bytes": 7,
            "streams": digests,
            "pipes": {11: 20, 12: 21},
            "removed": {},
            "epoll": [],
        }
        return Manifest(**{**fields, **other})  # type: ignore[arg-type]

    def finish(self, **other: object) -> Manifest:
        found = self.manifest(**other)
        self.end(manifest.encode(found))
        return found

    def end(self, raw: bytes) -> None:
        for chunk in (raw[:10], raw[10:], b""):
            self.inbox.write("manifest", memoryview(chunk))


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)
