# SPDX-License-Identifier: Apache-2.0
"""What a freeze does in which order: the network is shut before CRIU looks, and opens last."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from liveshift.errors import StepFailed
from liveshift.runtime import departure
from liveshift.runtime.departure import PROMISED, Departure

INIT = 4711
LOCKED, OPENED = f"lock {INIT}", f"unlock {INIT}"


class Scene:
    """A departure whose CRIU, wire and network only say what they were asked for."""

    def __init__(self, images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        self.fails = ""
        self._images = images
        plan = SimpleNamespace(tmp=images / "tmp", log=images / "log")
        room: Any = SimpleNamespace(plan=plan, init=INIT, root=images, alive=lambda: True)
        room.pipe_inode = lambda fd: fd
        resident: Any = SimpleNamespace(room=room, spec=SimpleNamespace(name="gpt/1"))
        housing: Any = SimpleNamespace(
            placement=SimpleNamespace(carried=[]), images=lambda _migration: images
        )
        wire: Any = SimpleNamespace(
            finish=self.note("all is there"), send=None, streams={}, bytes=0,
            send_manifest=self.note("manifest"), close=lambda: None,
        )  # fmt: skip
        self.departure = Departure("m1", resident, housing, wire)
        for name in ("dump", "thaw", "pin"):
            monkeypatch.setattr(self.departure._frozen, name, self.note(name))
        monkeypatch.setattr(self.departure, "_send_changes", dict)
        log: Any = SimpleNamespace(finish=lambda _send: None, close=lambda: None)
        self.departure._log = log
        monkeypatch.setattr(departure.output, "settle", lambda _room: None)
        monkeypatch.setattr(departure.carried_out, "remember", lambda *_: None)
        monkeypatch.setattr(departure, "has_cuda", lambda _resident: False)
        for name in ("lock", "unlock"):
            noted = lambda pid, name=name: self.note(f"{name} {pid}")()  # noqa: E731
            monkeypatch.setattr(departure.network, name, noted)

    def note(self, what: str) -> Callable[..., None]:
        def do(*_: object) -> None:
            promised = " after the promise" if (self._images / PROMISED).exists() else ""
            self.done.append(what + promised)
            if what == self.fails:
                raise StepFailed("freeze", f"{what} failed")

        return do

    def freeze(self) -> list[str]:
        criu: Any = None
        with contextlib.suppress(StepFailed):
            self.departure.freeze(criu, 10.0)
        return self.done


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(tmp_path / "images", monkeypatch)


def test_the_network_is_shut_before_the_dump_and_stays_so(scene: Scene) -> None:
    """What a peer sends to an open socket of a frozen tree is acknowledged by the kernel, and is
    not in the image."""
    assert scene.freeze() == [
        LOCKED, "dump", "all is there", "pin", "manifest after the promise",
        "all is there after the promise",
    ]  # fmt: skip
    assert scene.departure.promised


@pytest.mark.parametrize("fails", ["dump", "all is there"])
def test_when_a_freeze_fails_the_tasks_run_before_the_network_opens(
    scene: Scene, fails: str
) -> None:
    scene.fails = fails
    assert scene.freeze()[-2:] == ["thaw", OPENED]
    assert scene.done[:2] == [LOCKED, "dump"]
    assert not scene.departure.promised


def test_a_network_that_cannot_be_shut_ends_the_freeze_before_the_dump(scene: Scene) -> None:
    scene.fails = LOCKED
    assert scene.freeze() == [LOCKED, "thaw"]


def test_after_the_promise_nothing_goes_on_by_itself(scene: Scene) -> None:
    scene.fails = "manifest"
    assert scene.freeze()[-1] == "manifest after the promise"
    assert OPENED not in scene.done
    assert "thaw" not in scene.done
