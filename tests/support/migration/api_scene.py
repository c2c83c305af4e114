# SPDX-License-Identifier: Apache-2.0
"""A desk that people ask: a machine's users, roles in the cluster file, two jobs on two hosts."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from liveshift.criu_glue.network.overlay import Overlay
from liveshift.runtime import messages
from liveshift.runtime.config import access
from liveshift.runtime.config import cluster as config
from liveshift.runtime.config.access import Role
from liveshift.runtime.control.keyring import Holder
from liveshift.runtime.fleet.fleet import Fleet
from liveshift.runtime.messages import Message, RunJob
from liveshift.runtime.migration.order import Order
from liveshift.runtime.model.jobs import Capsule, Job
from liveshift.runtime.orchestrator.api_server import ApiServer

CLUSTER = """
[cluster]
name = "prod"
orchestrator = "10.88.0.2:7400"
overlay = "10.99.0.0/16"
[hosts.h0]
address = "10.88.0.10"
slots = 4
[hosts.h1]
address = "10.88.0.11"
slots = 4
[paths]
state = "{state}"
[access]
view = ["vera", "@auditors"]
operate = ["otto", "@night"]
admin = ["ada"]
relayed = "{relayed}"
"""

ALICE, BOB, VERA, OTTO, ADA, NINA, NOBODY = 1001, 1002, 1003, 1004, 1005, 1006, 4242
USERS = {
    "root": 0,
    "alice": ALICE,
    "bob": BOB,
    "vera": VERA,
    "otto": OTTO,
    "ada": ADA,
    "nina": NINA,
}
GROUPS = {"users": 100, "auditors": 200, "night": 300}
MEMBERS = {"nina": [300, 200]}


TAINT, UNTAINT = messages.SetTaint("h1", "hot"), messages.Untaint("h1")
CORDON, UNCORDON = messages.Cordon("h1"), messages.Uncordon("h1")


@pytest.fixture(autouse=True)
def people(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine's users and groups."""

    def by_name(name: str) -> Any:
        return SimpleNamespace(pw_name=name, pw_gid=100, pw_uid=USERS[name])

    def by_uid(uid: int) -> Any:
        names = [name for name, number in USERS.items() if number == uid]
        if not names:
            raise KeyError(uid)
        return by_name(names[0])

    users = SimpleNamespace(getpwuid=by_uid, getpwnam=by_name)
    groups = SimpleNamespace(getgrnam=lambda name: SimpleNamespace(gr_gid=GROUPS[name]))
    lists = SimpleNamespace(getgrouplist=lambda name, gid: [gid, *MEMBERS.get(name, [])])
    for name, machine in (("pwd", users), ("grp", groups), ("os", lists)):
        monkeypatch.setattr(access, name, machine)


