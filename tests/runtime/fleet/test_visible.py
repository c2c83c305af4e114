# SPDX-License-Identifier: Apache-2.0
"""What people see of hosts, jobs, moves and events depends on who they are."""

from __future__ import annotations

import signal
import time
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from api_scene import (
    ADA,
    ALICE,
    BOB,
    CLUSTER,
    CORDON,
    NOBODY,
    OTTO,
    TAINT,
    UNCORDON,
    UNTAINT,
    VERA,
    Scene,
    people,
    scene,
)
from journal_rows import row

from liveshift.errors import NotFound, NotPermitted, Refused
from liveshift.runtime import messages
from liveshift.runtime.config import cluster as config
from liveshift.runtime.messages import RunJob
from liveshift.runtime.model.spares import HostView

__all__ = ["people", "scene"]


def shown(scene: Scene, uid: int) -> tuple[list[str], list[list[str]], list[int]]:
    status = scene.here(uid, messages.GetStatus())
    assert isinstance(status, messages.Status)
    hosts = [host.capsules for host in status.hosts]
    return [job.name for job in status.jobs], hosts, [host.used for host in status.hosts]


def test_status_shows_hosts_to_all_and_jobs_to_those_who_may_see_them(scene: Scene) -> None:
    assert shown(scene, ALICE) == (["a"], [["a/0"], ["a/1"]], [1, 2])
    assert shown(scene, BOB) == (["b"], [[], ["b/0"]], [1, 2])
    assert shown(scene, NOBODY) == ([], [[], []], [1, 2])
    for uid in (0, VERA, OTTO, ADA):
        assert shown(scene, uid) == (["a", "b"], [["a/0"], ["a/1", "b/0"]], [1, 2])


