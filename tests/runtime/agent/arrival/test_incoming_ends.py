# SPDX-License-Identifier: Apache-2.0
"""What a destination does with an image: nothing before it is complete, what fails leaves no task,
and what is over leaves nothing. The tree, CRIU and the devices are stand-ins."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from incoming_scene import NO_CRIU, Scene, scene

from liveshift.criu_glue.capsule.mounts import Placement
from liveshift.criu_glue.files import trees
from liveshift.criu_glue.memory.prefill.prefill import LEAST
from liveshift.criu_glue.network import tcp_sockets
from liveshift.errors import LiveshiftError, NotFound, StepFailed
from liveshift.runtime.agent.arrival import (
    forwarding,
    memory_ahead,
    restored_capsule,
)
from liveshift.runtime.agent.arrival.incoming_migration import IncomingMigration
from liveshift.runtime.agent.arrival.incoming_note import NOTE
from liveshift.runtime.agent.gpu.device_memory import TABLE
from liveshift.runtime.agent.host import ran_here
from liveshift.runtime.messages import Book
from liveshift.runtime.model.stopwatch import Stopwatch
from liveshift.runtime.wire import PAGE_TABLE

__all__ = ["scene"]


def test_what_was_promised_and_where_it_is(scene: Scene) -> None:
    assert scene.here.gpus_promised == ["GPU-x"]
    assert scene.here.location(9).book == Book("gpt", 7, "10.99.7.0/24", {"10.99.7.2": ("h1", 9)})
    assert (scene.here.migration, scene.here.granted) == ("m1", 0)
    assert scene.here.placed == (0, False)


def test_only_a_complete_image_is_restored_and_it_is_looked_at_first(scene: Scene) -> None:
    watch = Stopwatch()
    scene.here.bring_up(NO_CRIU, watch, 10.0)
    image = ["prepare", "forget", "mark", "make_relative"]
    assert scene.done == ["inbox closed", "reconcile", *image, "bring_up"]
    assert [phase.name for phase in watch.phases] == ["verify", "restore"]
    assert all(phase.frozen for phase in watch.phases), "the job is frozen so long"
    assert watch.phases[0].detail == "2 streams"
    assert watch.phases[1].bytes == 5
    scene.done.clear()
    scene.here.bring_up(NO_CRIU, watch, 10.0)
    assert scene.done == ["inbox closed", *image, "bring_up"], "files are settled once"
    scene.here.inbox.landed = None
    scene.done.clear()
    with pytest.raises(StepFailed, match="the image is not complete"):
        scene.here.bring_up(NO_CRIU, watch, 10.0)
    assert scene.done == ["inbox closed"]


@pytest.mark.parametrize(
    ("ran", "dumped_under", "back"),
    [(0, 0, False), (4, 0, False), (4, 5, False), (5, 5, True), (6, 5, True), (0, 5, False)],
)
def test_a_capsule_goes_back_to_files_that_are_here_if_it_ran_here_since(
    scene: Scene, ran: int, dumped_under: int, back: bool
) -> None:
    if ran:
        ran_here.remember(scene.factory, "gpt/1", ran)
    scene.reserve.dumped_under = dumped_under
    assert IncomingMigration(scene.reserve, scene.resident, scene.factory)._back is back


def test_what_goes_back_removes_no_file_that_was_left_here_by_an_earlier_move(
    scene: Scene,
) -> None:
    scene.here._back = True
    scene.here.bring_up(NO_CRIU, Stopwatch(), 10.0)
    image = ["prepare", "forget", "mark", "make_relative"]
    assert scene.done == ["inbox closed", "drop_note", *image, "bring_up"]


def test_what_is_gone_at_the_source_goes_here_too_if_it_came_from_there(scene: Scene) -> None:
    tmp = scene.resident.sandbox.plan.tmp
    tmp.mkdir()
    for name in ("came", "was here"):
        (tmp / name).touch()
    scene.here.inbox.place.written = {"tmp": {"came"}}
    scene.manifest.gone = lambda: {"tmp": ["came", "was here"]}
    scene.here.bring_up(NO_CRIU, Stopwatch(), 10.0)
    assert [path.name for path in tmp.iterdir()] == ["was here"]


def test_an_image_whose_memory_is_used_up_is_not_restored(scene: Scene) -> None:
    """It would make a tree of zeros."""
    scene.manifest.streams[PAGE_TABLE] = (1, 0)
    with pytest.raises(StepFailed, match="is used up"):
        scene.here.bring_up(NO_CRIU, Stopwatch(), 10.0)
    with pytest.raises(StepFailed, match="is used up"):
        scene.here.forward(NO_CRIU, NO_CRIU)
    assert scene.done == ["inbox closed"]


@pytest.mark.parametrize(
    ("failed", "spent", "absent", "early", "used_up"),
    [
        (0, True, 1, None, False),
        (3, True, 0, None, True),
        (3, False, 1, None, True),
        (3, False, 0, None, False),
        (3, False, 1, "one", False),
    ],
)
def test_an_attempt_may_leave_nothing_to_try_again_with(
    scene: Scene, failed: int, spent: bool, absent: int, early: Any, used_up: bool
) -> None:
    here = scene.here
    here._ahead._early = early
    if failed:
        here.fail(failed, "CRIU broke off")
    here.check_may_restore(failed + 1)  # no memory came in pages
    here.inbox.memory = SimpleNamespace(frees_after_copy=spent, lost=absent)
    if used_up:
        with pytest.raises(NotFound, match="was used up by an attempt that failed: CRIU broke off"):
            here.check_may_restore(failed + 1)
    else:
        here.check_may_restore(failed + 1)


def test_device_state_waits_at_the_door_and_comes_before_the_tree_runs(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.with_devices(monkeypatch)
    scene.here.bring_up(NO_CRIU, Stopwatch(), 10.0)
    assert scene.done[-4:] == ["let go on", "bring_up", "stop_at_door", "arrive"]
    scene.granted().let_run(Stopwatch(), 9, 10.0)
    assert scene.done[-3:] == ["noted", "let_run_held", "parents continued"]
    for fails in ("stop_at_door", "arrive"):
        scene.fails, scene.here = fails, scene.make()
        with pytest.raises(StepFailed, match=fails):
            scene.here.bring_up(NO_CRIU, Stopwatch(), 10.0)
        assert scene.done[-3:] == [fails, "drop", "end"], "no task is left"


@pytest.mark.parametrize("table", [False, True])
def test_a_tree_without_device_state_goes_on_as_any_where_there_is_a_helper(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, table: bool
) -> None:
    scene.here._restored._devices = scene.with_devices(monkeypatch)
    if table:
        monkeypatch.setattr(restored_capsule, "decode", lambda _raw: [])
    else:
        del scene.manifest.streams[TABLE]
    scene.here.bring_up(NO_CRIU, Stopwatch(), 10.0)
    assert scene.done[-1] == "bring_up"
    scene.granted().let_run(Stopwatch(), 9, 10.0)
    assert scene.done[-2:] == ["noted", "let_run"]
    scene.done.clear()
    scene.here = scene.make()
    assert scene.granted().resume_recovered() is True
    assert scene.done == ["let_run"]


def test_device_state_without_a_helper_lets_nothing_run(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.with_devices(monkeypatch)
    scene.devices = None
    with pytest.raises(StepFailed, match="the GPU helper of this host"):
        scene.here.bring_up(NO_CRIU, Stopwatch(), 10.0)
    assert "bring_up" not in scene.done


CLOSED = "connections out of the job closed"


@pytest.mark.parametrize("dumped_under", [0, 5])
@pytest.mark.parametrize("recovered", [False, True])
def test_a_rewind_closes_connections_that_lead_out_of_the_job_before_the_tree_runs(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, dumped_under: int, recovered: bool
) -> None:
    """A move does not: their far sides have not gone on without it."""
    monkeypatch.setattr(tcp_sockets, "abort_all_but", scene.noted(CLOSED))
    scene.reserve.dumped_under = dumped_under
    granted = scene.granted()
    if recovered:
        assert granted.resume_recovered() is True
    else:
        granted.let_run(Stopwatch(), 9, 10.0)
    closed = [CLOSED] if dumped_under else []
    assert scene.done == [*([] if recovered else ["noted"]), *closed, "let_run"]


def test_a_tree_runs_though_its_connections_cannot_be_closed(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def cannot(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(tcp_sockets, "abort_all_but", cannot)
    scene.reserve.dumped_under = 5
    scene.granted().let_run(Stopwatch(), 9, 10.0)
    assert scene.done == ["noted", "let_run"]
    assert "gpt/1 has connections out of its job that cannot be closed" in caplog.text


def test_a_capsule_that_is_let_run_has_run_here(scene: Scene) -> None:
    scene.here.bring_up(NO_CRIU, Stopwatch(), 10.0)
    assert ran_here.last_epoch(scene.factory, "gpt/1") == 0
    scene.here.grant(7)
    scene.here.let_run(Stopwatch(), 7, 10.0)
    assert ran_here.last_epoch(scene.factory, "gpt/1") == 7


def test_it_is_noted_as_running_before_it_runs(scene: Scene) -> None:
    moved = scene.granted().let_run(Stopwatch(), 9, 10.0)
    assert scene.done == ["noted", "let_run"]
    assert (scene.resident.epoch, moved.bytes) == (9, 14)
    assert [phase.name for phase in moved.phases if phase.frozen] == ["unlock"]


@pytest.mark.parametrize("runs", [False, True])
def test_one_that_could_not_be_let_go_has_no_task_unless_it_runs_after_all(
    scene: Scene, runs: bool
) -> None:
    scene.fails, scene.runs = "let_run", runs
    if runs:
        scene.granted().let_run(Stopwatch(), 9, 10.0)
        assert scene.done == ["noted", "let_run"]
    else:
        with pytest.raises(StepFailed, match=r"the tree could not go on: .*let_run failed"):
            scene.granted().let_run(Stopwatch(), 9, 10.0)
        assert scene.done == ["noted", "let_run", "drop", "unnoted"]


@pytest.mark.parametrize(
    ("runs", "fails", "went_well", "done"),
    [
        (False, "", True, ["let_run"]),
        (True, "", True, ["hand_over"]),
        (False, "let_run", False, ["let_run", "drop", "unnoted"]),
    ],
)
def test_a_later_agent_finishes_what_an_earlier_one_was_to_let_run(
    scene: Scene, runs: bool, fails: str, went_well: bool, done: list[str]
) -> None:
    scene.runs, scene.fails = runs, fails
    assert scene.granted().resume_recovered() is went_well
    assert scene.done == done


@pytest.mark.parametrize("runs", [False, True])
def test_it_takes_up_the_devices_too(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, runs: bool
) -> None:
    scene.with_devices(monkeypatch)
    scene.runs = runs
    assert scene.granted().resume_recovered() is True
    assert scene.done == (
        ["recover_held some=True", "parents continued", "end", "hand_over"]
        if runs
        else ["recover_held some=False", "let_run_held", "parents continued"]
    )


def test_what_is_over_leaves_nothing_here(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The note goes first: without it no agent takes up what is half gone."""
    here = scene.here
    scene.with_devices(monkeypatch)
    here._ahead._early = SimpleNamespace(drop=scene.noted("early dropped"))
    (here.images / NOTE).touch()
    forget = here.inbox.forget_memory

    def forgotten() -> None:
        assert not (here.images / NOTE).exists()
        scene.done.append("memory")
        forget()

    monkeypatch.setattr(here.inbox, "forget_memory", forgotten)
    here.discard()
    assert scene.done == [
        "inbox closed",
        "early dropped",
        "removed",
        "devices dropped",
        "early dropped",
        "memory",
    ]
    assert scene.resident.leaving
    assert not here.images.exists()
    here.discard()  # the orchestrator may say so twice
    assert scene.done.count("removed") == 2


