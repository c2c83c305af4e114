# SPDX-License-Identifier: Apache-2.0
"""A job goes on from a directory that this orchestrator has never had. Jobs that have ended here:
test_ended_jobs_adopted.py."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from saved_scene import DISK, SavedScene, a_secret, saving

from liveshift.criu_glue.network.overlay import Overlay
from liveshift.errors import LiveshiftError, NotFound, WrongUsage
from liveshift.runtime import messages
from liveshift.runtime.control.signatures import Signatures, trust
from liveshift.runtime.journal.journal_file import JournalError
from liveshift.runtime.messages import CapsuleState
from liveshift.runtime.model.jobs import Job
from liveshift.runtime.model.snapshots import Generation
from liveshift.runtime.snapshot import saved_snapshot
from liveshift.runtime.snapshot.saved_snapshot import SavedCapsule, SavedSnapshot

__all__ = ["saving"]

SUBNET = "10.99.7.0/24"


def snapshot_of(scene: SavedScene, job: str = "gpt", name: str = "s17") -> SavedSnapshot:
    """As another orchestrator has saved it, with addresses that no job has here."""
    run = msgspec.structs.replace(scene.job.request, name=job)
    there = Job(job, Overlay(7, SUBNET), run, 1001, 0.0, {})
    generation = Generation(int(name[1:]), job, "step 9", 1000.0, 3, {}, {}, 500)
    saved = saved_snapshot.describe(scene.fleet.cluster, there, generation, {})
    capsules = {f"{job}/{n}": SavedCapsule(n, f"{name}.{n}", f"sum {n}") for n in range(2)}
    return msgspec.structs.replace(saved, capsules=capsules)


@pytest.fixture
def scene(saving: SavedScene) -> SavedScene:
    """With gpt in its directory."""
    saving.put(snapshot_of(saving))
    return saving


def of_gpt(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the scene is about that job."""
    monkeypatch.setattr(SavedScene, "job", property(adopted))


def adopted(scene: SavedScene) -> Job:
    return scene.fleet.jobs["gpt"]


async def ends(scene: SavedScene) -> None:
    scene.end_job()


def goes_on(scene: SavedScene) -> None:
    async def play() -> None:
        async with scene.at_work():
            await scene.adopt("gpt")
            await scene.until(lambda: adopted(scene).state == "running")

    asyncio.run(play())


# ---- a job that was never here -----------------------------------------------------------------


