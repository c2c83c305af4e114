# SPDX-License-Identifier: Apache-2.0
"""How harm is done to a migration or a snapshot, and healed.

A fault is a context manager. Entering does the harm, while a daemon is held at the point; the cell
then lets that daemon go on, and leaving heals, when the harm has lasted long enough.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Protocol, TypeVar

from lab_session import eventually
from whereabouts import GONE, every_pid, inner_pid, spaces

from liveshift.criu_glue.memory.store.store import INDEX_FILE
from liveshift.launcher import lab as labs
from liveshift.launcher.lab import Lab
from liveshift.launcher.lab.tasks import Task
from liveshift.runtime.messages import Status

from . import full, memory, wire
from .stage import LONGEST_S, SUSPICION_S


class Harmed(Protocol):
    """What a fault needs of a scene. ``capsule``: the name of the one that is harmed. ``stall_s``:
    how many seconds a daemon is stalled."""

    stall_s: float

    @property
    def lab(self) -> Lab: ...

    @property
    def capsule(self) -> str: ...

    def status(self) -> Status | None:
        """None while the orchestrator does not answer."""

    def is_over(self) -> bool:
        """Whether that which is harmed has come to its end, though the harm may last."""


S = TypeVar("S", bound=Harmed)
Fault = Callable[[S], AbstractContextManager[None]]
Who = Callable[[S], str]

CONTROL = "ctl"


def orchestrator(_: Harmed) -> str:
    return CONTROL


# ---- killed: at once, and started again as an init system would ----


def daemon_killed(who: Who[S]) -> Fault[S]:
    @contextmanager
    def fault(scene: S) -> Iterator[None]:
        labs.stop_daemon(scene.lab, who(scene))
        yield
        labs.start_daemon(scene.lab, who(scene))

    return fault


def image_used_up(who: Who[S]) -> Fault[S]:
    """An agent dies where its host had no memory for the image beside the tree: the
    next one finds the image without its pages (MemoryStore.free_after_copy removes the index)."""

    @contextmanager
    def fault(scene: S) -> Iterator[None]:
        init = scene.lab.machine(who(scene)).init
        assert init is not None
        images = Path(f"/proc/{init.pid}/root/run/liveshift/images")
        (index,) = images.glob(f"*/{INDEX_FILE}")
        index.unlink()
        with daemon_killed(who)(scene):
            yield

    return fault


def criu_killed(who: Who[S], verb: str) -> Fault[S]:
    """``verb``: dump or restore."""

    @contextmanager
    def fault(scene: S) -> Iterator[None]:
        found = [task for task in in_sandbox(scene, who(scene)) if _runs_criu(task.pid, verb)]
        assert found, f"no CRIU {verb}s {scene.capsule} on {who(scene)}"
        _kill(found)
        yield

    return fault


def capsule_killed(who: Who[S]) -> Fault[S]:
    """Process 1 of the capsule's sandbox, and with it all that is in the sandbox."""

    @contextmanager
    def fault(scene: S) -> Iterator[None]:
        found = [task for task in in_sandbox(scene, who(scene)) if inner_pid(task.pid) == 1]
        assert len(found) == 1, f"{scene.capsule} has {len(found)} sandboxes on {who(scene)}"
        _kill(found)
        yield

    return fault


def power_lost(who: Who[S]) -> Fault[S]:
    """The host and all that runs on it; booted when the orchestrator has missed it."""

    @contextmanager
    def fault(scene: S) -> Iterator[None]:
        host = who(scene)
        labs.kill_host(scene.lab, host)
        try:
            yield
            eventually(lambda: _missed(scene, host), f"{host} to be missed", 20)
            outlast(scene)
        finally:
            labs.boot_host(scene.lab, host)
            labs.start_daemon(scene.lab, host)

    return fault


# ---- cut ----


def cut_between(one: Who[S], other: Who[S]) -> Fault[S]:
    @contextmanager
    def fault(scene: S) -> Iterator[None]:
        labs.separate(scene.lab, one(scene), other(scene))
        try:
            yield
            outlast(scene)
        finally:
            labs.rejoin(scene.lab, one(scene), other(scene))

    return fault


