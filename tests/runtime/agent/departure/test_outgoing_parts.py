# SPDX-License-Identifier: Apache-2.0
"""What an outgoing migration hands on to its parts: devices, memory, files and output. CRIU, wire
and network are stand-ins."""

from __future__ import annotations

from typing import Any

import pytest
from outgoing_scene import Scene, scene

from liveshift.criu_glue.capsule import output
from liveshift.errors import Refused
from liveshift.runtime.agent.departure.outgoing_files import OutgoingFiles
from liveshift.runtime.agent.departure.outgoing_migration import OutgoingMigration
from liveshift.runtime.agent.departure.outgoing_note import write_promise

__all__ = ["scene"]


class Noted:
    """Notes the calls of its methods, with what they were given."""

    def __init__(self) -> None:
        self.done: list[tuple[object, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *given: self.done.append((name, *given))


def test_a_capsule_may_be_frozen_once_its_pre_copy_has_begun(scene: Scene) -> None:
    scene.outgoing = scene.make()
    scene.outgoing._files._trees = []
    with pytest.raises(Refused, match="it is preparing"):
        scene.outgoing.check_may_freeze()
    scene.precopy()
    scene.outgoing.check_may_freeze()


def test_the_gpu_helper_prepares_for_the_capsules_gpus_while_the_job_trains(scene: Scene) -> None:
    outgoing: Any = scene.outgoing
    outgoing._files._trees = []
    outgoing._frozen.devices = devices = Noted()
    outgoing.gpus = ["GPU-1", "GPU-2"]
    scene.precopy()
    assert devices.done == [("warm", ["GPU-1", "GPU-2"])]


def test_what_any_thread_may_ask_of_a_migration_reaches_its_memory(scene: Scene) -> None:
    outgoing: Any = scene.outgoing
    outgoing._memory = memory = Noted()
    outgoing.end_sooner(7.0)
    outgoing.gates_close()
    outgoing.gates_open()
    assert memory.done == [("end_sooner", 7.0), ("pause",), ("resume",)]


def test_an_agent_started_anew_drops_the_devices_of_a_capsule_that_has_moved(scene: Scene) -> None:
    """The agent before it has left them to the GPU helper."""
    devices: Any = Noted()
    scene.images.mkdir()
    write_promise(scene.images)
    here = OutgoingMigration.recover("m1", scene.resident, scene.factory, [], lambda: devices)
    scene.equip(here)
    here.finish()
    assert devices.done == [("drop",)]


def test_the_output_of_the_capsule_itself_is_sent(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = scene.resident.sandbox.plan.log
    log.mkdir(parents=True)
    (log / f"{0:020}").write_bytes(b"step 1\n")
    written = output.Written(end=7, busy=False, lost=0, error=0)
    monkeypatch.setattr(output, "written", lambda _sandbox: written)
    sent: list[bytes] = []
    files = OutgoingFiles(scene.resident, scene.factory)
    files.send_output(lambda _stream, data: sent.append(data))
    files.close()
    assert sent == [b"step 1\n"]