def test_a_job_that_was_never_here_goes_on(
    scene: SavedScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_gpt(monkeypatch)
    goes_on(scene)
    job = adopted(scene)
    assert (job.uid, job.overlay.subnet, job.overlay.vni) == (1001, SUBNET, 8)
    assert all(capsule.granted for capsule in job.capsules.values())
    assert {host for host, _ in scene.restored} == {c.host for c in job.capsules.values()}
    loads = {load.capsule: load for _, load in scene.loaded}
    assert {c: (load.saved, load.digest) for c, load in loads.items()} == {
        f"gpt/{n}": (f"s17.{n}", f"sum {n}") for n in range(2)
    }
    assert all(load.image.startswith("s18.") for load in loads.values()), "above the saved one"
    kinds = [e.kind for e in scene.fleet.journal.events("gpt", 0) if e.subject == "gpt"]
    assert kinds[0] == "adopted"
    assert "resumed" in kinds
    (text,) = [e.text for e in scene.fleet.journal.events("gpt", 0) if e.kind == "resumed"][-1:]
    assert "; its snapshot was " in text
    assert "suspended" not in text, "it was not"
    first = next(e for e in scene.fleet.journal.events("gpt", 0) if e.kind == "adopted")
    assert first.text.startswith(f"from s17 in {DISK}, which this cluster has saved: step 9 at ")
    assert first.by == "root"


def test_its_next_snapshots_have_names_that_the_directory_does_not_have(
    scene: SavedScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_gpt(monkeypatch)
    goes_on(scene)
    assert scene.fleet.journal.snapshots.begin_snapshot("gpt") > 17


def test_a_dry_run_changes_nothing(scene: SavedScene) -> None:
    before = scene.journal()

    async def play() -> None:
        would = await scene.adopt("gpt", dry_run=True)
        assert (would.job, would.snapshot, would.boundary) == ("gpt", "s17", "step 9")
        assert would.where.keys() == {"gpt/0", "gpt/1"}
        assert would.suspended_s == pytest.approx(time.time() - 1000.0, abs=60)

    asyncio.run(play())
    assert scene.journal() == before
    assert list(scene.fleet.jobs) == ["a"]
    assert {type(message) for _, message in scene.asks} == {messages.ReadManifest}


def refused(scene: SavedScene, name: str = "gpt", snapshot: str = "") -> LiveshiftError:
    """And nothing was changed."""
    before, jobs = scene.journal(), dict(scene.fleet.jobs)
    with pytest.raises(LiveshiftError) as error:
        asyncio.run(scene.adopt(name, snapshot))
    assert scene.journal() == before
    assert scene.fleet.jobs == jobs
    assert {type(message) for _, message in scene.asks} <= {messages.ReadManifest}
    return error.value


@pytest.mark.parametrize("name", ["../gpt", "gpt/0", "", ".", "GPT x", "/etc"])
def test_a_name_that_leads_elsewhere_is_refused(scene: SavedScene, name: str) -> None:
    assert isinstance(refused(scene, name), WrongUsage)
    assert scene.asks == []


@pytest.mark.parametrize("name", ["17", "s", "s0", "s017", "s-1", "../s17", "s17/../s1", "s17\n"])
def test_what_names_no_snapshot_is_refused(scene: SavedScene, name: str) -> None:
    error = refused(scene, snapshot=name)
    assert isinstance(error, WrongUsage)
    assert error.hint == "such as s17"
    assert scene.asks == []


def test_what_the_directory_does_not_have_is_not_found(scene: SavedScene) -> None:
    assert isinstance(refused(scene, snapshot="s16"), NotFound)
    assert isinstance(refused(scene, "bert"), NotFound)


def test_what_lies_under_another_name_is_refused(scene: SavedScene) -> None:
    data = scene.disk[DISK, "gpt", "s17"]
    scene.disk[DISK, "bert", "s17"] = scene.disk[DISK, "gpt", "s18"] = data
    assert refused(scene, "bert").message == f"{DISK} has s17 of gpt there"
    assert refused(scene, snapshot="s18").message == f"{DISK} has s17 of gpt there"


@pytest.mark.parametrize("odd", ["x", "s", "17", "s17.0", "../s17"])
def test_a_signed_name_that_is_none_is_refused(scene: SavedScene, odd: str) -> None:
    saved = msgspec.structs.replace(snapshot_of(scene), snapshot=odd)
    scene.disk = {(DISK, "gpt", "s17"): saved_snapshot.encode(saved, scene.signatures)}
    assert f"has {odd} of gpt there" in refused(scene).message


def test_another_clusters_job_goes_on_once_that_cluster_is_trusted(
    scene: SavedScene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Signatures(a_secret(tmp_path / "other"))
    scene.disk[DISK, "gpt", "s17"] = saved_snapshot.encode(snapshot_of(scene), other)
    assert f"`liveshift keys trust NAME {other.key}`" in (refused(scene).hint or "")
    trust(tmp_path / "keys", "west", other.key)
    of_gpt(monkeypatch)
    goes_on(scene)
    text = next(e.text for e in scene.fleet.journal.events("gpt", 0) if e.kind == "adopted")
    assert "which the cluster evacuation (trusted as west) has saved" in text


# ---- the name, the addresses, and room -----------------------------------------------------------


def test_the_name_of_a_job_that_has_not_ended_is_taken(scene: SavedScene) -> None:
    scene.put(snapshot_of(scene, "a"))
    error = refused(scene, "a")
    assert "a, which is running, has the name that its processes know" in error.message
    assert "`liveshift stop a`" in (error.hint or "")


@pytest.mark.parametrize("state", ["running", "suspended", "ending"])
def test_addresses_of_a_job_that_has_not_ended_are_taken(scene: SavedScene, state: str) -> None:
    scene.put(msgspec.structs.replace(snapshot_of(scene), subnet="10.99.0.0/24"))
    scene.job.state = state
    error = refused(scene)
    assert f"a, which is {state}, has the addresses 10.99.0.0/24" in error.message


def test_a_job_that_has_ended_makes_room_for_one_with_its_addresses(
    scene: SavedScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.put(msgspec.structs.replace(snapshot_of(scene), subnet="10.99.0.0/24"))
    asyncio.run(ends(scene))
    of_gpt(monkeypatch)
    goes_on(scene)
    assert list(scene.fleet.jobs) == ["gpt"]
    assert scene.asked("Forget"), "its devices are removed first"
    assert adopted(scene).overlay.vni == 1


@pytest.mark.parametrize("subnet", ["10.98.0.0/24", "10.99.0.0/25", "10.99.0.0/16", "11.0.0.0/24"])
def test_addresses_that_this_cluster_does_not_have_are_refused(
    scene: SavedScene, subnet: str
) -> None:
    scene.put(msgspec.structs.replace(snapshot_of(scene), subnet=subnet))
    error = refused(scene)
    assert f"its processes have addresses of {subnet}" in error.message
    assert "cluster.overlay must be what it was" in (error.hint or "")


def test_a_capsule_that_the_journal_does_not_know_is_refused(scene: SavedScene) -> None:
    scene.fleet.unknown["h1"] = [CapsuleState("old/0", 1, 2, 0, 40, 1.0, [0], "true", rewinds=0)]
    error = refused(scene)
    assert "h1 runs old/0, which the journal does not know" in error.message
    assert "`liveshift stop old --unknown h1`" in (error.hint or "")


def no_room(scene: SavedScene) -> None:
    scene.another_job({"h0": 3, "h1": 3, "h2": 4})


def nobody_up(scene: SavedScene) -> None:
    for host in scene.fleet.hosts.values():
        host.heard = 0.0


@pytest.mark.parametrize(
    ("change", "why"), [(no_room, "no host has room"), (nobody_up, "no host is up")]
)
def test_without_room_or_hosts_it_is_refused(
    scene: SavedScene, change: Callable[[SavedScene], None], why: str
) -> None:
    change(scene)
    assert why in refused(scene).message


# ---- the journal -------------------------------------------------------------------------------


@pytest.mark.parametrize("failing", ["begin_snapshot", "suspend", "complete_snapshot"])
def test_a_write_that_fails_leaves_nothing(
    scene: SavedScene, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    def full(*_: object, **__: object) -> None:
        raise JournalError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(scene.fleet.journal.snapshots, failing, full)
        assert "the disk is full" in refused(scene).message
    of_gpt(monkeypatch)
    goes_on(scene)


def test_a_restarted_orchestrator_has_the_adopted_job(
    scene: SavedScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies right after the write."""
    of_gpt(monkeypatch)

    async def dies() -> None:
        adopted = await scene.saved.adopt("root", "gpt", DISK, "", dry_run=False)
        assert isinstance(adopted, Job)

    async def resumes() -> None:
        async with scene.at_work():
            await scene.until(lambda: bool(suspended()))
            await scene.suspensions.resume("root", scene.job, dry_run=False)
            await scene.until(lambda: scene.job.state == "running")

    def suspended() -> list[str]:
        events = scene.fleet.journal.events("gpt", 0)
        return [event.text for event in events if event.kind == "suspended"]

    asyncio.run(dies())
    before = scene.job
    scene.restart()
    job = scene.job
    assert (job.state, job.uid, job.overlay, job.newest) == (
        "suspended",
        1001,
        before.overlay,
        before.newest,
    )
    assert {c.name: c.epoch for c in job.capsules.values()} == {
        c.name: c.epoch for c in before.capsules.values()
    }
    asyncio.run(resumes())
    assert f"is in {DISK}" in suspended()[0]


def test_it_does_not_need_the_host_that_has_read_of_it(
    scene: SavedScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That host dies before it has answered that it has no copy of the job."""
    of_gpt(monkeypatch)

    async def play() -> None:
        async with scene.at_work():
            scene.held["EndEarlier"] = asyncio.Event()
            await scene.saved.adopt("root", "gpt", DISK, "", dry_run=False)
            await scene.until(lambda: bool(scene.asked("EndEarlier")))
            (host,) = {capsule.host for capsule in scene.job.capsules.values()}
            scene.cut(host)
            await scene.until(lambda: not scene.fleet.is_up(host))
            scene.held.pop("EndEarlier").set()
            await scene.suspensions.resume("root", scene.job, dry_run=False)
            await scene.until(lambda: scene.job.state == "running")
            assert host not in {capsule.host for capsule in scene.job.capsules.values()}

    asyncio.run(play())
