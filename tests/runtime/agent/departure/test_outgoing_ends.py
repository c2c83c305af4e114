# SPDX-License-Identifier: Apache-2.0
"""How a departure ends: cancelled, too late, promised, taken up, thawed, finished. Its CRIU, wire
and network are those of test_outgoing_order.py."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from outgoing_scene import INIT, LOCKED, NO_CRIU, OPENED, PREPARED, Scene, scene

from liveshift.criu_glue.capsule import output, sandboxes
from liveshift.criu_glue.network import network_lock
from liveshift.criu_glue.survey.survey import Changing
from liveshift.errors import LiveshiftError, Refused, StepFailed, Unreachable
from liveshift.runtime.agent.departure import (
    frozen_capsule,
    outgoing_files,
    outgoing_memory,
    wire_dump,
)
from liveshift.runtime.agent.departure.outgoing_files import OutgoingFiles
from liveshift.runtime.agent.departure.outgoing_migration import OutgoingMigration
from liveshift.runtime.agent.departure.outgoing_note import NOTE, OutgoingNote
from liveshift.runtime.agent.departure.outgoing_phase import OutgoingPhase
from liveshift.runtime.agent.gpu.device_state import DeviceLost

__all__ = ["scene"]


class Rounds:
    """The rounds of a pre-copy, as far as an outgoing migration has to do with them."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.chosen: Any = None

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self.done.append(name)


def with_memory(gone: Any) -> tuple[Rounds, Any]:
    """Give it memory that goes ahead; its rounds and its lanes."""
    rounds: Any = Rounds()
    lanes: Any = SimpleNamespace(until=5.0, bytes=7, device_bytes=[], end=dict)
    gone._memory._rounds, gone._memory._lanes = rounds, lanes
    return rounds, lanes


class Devices:
    saved = ()

    def __init__(self, scene: Scene, fails: DeviceLost | None = None) -> None:
        self._scene, self._fails = scene, fails

    def save(self, _watch: object) -> None:
        self._scene.done.append("devices saved")

    def drop(self) -> None:
        self._scene.done.append("devices dropped")

    def bring_back(self, _watch: object) -> None:
        self._scene.done.append("devices back")
        if self._fails:
            raise self._fails


def test_one_that_was_cancelled_does_not_begin(scene: Scene) -> None:
    """What is on the wire is given up at once."""
    gone: Any = scene.outgoing
    rounds, lanes = with_memory(gone)
    gone.abandon()
    assert (gone._sender.until, lanes.until, rounds.done) == (0.0, 0.0, ["cancel"])
    with pytest.raises(StepFailed, match="it was cancelled"):
        gone.freeze(NO_CRIU, 10.0)
    assert scene.steps == ["thaw"]


def test_after_the_promise_it_waits_for_a_ruling_without_end(scene: Scene) -> None:
    gone: Any = scene.outgoing
    scene.freeze()
    _, lanes = with_memory(gone)
    assert gone._sender.until == float("inf")
    gone.abandon()
    assert gone._sender.until == float("inf")
    assert lanes.until == 5.0
    done = list(scene.done)
    with pytest.raises(Refused, match="held frozen already"):
        gone.freeze(NO_CRIU, 10.0)
    assert scene.done == done, "and nobody has let it go on"


def test_a_freeze_that_cannot_begin_in_time_shuts_nothing(scene: Scene) -> None:
    with pytest.raises(StepFailed, match="could not begin within 0 s"):
        scene.outgoing.freeze(NO_CRIU, 0.0)
    assert scene.steps == ["thaw"]