def cut_off(who: Who[S]) -> Fault[S]:
    """The host's cable is out."""

    @contextmanager
    def fault(scene: S) -> Iterator[None]:
        labs.link(scene.lab, who(scene), cut=True)
        try:
            yield
            outlast(scene)
        finally:
            labs.link(scene.lab, who(scene), cut=False)

    return fault


# ---- stalled ----


def daemon_stalled(who: Who[S]) -> Fault[S]:
    @contextmanager
    def fault(scene: S) -> Iterator[None]:
        daemon = scene.lab.machine(who(scene)).daemon
        assert daemon is not None
        daemon.send(signal.SIGSTOP)
        try:
            yield
            time.sleep(scene.stall_s)  # the fault itself: this long nobody is at home
        finally:
            daemon.send(signal.SIGCONT)

    return fault


# ---- full ----


def images_full(who: Who[S]) -> Fault[S]:
    """A host's memory for images takes nothing more."""

    @contextmanager
    def fault(scene: S) -> Iterator[None]:
        init = scene.lab.machine(who(scene)).init
        assert init is not None
        with full.filled(Path("/run/liveshift/images"), inside=init.pid):
            yield
            outlast(scene)

    return fault


def state_full(who: Who[S]) -> Fault[S]:
    """A host's state directory takes nothing more."""

    @contextmanager
    def fault(scene: S) -> Iterator[None]:
        with full.filled(scene.lab.directory / who(scene) / "state"):
            yield
            outlast(scene)

    return fault


def out_of_memory(who: Who[S]) -> Fault[S]:
    """An agent, and what it starts from now on, get next to no memory."""

    @contextmanager
    def fault(scene: S) -> Iterator[None]:
        daemon = scene.lab.machine(who(scene)).daemon
        assert daemon is not None
        with memory.scarce(f"liveshift-{scene.lab.name}", [daemon.pid]) as failures:
            yield
            outlast(scene)
            assert failures() > 0, "the limit was never met"
        labs.start_daemon(scene.lab, who(scene))  # if it was the one to go

    return fault


def bits_flipped(who: Who[S]) -> Fault[S]:
    """In one packet of the image, on its way to a host."""

    @contextmanager
    def fault(scene: S) -> Iterator[None]:
        with wire.flipped(scene.lab, who(scene)) as hits:
            yield
            eventually(lambda: hits() > 0 or scene.is_over(), "a packet of the image", 30)
            assert hits() > 0, "no packet of the image came by"

    return fault


# ---- what they share ----


def outlast(scene: Harmed) -> None:
    """Let the harm last until that which is harmed is over, but longer than any host is waited for
    before it is suspected, and not for ever: some can only end once it is healed."""
    began = time.monotonic()

    def enough() -> bool:
        lasted = time.monotonic() - began
        return lasted > LONGEST_S or (lasted > 1.3 * SUSPICION_S and scene.is_over())

    eventually(enough, "the harm to have lasted", 2 * LONGEST_S)


def in_sandbox(scene: Harmed, host: str) -> list[Task]:
    """The processes in the capsule's sandbox on a host, process 1 and CRIU's own included."""
    init = scene.lab.machine(host).init
    assert init is not None, f"{host} does not run"
    home = os.stat(f"/proc/{init.pid}/ns/pid").st_ino
    sandboxes: set[int] = set()
    found: dict[int, list[int]] = {}
    for pid in every_pid():
        with suppress(*GONE):
            nested = spaces(pid)
            if len(nested) > 1 and nested[1] == home:
                found.setdefault(nested[0], []).append(pid)
                if inner_pid(pid) == 1 and _netns(scene.capsule) in _words(pid):
                    sandboxes.add(nested[0])
    tasks = (Task.of(pid) for space in sandboxes for pid in found[space])
    return [task for task in tasks if task is not None]


def _kill(tasks: list[Task]) -> None:
    for task in tasks:
        task.send(signal.SIGKILL)
    for task in tasks:
        assert task.wait(10), f"process {task.pid} does not end"


def _runs_criu(pid: int, verb: str) -> bool:
    with suppress(*GONE):
        words = _words(pid)
        return verb in words and any(os.path.basename(word) == "criu" for word in words)
    return False


def _words(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")


def _netns(capsule: str) -> str:
    return "/run/netns/ls-" + capsule.replace("/", ".")


def _missed(scene: Harmed, host: str) -> bool:
    status = scene.status()
    return status is not None and any(r.name == host and r.state != "up" for r in status.hosts)