def test_a_tree_that_is_dropped_ends_on_the_devices_though_the_helper_is_gone(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone() -> None:
        scene.done.append("end")
        raise LiveshiftError("no helper")

    scene.here.drop_tree()
    assert scene.done == ["drop"]
    scene.here._restored._devices = SimpleNamespace(end=gone)
    scene.here.drop_tree()
    assert scene.done == ["drop", "drop", "end"]


def test_nothing_is_restored_into_a_sandbox_that_has_ended(scene: Scene) -> None:
    scene.here.check_may_restore(9)
    scene.resident.sandbox.alive = lambda: False
    with pytest.raises(NotFound, match=r"h1 has no image of gpt/1 \(any more\)"):
        scene.here.check_may_restore(9)


def test_an_image_is_forwarded_whole(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images, output, memory, device memory, directories; the manifest comes last."""
    here, plan, sent = scene.here, scene.resident.sandbox.plan, scene.done
    scene.with_devices(monkeypatch)
    carried = plan.log.parent / "carried"
    for top in (plan.tmp, plan.log, carried):
        top.mkdir()
    (plan.tmp / "all").write_text("of tmp")
    for name in ("came", "mapped", "another's"):
        (carried / name).write_text(f"{name} of carried")
    (plan.log / "0").write_text("said")
    (here.images / "core-1.img").write_text("a core")
    here._place._placement = Placement((), (str(carried),))
    here.inbox.place.came = {str(carried): {"came", "mapped"}}
    here.inbox.place.written = {f"carried:{carried}": {"mapped"}}
    monkeypatch.setattr(here.inbox, "path", lambda _kind, name: plan.log / name)
    here.inbox.memory = SimpleNamespace(forward=lambda _: sent.append("pages"), table=[7])
    streams = here.inbox.manifest.streams
    streams |= {"output:0": (4, 0), f"tree:2:carried:{carried}": (9, 0), PAGE_TABLE: (1, 0)}
    packed: list[tuple[str, bytes]] = []

    class Packer:
        def __init__(self, _send: object) -> None:
            self.finish = scene.noted("images")

        def __call__(self, name: str, data: bytes) -> None:
            packed.append((name, data))

    pump = SimpleNamespace(finish=scene.noted("gpu memory"), stop=scene.noted("pump ends"))
    monkeypatch.setattr(forwarding, "SmallImagePacker", Packer)
    monkeypatch.setattr(forwarding, "Pump", lambda devices, _sender, _lanes: devices and pump)
    came: dict[str, list[bytes]] = {}
    sender: Any = SimpleNamespace(
        send=lambda stream, data: came.setdefault(stream, []).append(data),
        send_manifest=lambda *a: sent.append(f"manifest {a}"),
        finish=scene.noted("sent"),
    )
    lanes: Any = SimpleNamespace(pages=None, finish=scene.noted("lanes"), end=lambda: {1: 2})
    frozen = here.forward(sender, lanes)
    assert sent == [
        "images",
        "pages",
        "lanes",
        "gpu memory",
        "pump ends",
        f"manifest {('gpt/1', 14, {7: 1}, {}, {1: 2}, [], {}, {b'/shared/log': 5})}",
        "sent",
    ]
    assert (frozen.image_bytes, frozen.phases) == (14, [])
    assert packed == [("core-1.img", b"a core"), ("core-1.img", b"")]
    assert came["output:0"] == [b"said", b""]
    assert came[PAGE_TABLE] == [b"\x91\x07", b""]
    assert set(came) == {"output:0", PAGE_TABLE, "tree:2:tmp", f"tree:2:carried:{carried}"}
    assert b"of tmp" in b"".join(came["tree:2:tmp"])
    of_carried = b"".join(came[f"tree:2:carried:{carried}"])
    assert b"came of carried" in of_carried
    assert b"another's" not in of_carried, "what was here before did not come"
    with tarfile.open(fileobj=io.BytesIO(of_carried)) as tar:
        forced = {member.name: trees.FORCED in member.pax_headers for member in tar}
    assert forced == {"came": False, "mapped": True}, "its time may not tell what was written"
    assert came["tree:2:tmp"][-1] == came[f"tree:2:carried:{carried}"][-1] == b""


def test_memory_is_kept_once_where_there_is_too_little_for_twice(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_ahead, "memory_left", lambda: LEAST + 100)
    assert [memory_ahead._only_once(size) for size in (-5, 0, 100, 101)] == [
        False,
        False,
        False,
        True,
    ]
    monkeypatch.setattr(memory_ahead, "memory_left", lambda: LEAST)
    assert [memory_ahead._only_once(size) for size in (-5, 0, 1)] == [False, False, True]
    monkeypatch.setattr(memory_ahead, "memory_left", lambda: LEAST + 100)
    engines: list[dict[str, Any]] = []

    def engine(_images: Path, _store: object, **how: Any) -> Any:
        engines.append(how)
        seen = SimpleNamespace(bytes=3, preplaced=4)
        return SimpleNamespace(seen=lambda: seen)

    monkeypatch.setattr(memory_ahead, "FillEngine", engine)
    watch = Stopwatch()
    for size in (100, 101):
        scene.here.inbox.memory = SimpleNamespace(
            size=size, frees_after_copy=False, lost=0, lent=False
        )
        scene.here.bring_up(NO_CRIU, watch, 10.0)
    assert engines == [{"free_after_copy": False}, {"free_after_copy": True}]
    assert [phase.bytes for phase in watch.phases if phase.name == "restore"] == [12, 12]