class Stubs:
    """What stands behind the desk; takes note of what it was told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def start(self, order: Order) -> Any:
        kind, to = "move", order.destination
        if order.is_swap and order.gpu is not None:
            kind, to = "swap", order.gpu.gpu
        self.told.append(f"{kind} {order.capsule.name} {to} {order.reason} by {order.by}")
        return SimpleNamespace(name="m1")

    async def plan(self, order: Order, within: float | None = None) -> Message:
        capsule = order.capsule
        return messages.Planned(capsule.name, capsule.host, order.destination, [], 0, 0)

    async def publish(self, job: Job) -> None:
        return None

    async def request(self, host: str, message: Message, timeout: float) -> Message | None:
        self.told.append(f"{type(message).__name__} {host}")
        if isinstance(message, messages.GetInspection):
            return messages.Inspection(message.capsule, host, [])
        return messages.Output(b"secret", 6, None)

    async def signal(self, job: Job, signum: int, by: str) -> None:
        self.told.append(f"signal {job.name} {signum}")

    def order(self, who: str, job: Job, lost: str, *, dry_run: bool) -> Message:
        self.told.append(f"rewind {job.name} {lost}".strip())
        return messages.RewindOrdered(job.name, "s7", "step 9", 1.0, {})

    def suspend(self, who: str, job: Job, *, to: str, dry_run: bool) -> Message:
        assert not to
        self.told.append(f"suspend {job.name} for {who}{' dry' if dry_run else ''}")
        return messages.SuspensionOrdered(job.name, {})

    def save(self, who: str, job: Job, to: str, *, dry_run: bool) -> Message:
        self.told.append(f"save {job.name} in {to} for {who}{' dry' if dry_run else ''}")
        return messages.SnapshotOrdered(job.name, {})

    def withdraw(self, who: str, job: Job) -> bool:
        self.told.append(f"withdraw {job.name} for {who}")
        return True

    async def resume_saved(
        self, who: str, name: str, source: str, snapshot: str, *, dry_run: bool
    ) -> Message:
        self.told.append(f"adopt {name} {snapshot} from {source} for {who}")
        return messages.ResumptionOrdered(name, "s7", "step 9", 1.0, {})

    async def resume(
        self, who: str, job: Job, *, source: str, snapshot: str, dry_run: bool
    ) -> Message:
        if source:
            self.told.append(f"resume {job.name} {snapshot} from {source} for {who}")
        else:
            self.told.append(f"resume {job.name} for {who}{' dry' if dry_run else ''}")
        return messages.ResumptionOrdered(job.name, "s7", "step 9", 1.0, {})

    async def forget(self, name: str, even_running: bool = False) -> None:
        self.told.append(f"forget {name}")
        if self.fleet.jobs.pop(name, None):
            self.fleet.journal.remove_job(name)

    def retry(self, host: str) -> None:
        self.told.append(f"retry {host}")

    def leave(self, capsule: Capsule) -> None:
        self.told.append(f"leave {capsule.name}")

    def wake(self) -> None:
        self.told.append("wake")

    fleet: Fleet


class Scene:
    """alice's job a on h0 and h1, bob's job b on h1; both hosts are up."""

    def __init__(self, state: Path, relayed: str = "user") -> None:
        text = CLUSTER.format(state=state, relayed=relayed)
        self.fleet = Fleet(config.parse(text).cluster)
        self.stubs = stubs = Stubs()
        stubs.fleet = self.fleet
        for name, uid, hosts in (("a", ALICE, ["h0", "h1"]), ("b", BOB, ["h1"])):
            self.job(name, uid, hosts)
        for host in self.fleet.hosts.values():
            host.heard = time.monotonic()
        self.api = ApiServer(self.fleet, *(cast(Any, stubs) for _ in range(10)))

    def job(self, name: str, uid: int, hosts: list[str]) -> Job:
        run = RunJob(name, len(hosts), ["train"], {}, "/", 100, [])
        capsules = {f"{name}/{i}": Capsule(f"{name}/{i}", i, h, 1) for i, h in enumerate(hosts)}
        owners = {c.name: (c.index, c.host) for c in capsules.values()}
        vni = max((j.overlay.vni for j in self.fleet.jobs.values()), default=0) + 1
        started, _ = self.fleet.journal.add_job(name, vni, f"10.99.{vni}.0/24", b"", owners)
        overlay = Overlay(vni, f"10.99.{vni}.0/24")
        made = self.fleet.jobs[name] = Job(name, overlay, run, uid, started, capsules)
        self.fleet.journal.add_event(name, "started", "on its hosts", "its owner")
        made.since = self.fleet.journal.last_event()
        self.fleet.journal.add_event(f"{name}/0", "moved", "h0 → h1", "somebody")
        return made

    def here(self, uid: int, ask: Message) -> Any:
        return asyncio.run(self.api.handle(uid, ask))

    def at(self, host: str, uid: int, ask: Message) -> Any:
        return asyncio.run(self.api.handle_relayed(host, uid, ask))

    def key(self, role: Role, ask: Message) -> Any:
        return asyncio.run(self.api.handle_operator(Holder("ops", role), ask))


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)