def test_the_dump_may_take_what_is_left_of_the_deadline(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[float] = []
    gone: Any = scene.outgoing
    gone._images.mkdir()  # as one leaves it that was followed ahead
    monkeypatch.setattr(gone._frozen.tree, "dump", lambda *a: given.append(a[2]))
    gone.freeze(NO_CRIU, 10.0)
    assert 9 < given[0] <= 10


def test_what_an_agent_needs_that_is_started_anew_is_there_before_anything_is_done(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone: Any = scene.outgoing
    gone.gpus = ["GPU-1"]
    gone._frozen.devices = Devices(scene)
    seen: list[bytes] = []
    monkeypatch.setattr(
        gone._frozen.devices, "save", lambda _: seen.append((gone._images / NOTE).read_bytes())
    )
    gone.freeze(NO_CRIU, 10.0)
    assert msgspec.msgpack.decode(seen[0], type=OutgoingNote) == OutgoingNote(
        "m1", "gpt/1", ["GPU-1"], 3
    )


def test_devices_are_emptied_before_the_network_is_shut_and_filled_after_it_opens(
    scene: Scene,
) -> None:
    gone: Any = scene.outgoing
    gone._frozen.devices = Devices(scene)
    scene.fails = "all is there"
    assert scene.freeze() == [
        "devices saved",
        LOCKED,
        "dump",
        "all is there",
        "thaw",
        OPENED,
        "devices back",
    ]
    assert not gone.resident.still
    assert not gone._images.exists()


def test_what_was_removed_is_not_removed_again_where_the_devices_were_not_dropped(
    scene: Scene,
) -> None:
    """The capsule may have come back meanwhile, with a network and a directory of the same name."""
    gone: Any = scene.outgoing
    gone._frozen.devices = SimpleNamespace(
        save=lambda _: None, saved=(), drop=scene.note("devices dropped")
    )
    gone.freeze(NO_CRIU, 10.0)
    scene.fails = "devices dropped"
    scene.done.clear()
    with pytest.raises(StepFailed, match="devices dropped failed"):
        gone.finish()
    removed = ["unplugged", "removed", "release", "devices dropped"]
    assert scene.done == [f"{each} after the promise" for each in removed]
    scene.done.clear()
    with pytest.raises(StepFailed, match="devices dropped failed"):
        gone.finish()
    scene.fails = ""
    gone.finish()
    again = [step for step in scene.done if not step.startswith(("output", "wire"))]
    assert again == ["devices dropped after the promise"] * 2
    assert gone.phase is OutgoingPhase.MOVED


def test_devices_that_are_lost_end_the_sandbox(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone: Any = scene.outgoing
    gone._frozen.devices = Devices(scene, DeviceLost("gpu restore", "it hangs"))
    monkeypatch.setattr(sandboxes, "end", lambda sandbox: scene.done.append(f"end {sandbox.init}"))
    with pytest.raises(DeviceLost, match="it hangs; so it was ended"):
        gone.thaw()
    assert scene.done[-1] == f"end {INIT}"


def test_a_capsule_whose_device_state_nobody_has_is_told_of(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone: Any = scene.outgoing
    monkeypatch.setattr(frozen_capsule, "has_cuda", lambda _: True)
    with pytest.raises(Unreachable, match="which has the device state of gpt/1"):
        gone.thaw()
    scene.alive = False
    gone.thaw()
    gone._frozen.devices = Devices(scene)
    gone.thaw()
    assert scene.steps[-1] == "devices dropped", "of one that has ended"


def test_what_cannot_leave_is_found_while_it_can_go_on_here(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Changing((), (), (("it holds a lock", "release it"),))
    gone: Any = scene.outgoing
    files = gone._files
    monkeypatch.setattr(
        files, "_send_changes", lambda send: OutgoingFiles._send_changes(files, send)
    )
    monkeypatch.setattr(outgoing_files, "changing", lambda *_: found)
    with pytest.raises(StepFailed, match="at that moment it holds a lock") as caught:
        gone.freeze(NO_CRIU, 10.0)
    assert caught.value.hint == "release it"
    assert scene.steps == [LOCKED, "dump", "thaw", OPENED]
    assert not gone.promised


def test_a_command_that_is_killed_while_it_is_frozen_is_named(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changing(*_: object) -> None:
        raise ProcessLookupError("no task runs in gpt-1")

    gone: Any = scene.outgoing
    files = gone._files
    monkeypatch.setattr(
        files, "_send_changes", lambda send: OutgoingFiles._send_changes(files, send)
    )
    monkeypatch.setattr(outgoing_files, "changing", changing)
    with pytest.raises(StepFailed, match="freeze: the command of gpt/1 has just ended"):
        gone.freeze(NO_CRIU, 10.0)
    assert scene.steps == [LOCKED, "dump", "thaw", OPENED]


def test_the_manifest_has_what_is_gone_and_the_output_is_whole_before_it(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone: Any = scene.outgoing
    monkeypatch.setattr(gone._files, "_send_changes", lambda _send: {"tmp": ["gone"]})
    monkeypatch.setattr(output, "settle", lambda _: scene.done.append("settled"))
    monkeypatch.setattr(
        gone._sender, "send_manifest", lambda *a: scene.done.append(f"manifest {a[0]} {a[3]}")
    )
    frozen = gone.freeze(NO_CRIU, 10.0)
    assert scene.done == [
        LOCKED,
        "dump",
        "settled",
        "output",
        "all is there",
        "remembered",
        "pin",
        "manifest gpt/1 {'tmp': ['gone']}",
        "all is there after the promise",
    ]
    assert frozen.image_bytes == 0
    assert {phase.name for phase in frozen.phases if phase.frozen} == {
        "lock",
        "dump",
        "files",
        "ship",
        "promise",
    }


def test_files_that_have_changed_go_again_and_those_that_went_are_named(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gone: Any = scene.outgoing
    tmp = gone.resident.sandbox.plan.tmp
    (tmp / "kept").mkdir(parents=True)
    (tmp / "going").write_text("x")
    streams: dict[str, bytes] = {}

    def send(stream: str, data: bytes) -> None:
        streams[stream] = streams.get(stream, b"") + data

    monkeypatch.setattr(outgoing_files, "changing", lambda *_: Changing((), ()))
    gone._files.send_ahead(send)
    assert b"going" in streams["tree:1:tmp"]
    (tmp / "going").unlink()
    (tmp / "new").write_text("new here")
    removed = OutgoingFiles._send_changes(gone._files, send)
    assert removed["tmp"] == ["going"]
    assert b"new here" in streams["tree:2:tmp"]
    assert b"going" not in streams["tree:2:tmp"]


def test_one_that_has_gone_leaves_nothing_here(scene: Scene) -> None:
    gone: Any = scene.outgoing
    gone._frozen.devices = Devices(scene)
    resident = gone.resident
    resident.remove = lambda: scene.done.append(f"removed, leaving={resident.leaving}")
    resident.unplug = lambda: scene.done.append("unplugged")
    gone._images.mkdir(parents=True)
    scene.freeze()
    rounds, _ = with_memory(gone)
    scene.done.clear()
    gone.finish()
    assert scene.done == [
        "unplugged",
        "removed, leaving=True",
        "release after the promise",
        "devices dropped",
        "output closed after the promise",
        "wire closed after the promise",
    ]
    assert rounds.done == ["close"]
    assert not gone._images.exists()
    assert gone.phase is OutgoingPhase.MOVED


def test_one_that_is_taken_up_is_held_until_it_is_thawed(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though its agent may have ended just before it shut the network, which then has no lock."""
    old: Any = scene.outgoing
    asked: list[str] = []

    def find() -> None:
        asked.append("devices")

    here: Any = OutgoingMigration.recover("m1", old.resident, old._factory, ["GPU-1"], find)
    scene.equip(here)
    assert old.resident.still
    assert (here.phase, here.gpus) == (OutgoingPhase.FREEZING, ["GPU-1"])
    monkeypatch.setattr(network_lock, "unlock", lambda _: _refused(scene))
    here.thaw()
    assert scene.steps == ["taken up", "thaw", OPENED]
    assert asked == ["devices"]
    assert not old.resident.still
    here.thaw()
    assert scene.steps[-1] == "thaw", "the network is opened once"
    old._frozen._locked = True
    with pytest.raises(LiveshiftError, match="no lock"):
        old.thaw()


def _refused(scene: Scene) -> None:
    scene.done.append(OPENED)
    raise LiveshiftError("no lock")


def test_the_deadline_counts_from_the_order(scene: Scene) -> None:
    gone: Any = scene.outgoing
    seen: list[float] = []
    gone._sender.finish = lambda: seen.append(gone._sender.until - time.monotonic())
    gone.freeze(NO_CRIU, 10.0)
    assert 9 < seen[0] <= 10
    assert seen[1] == float("inf")


def test_what_goes_ahead_is_files_and_output_and_the_lock_is_ready_then(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All but /dev/shm, which is memory; twice the output, and each stream has an end."""
    gone: Any = scene.outgoing
    chunks: list[tuple[str, bytes]] = []
    carried = tmp_path / "carried"
    for top in (gone.resident.sandbox.plan.tmp, gone.resident.sandbox.root / "dev/shm", carried):
        top.mkdir(parents=True)
        (top / "file").write_text(f"in {top.name}")
    time.sleep(2 * outgoing_files.TICK_NS / 1e9)  # what is younger counts as changed
    gone._factory.placement.carried = [str(carried)]
    gone._files._trees = outgoing_files.carried_trees(gone.resident, gone._factory)
    gone._files._output.send_new = lambda _send: scene.done.append("output")
    monkeypatch.setattr(gone._sender, "send", lambda *chunk: chunks.append(chunk))
    monkeypatch.setattr(gone._sender, "bytes", 40)
    moved = scene.precopy(0.0)
    assert scene.done == ["output", PREPARED, "all is there", "output", "start_ahead"]
    assert {stream for stream, _ in chunks} == {"tree:1:tmp", f"tree:1:carried:{carried}"}
    for stream in ("tree:1:tmp", f"tree:1:carried:{carried}"):
        sent = [data for name, data in chunks if name == stream]
        assert sent[-1] == b""
        assert b"in " in b"".join(sent)
    assert (moved.bytes, [phase.detail for phase in moved.phases][1:]) == (
        40,
        ["full dump: it is small"],
    )
    assert moved.phases[0].bytes == 40
    monkeypatch.setattr(outgoing_files, "changing", lambda *_: Changing((), ()))
    chunks.clear()
    OutgoingFiles._send_changes(gone._files, gone._sender.send)
    assert set(gone._files._taken) == {str(carried)}
    again = {name for name, data in chunks if b"in " in data}
    assert again == {"tree:2:shm"}, "the other files have not changed: they are not sent again"
    assert {name for name, _ in chunks} == {
        "tree:2:tmp",
        f"tree:2:carried:{carried}",
        "tree:2:shm",
    }


def test_memory_goes_ahead_in_rounds_until_the_deadline(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone: Any = scene.outgoing
    gone._files._trees = gone._files._trees[-1:]
    rounds, _ = with_memory(gone)
    until: list[float] = []

    def run(end: float) -> SimpleNamespace:
        until.append(end)
        return SimpleNamespace(sent=30)

    rounds.run = run  # type: ignore[attr-defined]  # it has none of its own
    monkeypatch.setattr(gone._memory, "begin", lambda *_: None)
    monkeypatch.setattr(outgoing_memory, "describe_rounds", lambda done: f"{done.sent} in rounds")
    request: Any = SimpleNamespace(deadline=7.0)
    moved = gone.precopy(request, 70.0, NO_CRIU)
    assert until == [77.0]
    assert rounds.done == ["iterate_until_freeze"]
    assert (moved.bytes, moved.phases[1].bytes, moved.phases[1].detail) == (7, 30, "30 in rounds")


def test_single_files_go_by_themselves() -> None:
    (tree,) = outgoing_files._single_files(Changing(("/var/log/train",), ()))
    assert (tree.name, tree.source, tree.only) == ("open", Path("/"), ("var/log/train",))
    assert outgoing_files._single_files(Changing((), ())) == []


def test_the_rounds_are_asked_what_their_memory_is_asked(scene: Scene) -> None:
    memory = scene.outgoing._memory
    rounds, _ = with_memory(scene.outgoing)
    memory.pause()
    memory.resume()
    memory.end_sooner(3.0)
    memory.cancel()
    assert rounds.done == ["pause", "resume", "end_sooner", "cancel"]
    way: Any = object()
    rounds.chosen = way
    assert memory.chosen is way


def test_memory_at_the_freeze(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds stop first; all lanes have the freeze's deadline, and none after the promise; whatever
    happens, nothing of it goes on afterwards."""
    gone: Any = scene.outgoing
    rounds, lanes = with_memory(gone)
    gone._images = gone._images / "a directory" / "that is not there"
    untils: list[tuple[float, float]] = []
    gone._frozen.tree.image_bytes = 21
    monkeypatch.setattr(outgoing_memory, "PageFilter", lambda _: object())
    found = SimpleNamespace(sent_bytes=5)

    def finished(what: str, result: object) -> Callable[[], object]:
        def finish() -> object:
            scene.done.append(what)
            return result

        return finish

    delta = SimpleNamespace(
        check=None,
        page_filter=None,
        finish=finished("delta", found),
        stop=scene.note("delta ends"),
        describe=lambda: "pages again",
    )
    monkeypatch.setattr(outgoing_memory, "FinalDirtySet", lambda *_: delta)
    pump = SimpleNamespace(
        bytes=9,
        finish=finished("pump", 9),
        describe=lambda: "over lanes",
        stop=scene.note("pump ends"),
    )
    monkeypatch.setattr(wire_dump, "Pump", lambda *_: pump)
    packer = SimpleNamespace(finish=scene.note("packed"))
    monkeypatch.setattr(wire_dump, "SmallImagePacker", lambda _: packer)
    gone._sender.streams = {"tree:1:tmp": 100, "image:x": 50, "output": 3}
    sizes: list[int] = []
    gone._sender.send_manifest = lambda *a: sizes.append(a[1])

    def changed(_send: object) -> dict[str, list[str]]:
        untils.append((gone._sender.until, lanes.until))
        gone._sender.streams |= {"tree:2:tmp": 4, "image:y": 60, "output": 5}
        gone._sender.bytes += 66
        return {}

    monkeypatch.setattr(gone._files, "_send_changes", changed)
    frozen = gone.freeze(NO_CRIU, 0.9)
    assert rounds.done == ["stop"]
    assert untils[0][0] == untils[0][1] < float("inf")
    assert (gone._sender.until, lanes.until) == (float("inf"), float("inf"))
    assert [done for done in scene.done if done in ("packed", "delta", "pump")] == [
        "packed",
        "delta",
        "pump",
    ]
    assert {"delta ends", "pump ends"} <= set(scene.done)
    assert [frozen.image_bytes, *sizes] == [66, 66]
    laps = {phase.name: (phase.bytes, phase.detail) for phase in frozen.phases}
    assert laps["dump"][0] == 21
    assert laps["files"][0] == 6
    assert laps["memory"] == (5, "pages again")
    assert laps["gpu memory"] == (9, "over lanes")
    assert all(phase.frozen for phase in frozen.phases)
