# SPDX-License-Identifier: Apache-2.0
"""A late removal of an earlier copy takes nothing from a newer sandbox of the same name.

Sandboxes and their network namespace are real.
"""

from __future__ import annotations

import shutil
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from one_sandbox import Start, netns, plan, start

from liveshift.criu_glue.capsule import sandboxes
from liveshift.criu_glue.capsule.sandboxes import Sandbox, SandboxPlan
from liveshift.criu_glue.network import network, network_lock
from liveshift.criu_glue.network.overlay import Overlay
from liveshift.errors import LiveshiftError, Refused
from liveshift.runtime.agent.host import sandbox_owner
from liveshift.runtime.agent.host.running_capsule import NOTE, CapsuleNote, RunningCapsule
from liveshift.runtime.messages import CapsuleSpec

__all__ = ["netns", "plan", "start"]

pytestmark = pytest.mark.root

SPEC: Any = SimpleNamespace(name="gpt/1", job="gpt", index=1)
OVERLAY = Overlay(7, "10.99.7.0/24")


@pytest.fixture
def unplugged(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the networks that were removed."""
    names: list[str] = []
    monkeypatch.setattr(network, "unplug", lambda _, name, __: names.append(name))
    return names


def capsule(sandbox: Sandbox) -> RunningCapsule:
    sandbox_owner.mark(sandbox)
    return RunningCapsule(SPEC, 3, OVERLAY, sandbox)


def made_anew(plan: SandboxPlan, start: Start) -> RunningCapsule:
    """A newer sandbox, as CapsuleFactory makes it: in a new directory of the same name."""
    shutil.rmtree(plan.directory)
    plan.directory.mkdir()
    return capsule(start("sleep", "60"))


def test_what_is_a_copys_own_goes_with_it_once(
    plan: SandboxPlan, start: Start, unplugged: list[str]
) -> None:
    only = capsule(start("sleep", "60"))
    only.unplug()
    only.remove()
    assert not only.sandbox.alive()
    assert not plan.directory.exists()
    assert unplugged == ["ls-gpt.1"] * 2
    only.remove()
    only.unplug()
    assert len(unplugged) == 2, "a later sandbox may be just being made under this name"


def test_an_earlier_copy_goes_and_leaves_a_newer_sandbox_alone(
    plan: SandboxPlan, start: Start, unplugged: list[str]
) -> None:
    earlier = capsule(start("sleep", "60"))
    newer = made_anew(plan, start)
    earlier.unplug()
    earlier.remove()
    assert not earlier.sandbox.alive()
    assert newer.sandbox.alive()
    assert plan.tmp.is_dir()
    assert unplugged == []
    newer.remove()
    assert not plan.directory.exists()
    assert unplugged == ["ls-gpt.1"]


def test_a_removal_that_fails_is_tried_again(
    plan: SandboxPlan, start: Start, unplugged: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise LiveshiftError("network: no")

    only = capsule(start("sleep", "60"))
    with monkeypatch.context() as broken:
        broken.setattr(network, "unplug", refuse)
        with pytest.raises(LiveshiftError, match="network: no"):
            only.remove()
    only.remove()
    assert (unplugged, plan.directory.exists()) == (["ls-gpt.1"], False)


def test_a_sandbox_of_an_earlier_version_owns_its_directory(
    plan: SandboxPlan, start: Start, unplugged: list[str]
) -> None:
    RunningCapsule(SPEC, 3, OVERLAY, start("sleep", "60")).remove()
    assert (unplugged, plan.directory.exists()) == (["ls-gpt.1"], False)


def test_a_sandbox_that_cannot_be_marked_is_ended(plan: SandboxPlan, start: Start) -> None:
    """Its disk is full, for one."""
    (plan.directory / sandbox_owner.OWNER).mkdir()
    sandbox = start("sleep", "60")
    with pytest.raises(IsADirectoryError):
        sandbox_owner.mark(sandbox)
    assert not sandbox.alive()


def test_a_sandbox_ends_behind_its_lock(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    locked: list[bool] = []
    end = sandboxes.end

    def look_and_end(sandbox: Sandbox) -> None:
        locked.append(network_lock.locked(sandbox.init))
        end(sandbox)

    here = RunningCapsule(SPEC, 3, OVERLAY, start("sleep", "60"))
    monkeypatch.setattr(sandboxes, "end", look_and_end)
    here.end_silently()
    assert not here.sandbox.alive()
    here.end_silently()
    assert locked == [True]


def test_a_sandbox_that_does_not_end_is_named(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = RunningCapsule(SPEC, 3, OVERLAY, start("sleep", "60"))
    monkeypatch.setattr(sandboxes, "end", lambda _: None)
    with pytest.raises(Refused, match=rf"gpt/1 cannot be ended: .*pid {here.sandbox.init}"):
        here.end_silently()


def test_the_note_of_a_capsule_has_its_number_of_rewinds(plan: SandboxPlan, start: Start) -> None:
    spec = CapsuleSpec("gpt/1", "gpt", 1, ["train"], {}, "/", 0, 0, [], "")
    RunningCapsule(spec, 3, Overlay(7, "10.99.7.0/24", 4), start("sleep", "60")).note()
    note = msgspec.msgpack.decode((plan.directory / NOTE).read_bytes(), type=CapsuleNote)
    assert (note.vni, note.rewinds) == (7, 4)
