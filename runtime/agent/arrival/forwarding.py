# SPDX-License-Identifier: Apache-2.0
"""A destination that could not restore an image sends it on to another spare, as its source did."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import msgspec

from ....criu_glue.files import trees
from ....criu_glue.memory.store.store import MemoryStore
from ...messages import Frozen
from ...wire import CHUNK, PAGE_TABLE, Lanes, Sender
from ...wire.small_images import SmallImagePacker
from ..gpu.device_memory import Pump
from ..gpu.devices import DeviceTree
from .image_place import SandboxPlace
from .inbox import Inbox


def forward_image(
    inbox: Inbox, place: SandboxPlace, devices: DeviceTree | None, sender: Sender, lanes: Lanes
) -> Frozen:
    """Send a complete image. ``devices``: who has the device state that came with it, if any."""
    manifest = inbox.manifest
    packer = SmallImagePacker(sender.send)
    for path in inbox.images.glob("*.img"):
        forward_file(functools.partial(packer, path.name), path)
    packer.finish()
    for stream in manifest.streams:
        kind, _, name = stream.partition(":")
        if kind == "output":
            forward_file(functools.partial(sender.send, stream), inbox.path(kind, name))
    if inbox.memory is not None:
        _forward_memory(inbox.memory, sender, lanes)
    pump = Pump(devices, sender, lanes)
    try:
        for tree in sorted({s.split(":", 2)[2] for s in manifest.streams if s[:5] == "tree:"}):
            _forward_tree(place, sender, tree)
        pump.finish()
    finally:
        pump.stop()  # it must not use the sender once that is closed
    sender.send_manifest(
        manifest.capsule,
        manifest.image_bytes,
        manifest.pipes,
        manifest.gone(),
        lanes.end(),
        manifest.epoll,
        manifest.shared,
        manifest.written,
    )
    sender.finish()
    return Frozen(manifest.image_bytes, [])


def _forward_memory(store: MemoryStore, sender: Sender, lanes: Lanes) -> None:
    store.forward(lanes.pages)
    lanes.finish()
    sender.send(PAGE_TABLE, msgspec.msgpack.encode(store.table))
    sender.send(PAGE_TABLE, b"")


def forward_file(send: Callable[[bytes], None], path: Path) -> None:
    """Send a file and its end."""
    with path.open("rb") as file:
        while data := file.read(CHUNK):
            send(data)
    send(b"")


def _forward_tree(place: SandboxPlace, sender: Sender, name: str) -> None:
    """Send a directory as it came; of the capsule's own directories, all that they contain."""
    top, stream = place.top(name), f"tree:2:{name}"
    only = None
    if name not in ("tmp", "shm"):
        only = tuple(sorted(place.came.get(name.removeprefix("carried:"), set())))
    tree = trees.Tree(name, top, only)
    trees.pack(
        tree,
        trees.listing(tree),
        lambda data: sender.send(stream, bytes(data)) if data else None,
        # A job may have written to some of these through a mapping, and the times do not show it.
        # Which ones is not known here.
        forced=place.written.get(name, ()),
    )
    sender.send(stream, b"")