def test_a_status_looks_at_the_hosts_once_for_all_jobs(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a thousand hosts and jobs it would else stop the orchestrator for seconds."""
    looks, views = [], scene.fleet.views

    def counted() -> list[HostView]:
        looks.append(1)
        return views()

    monkeypatch.setattr(scene.fleet, "views", counted)
    for name in ("c", "d", "e"):
        scene.job(name, BOB, ["h0"])
    assert len(scene.here(OTTO, messages.GetStatus()).jobs) == 5
    assert len(looks) == 1


def test_a_status_of_one_job_has_nothing_of_others_but_what_hosts_run(scene: Scene) -> None:
    """Each foreground `run` asks for one each second, also in a cluster of a thousand hosts."""
    m7(scene, "preparing")
    scene.job("c", BOB, ["h0"])

    def of(job: str, uid: int) -> tuple[list[str], list[str], list[str]]:
        status = scene.here(uid, messages.GetStatus(job))
        jobs, hosts = [each.name for each in status.jobs], [each.name for each in status.hosts]
        return jobs, hosts, [move.name for move in status.moving]

    assert of("a", ALICE) == of("a", VERA) == (["a"], ["h0", "h1"], ["m7"])
    assert of("b", BOB) == of("b", OTTO) == (["b"], ["h1"], [])
    for uid, job in ((BOB, "a"), (NOBODY, "a"), (OTTO, "x"), (OTTO, "a/0")):
        assert of(job, uid) == ([], [], []), "not visible, or not there"
    (host,) = scene.here(VERA, messages.GetStatus("b")).hosts
    assert (host.capsules, host.used) == (["a/1", "b/0"], 3), "a/0 is on its way there"
    (host,) = scene.here(BOB, messages.GetStatus("b")).hosts
    assert (host.capsules, host.used) == (["b/0"], 3)
    scene.fleet.jobs["c"].state = "suspended"
    assert of("c", BOB) == (["c"], [], [])


def m7(scene: Scene, state: str, **more: object) -> messages.MigrationRow:
    """The fleet has m7 of a/0 under way; its row, which says ``state``."""
    found = msgspec.structs.replace(
        row(7, "a/0", state), source="h0", destination="h1", asked=time.time()
    )
    job = scene.fleet.jobs["a"]
    move = SimpleNamespace(
        name="m7",
        job=job,
        capsule=job.capsules["a/0"],
        source="h0",
        destination="h1",
        step="preparing",
        row=lambda: found,
        **more,
    )
    scene.fleet.migrations["m7"] = cast(Any, move)
    return found


def test_moves_are_shown_to_those_who_see_the_job(scene: Scene) -> None:
    known = m7(scene, "preparing")
    for uid, sees in ((ALICE, True), (VERA, True), (BOB, False)):
        assert [m.name for m in scene.here(uid, messages.GetStatus()).moving] == ["m7"] * sees
        if sees:
            assert scene.here(uid, messages.GetMigration("m7")).row == known
        else:
            with pytest.raises(NotPermitted, match="may not see m7: it is another user's"):
                scene.here(uid, messages.GetMigration("m7"))
    del scene.fleet.migrations["m7"]  # and when it is history
    scene.fleet.journal.save_migration(7, known)
    scene.fleet.journal.add_event("a/0", "move", "m7 begins", "root", 7)
    assert scene.here(ALICE, messages.GetMigration("m7")).row == known
    with pytest.raises(NotPermitted, match="may not see m7"):
        scene.here(BOB, messages.GetMigration("m7"))
    for strange in ("m²", "m" + "9" * 30, "m-1", "m"):
        with pytest.raises(NotFound):
            scene.here(ALICE, messages.GetMigration(strange))


def test_a_move_is_cancelled_by_its_owner_and_by_operators(scene: Scene) -> None:
    cancelled: list[str] = []
    known = m7(scene, "done", cancel=cancelled.append)
    ask = messages.Cancel("m7")
    for uid, what in ((BOB, "may not see m7"), (VERA, "may not cancel m7")):
        with pytest.raises(NotPermitted, match=what):
            scene.here(uid, ask)
    with pytest.raises(NotPermitted):
        scene.at("h1", 0, ask)  # root of another host
    assert cancelled == []
    for uid in (ALICE, OTTO, 0):
        scene.here(uid, ask)
    scene.at("h0", 0, ask)
    assert [by.split("@")[0] for by in cancelled] == ["alice", "otto", "root", "root"]
    assert scene.stubs.told.count("leave a/0") == 4, "its evacuation does not begin anew"
    del scene.fleet.migrations["m7"]
    scene.fleet.journal.save_migration(7, known)
    scene.fleet.journal.add_event("a/0", "move", "m7 begins", "root", 7)
    with pytest.raises(Refused, match="m7 is over: done"):
        scene.here(ALICE, ask)


def test_events_are_of_hosts_and_of_jobs_that_one_may_see(scene: Scene) -> None:
    scene.here(OTTO, TAINT)

    def subjects(uid: int) -> list[str]:
        return [e.subject for e in scene.here(uid, messages.GetEvents("", 0)).events]

    assert subjects(VERA) == ["a", "a/0", "b", "b/0", "h1"]
    assert subjects(ALICE) == ["a", "a/0", "h1"]
    assert subjects(NOBODY) == ["h1"]
    assert [e.subject for e in scene.here(BOB, messages.GetEvents("h1", 0)).events] == ["h1"]
    with pytest.raises(NotFound, match='nothing is known of "%"'):
        scene.here(BOB, messages.GetEvents("%", 0))


def test_what_is_told_is_a_sentence(scene: Scene) -> None:
    for ask in (TAINT, UNTAINT, CORDON, UNCORDON):
        scene.here(OTTO, ask)
    told = [(e.kind, e.text, e.by) for e in scene.fleet.journal.events("h1", 0)]
    assert told == [
        ("tainted", "tainted: hot", "otto"),
        ("untainted", "untainted", "otto"),
        ("cordoned", "cordoned", "otto"),
        ("uncordoned", "uncordoned", "otto"),
    ]
    name = scene.here(BOB, RunJob("", 2, ["train", "--fast"], {}, "/", 100, [])).name
    (event,) = scene.fleet.journal.events(name, 0)
    hosts = ", ".join(capsule.host for capsule in scene.fleet.jobs[name].capsules.values())
    assert (event.kind, event.text) == ("started", f"started on {hosts}: train --fast")
    assert event.by == "bob"


def test_the_events_of_a_host_have_the_moves_from_it_and_to_it(scene: Scene) -> None:
    journal = scene.fleet.journal
    for number, (source, destination) in enumerate([("h0", "h1"), ("h1", "h0")], 1):
        made = msgspec.structs.replace(row(number, "a/0"), source=source, destination=destination)
        journal.save_migration(number, made)
        journal.add_event("a/0", "moved", f"moved {source} → {destination}", "root", number)
    for host in ("h0", "h1"):
        told = [event.text for event in scene.here(OTTO, messages.GetEvents(host, 0)).events]
        assert told == ["moved h0 → h1", "moved h1 → h0"]
    assert scene.here(BOB, messages.GetEvents("h0", 0)).events == [], "the job is not Bob's"


def test_the_nearest_host_is_suggested() -> None:
    text = CLUSTER.format(state="/x", relayed="user").replace("hosts.h1", "hosts.node-21")
    with pytest.raises(NotFound, match='no host "node-12"') as caught:
        config.parse(text).cluster.host("node-12")
    assert caught.value.hint == "did you mean node-21? its hosts are: h0, node-21"


def test_the_next_owner_of_a_name_does_not_see_what_was_before(scene: Scene) -> None:
    del scene.fleet.jobs["a"]
    scene.fleet.journal.remove_job("a")
    assert scene.here(ALICE, messages.GetEvents("", 0)).events == [], "whose it was is forgotten"
    scene.job("a", BOB, ["h0"])
    told = scene.here(BOB, messages.GetEvents("a", 0)).events
    assert [e.subject for e in told] == ["a", "a/0"]
    assert len(scene.here(VERA, messages.GetEvents("a", 0)).events) == 4


def test_a_clock_that_is_set_back_hides_nothing_from_the_owner_and_shows_no_more(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else Alice would not see her own events, and Bob would see those of Alice's earlier job."""
    day_before = time.time() - 86_400
    monkeypatch.setattr(time, "time", lambda: day_before)
    scene.fleet.journal.save_migration(7, row(7, "a/0"))
    scene.fleet.journal.add_event("a/0", "move", "m7 begins", "root", 7)
    seen = scene.here(ALICE, messages.GetEvents("a", 0)).events
    assert [e.kind for e in seen] == ["started", "moved", "move"]
    assert scene.here(ALICE, messages.GetMigration("m7")).row == row(7, "a/0")
    del scene.fleet.jobs["a"]
    scene.fleet.journal.remove_job("a")
    scene.job("a", BOB, ["h0"])
    told = scene.here(BOB, messages.GetEvents("a", 0)).events
    assert [e.kind for e in told] == ["started", "moved"]
    with pytest.raises(NotPermitted, match="may not see m7"):
        scene.here(BOB, messages.GetMigration("m7"))


def test_an_unknown_job_names_only_those_one_may_see(scene: Scene) -> None:
    for uid, known in ((ALICE, "a"), (BOB, "b"), (VERA, "a, b"), (NOBODY, "none")):
        with pytest.raises(NotFound, match='no job "x"') as caught:
            scene.here(uid, messages.SignalJob("x", signal.SIGTERM))
        assert caught.value.hint == f"known jobs: {known}"


def test_a_signal_to_a_job_that_has_ended_is_not_noted(scene: Scene) -> None:
    """Its owner could fill the history, with a write to the disk for each."""
    ask = messages.SignalJob("a", signal.SIGTERM)
    for state, notes in (("running", 1), ("ended", 1)):
        scene.fleet.jobs["a"].state = state
        scene.here(ALICE, ask)
        kinds = [event.kind for event in scene.fleet.journal.events("a", 0)]
        assert kinds.count("signal") == notes
