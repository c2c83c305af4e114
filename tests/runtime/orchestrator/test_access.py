# SPDX-License-Identifier: Apache-2.0
"""Who may do what: roles from the cluster file and keys, asks at the desk, and refusals."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from api_scene import (
    ADA,
    ALICE,
    BOB,
    CLUSTER,
    NINA,
    NOBODY,
    OTTO,
    USERS,
    VERA,
    Scene,
    people,
    scene,
)
from journal_rows import row

from liveshift.errors import LiveshiftError, NotFound, NotPermitted, Refused
from liveshift.runtime import messages
from liveshift.runtime.config import cluster as config
from liveshift.runtime.config.access import Principal, Role, Roles
from liveshift.runtime.messages import Message, RunJob
from liveshift.runtime.orchestrator.journal import Journal

__all__ = ["people", "scene"]


def rules(relayed: str = "user") -> config.Access:
    return config.parse(CLUSTER.format(state="/x", relayed=relayed)).cluster.access


# ---- roles ----


def test_roles_include_one_another() -> None:
    order = [Role.NOTHING, Role.USER, Role.VIEW, Role.OPERATE, Role.ADMIN]
    for n, role in enumerate(order):
        assert [role.covers(other) for other in order] == [m <= n for m in range(len(order))]


@pytest.mark.parametrize(
    ("uid", "role", "why"),
    [
        (0, Role.ADMIN, "root"),
        (ALICE, Role.USER, "every user's"),
        (VERA, Role.VIEW, 'access.view lists "vera"'),
        (OTTO, Role.OPERATE, 'access.operate lists "otto"'),
        (ADA, Role.ADMIN, 'access.admin lists "ada"'),
        (NINA, Role.OPERATE, 'access.operate lists "@night"'),  # and an auditor: the higher counts
        (NOBODY, Role.USER, "every user's"),  # of no name here
    ],
)
def test_where_a_users_role_comes_from(uid: int, role: Role, why: str) -> None:
    who = Roles(rules()).local(uid)
    assert (who.role, who.why) == (role, why)
    assert who.name == next((name for name, number in USERS.items() if number == uid), str(uid))


def test_without_entries_only_root_is_more_than_a_user() -> None:
    roles = Roles(config.Access())
    assert [roles.local(u).role for u in (0, ALICE, ADA)] == [Role.ADMIN, Role.USER, Role.USER]


@pytest.mark.parametrize(
    ("relayed", "expected"),
    [
        ("user", {0: "user", ALICE: "user", VERA: "user", OTTO: "user", ADA: "user"}),
        ("view", {0: "view", ALICE: "user", VERA: "view", OTTO: "view", ADA: "view"}),
        ("operate", {0: "operate", ALICE: "user", VERA: "view", OTTO: "operate", ADA: "operate"}),
        ("admin", {0: "admin", ALICE: "user", VERA: "view", OTTO: "operate", ADA: "admin"}),
    ],
)
def test_what_an_agent_says_counts_as_far_as_configured(
    relayed: str, expected: dict[int, str]
) -> None:
    roles = Roles(rules(relayed))
    assert {uid: roles.relayed("h1", uid).role.value for uid in expected} == expected
    root = roles.relayed("h1", 0)
    assert (root.rules, root.squashed) == (
        "h1" if relayed in ("user", "view") else None,
        relayed != "admin",
    )
    assert roles.relayed("h1", ALICE).shown == "alice@h1"


def test_an_agent_may_count_for_nothing() -> None:
    for uid in (0, ALICE, ADA):
        with pytest.raises(NotPermitted, match=r'@h1 may request nothing: access.relayed .* "noth'):
            Roles(rules("nothing")).relayed("h1", uid)


def test_names_that_nobody_has_are_told(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    del USERS["vera"]
    try:
        Scene(tmp_path)
    finally:
        USERS["vera"] = VERA
    assert 'access: this machine knows no "vera"' in caplog.text


@pytest.mark.parametrize(
    ("entry", "fits"),
    [
        ("alice", True),
        ("@ops", True),
        ("EXAMPLE\\alice", True),
        ("alice@example.org", True),
        ("svc_1$", True),
        ("", False),
        ("@", False),
        ("@@ops", False),
        ("a b", False),
        ("a:b", False),
        ("a,b", False),
        (7, False),
    ],
)
def test_what_can_be_an_entry(entry: object, fits: bool) -> None:
    text = CLUSTER.format(state="/x", relayed="user").replace('["ada"]', config.toml_value([entry]))
    if fits:
        assert config.parse(text).cluster.access.admin == (entry,)
        return
    with pytest.raises(LiveshiftError, match=r"access.admin\[0\]: found .* expected the name of"):
        config.parse(text)


def test_a_word_that_is_no_role() -> None:
    with pytest.raises(LiveshiftError, match='"nothing", "user", "view", "operate" or "admin"'):
        rules("root")


# ---- the desk ----


TAINT, UNTAINT = messages.SetTaint("h1", "hot"), messages.Untaint("h1")
CORDON, UNCORDON = messages.Cordon("h1"), messages.Uncordon("h1")
MOVE = messages.Migrate("a/0", "h1", "", False)
SWAP = messages.Migrate("a/0", "", "", False, "h0/5")
STOP, HUP = messages.SignalJob("a", signal.SIGTERM), messages.SignalJob("a", signal.SIGHUP)
READ = messages.ReadOutput("a/0", 0, 0)
EVENTS = messages.GetEvents("a", 0)
INSPECT = messages.GetInspection("a/0")
RUN = RunJob("", 1, ["train"], {}, "/", 100, [])

OWNER, VIEW, OPERATE, ADMIN = "owner", Role.VIEW, Role.OPERATE, Role.ADMIN


@pytest.mark.parametrize(
    ("ask", "needs"),
    [
        (EVENTS, VIEW),
        (INSPECT, VIEW),
        (messages.GetEvents("a/0", 0), VIEW),
        (MOVE, OPERATE),
        (SWAP, OPERATE),
        (STOP, OPERATE),
        (messages.SignalJob("a", signal.SIGKILL), OPERATE),
        (HUP, ADMIN),
        (READ, ADMIN),
    ],
)
def test_a_job_is_its_owners_and_those_with_the_role(
    scene: Scene, ask: Message, needs: Role
) -> None:
    scene.here(ALICE, ask)
    scene.at("h1", ALICE, ask)
    scene.here(0, ask)
    able = {BOB: Role.USER, VERA: VIEW, OTTO: OPERATE, NINA: OPERATE, ADA: ADMIN}
    for uid, role in able.items():
        if role.covers(needs):
            scene.here(uid, ask)
            scene.key(role, ask)
            continue
        done = list(scene.stubs.told)
        with pytest.raises(NotPermitted, match=f'that needs the role "{needs}", and') as caught:
            scene.here(uid, ask)
        name = next(n for n, number in USERS.items() if number == uid)
        assert str(caught.value).startswith(f"{name} may not ")
        assert "access." in (caught.value.hint or "")
        if role is not Role.USER:
            with pytest.raises(NotPermitted, match=r"^ops \(key\) may not ") as caught:
                scene.key(role, ask)
            assert "keys add-operator" in (caught.value.hint or "")
        assert scene.stubs.told == done, "nothing was done"


@pytest.mark.parametrize("ask", [TAINT, UNTAINT, CORDON, UNCORDON])
def test_hosts_are_for_operators(scene: Scene, ask: Message) -> None:
    scene.fleet.taints["h1"] = ("hot", "root")
    for uid in (ALICE, VERA):
        with pytest.raises(NotPermitted, match='h1: that needs the role "operate"'):
            scene.here(uid, ask)
    with pytest.raises(NotPermitted):
        scene.key(VIEW, ask)
    assert not scene.stubs.told
    scene.here(OTTO, ask)
    assert scene.fleet.journal.events("h1", 0)[-1].by == "otto"


def test_an_operators_key_does_what_its_role_says_and_is_named(scene: Scene) -> None:
    scene.key(OPERATE, TAINT)
    assert scene.fleet.taints["h1"] == ("hot", "ops (key)")
    scene.key(OPERATE, MOVE)
    assert scene.stubs.told[-1] == "move a/0 h1 asked for by ops (key)"


@pytest.mark.parametrize("role", [VIEW, OPERATE, ADMIN])
def test_a_key_runs_no_job(scene: Scene, role: Role) -> None:
    with pytest.raises(NotPermitted, match=r"it runs as a user of the hosts, .* and a key is none"):
        scene.key(role, RUN)


# ---- root of a host ----


def test_root_of_a_host_rules_that_host_and_no_other(scene: Scene) -> None:
    scene.job("c", BOB, ["h0"])
    scene.at("h1", 0, TAINT)
    assert scene.fleet.taints["h1"] == ("hot", "root@h1")
    scene.at("h1", 0, UNTAINT)
    scene.at("h1", 0, messages.Migrate("a/1", "h0", "", False))  # off h1
    scene.at("h1", 0, EVENTS)
    status = scene.at("h1", 0, messages.GetStatus())
    assert [job.name for job in status.jobs] == ["a", "b"], "what runs there"
    for ask in (
        messages.SetTaint("h0", "mine"),
        messages.Untaint("h0"),
        MOVE,
        STOP,
        HUP,
        READ,
        messages.GetEvents("c", 0),
        messages.Migrate("c/0", "h1", "", False),
    ):
        with pytest.raises(NotPermitted, match=r"^root@h1 may not .* root has \"admin\", but"):
            scene.at("h1", 0, ask)


def test_root_of_a_host_takes_back_its_own_taint_only(scene: Scene) -> None:
    scene.here(OTTO, TAINT)
    with pytest.raises(NotPermitted, match="root@h1 may not untaint h1, which otto tainted"):
        scene.at("h1", 0, UNTAINT)
    scene.here(OTTO, CORDON)
    with pytest.raises(NotPermitted, match="root@h1 may not uncordon h1, which otto cordoned"):
        scene.at("h1", 0, UNCORDON)
    assert "h1" in scene.fleet.taints
    assert scene.fleet.cordons == {"h1": "otto"}


def test_a_cordon_lasts_over_a_restart_and_ends_with_the_taint(scene: Scene) -> None:
    for _ in range(2):  # the second changes nothing
        scene.here(OTTO, CORDON)
    assert scene.fleet.taints == {}
    path = scene.fleet.cluster.paths.state / "journal.sqlite"
    assert Journal(path).cordons() == {"h1": "otto"}
    views = {view.name: view for view in scene.fleet.views()}
    assert (views["h1"].cordoned, views["h0"].cordoned) == (True, False)
    (row,) = [row for row in scene.here(OTTO, messages.GetStatus()).hosts if row.name == "h1"]
    assert (row.cordon, row.taint) == ("otto", None)
    scene.here(OTTO, TAINT)
    scene.here(OTTO, UNTAINT)
    assert scene.fleet.cordons == {"h1": "otto"}, "it is no taint"
    scene.here(OTTO, TAINT)
    scene.here(OTTO, UNCORDON)
    assert (scene.fleet.cordons, scene.fleet.taints) == ({}, {})
    again = Journal(path)
    assert (again.cordons(), again.taints()) == ({}, {})
    told = [event.kind for event in scene.fleet.journal.events("h1", 0)]
    assert told == [
        *("cordoned", "tainted", "untainted", "tainted", "uncordoned", "untainted"),
    ]
    for ask in (UNTAINT, UNCORDON):  # nothing to take away: done, and nothing told
        scene.here(OTTO, ask)
    assert len(scene.fleet.journal.events("h1", 0)) == 6


def test_root_of_a_host_is_not_root_elsewhere(scene: Scene) -> None:
    """Neither does it own root's jobs, nor may it start one that would run as root on others."""
    scene.job("r", 0, ["h0"])
    for ask in (messages.ReadOutput("r/0", 0, 0), messages.Migrate("r/0", "h1", "", False)):
        with pytest.raises(NotPermitted):
            scene.at("h1", 0, ask)
    with pytest.raises(NotPermitted, match="may not run a job as root on other hosts") as caught:
        scene.at("h1", 0, RUN)
    assert 'access.relayed = "admin"' in (caught.value.hint or "")


def test_a_user_with_a_role_is_told_why_it_does_not_count_through_an_agent(scene: Scene) -> None:
    with pytest.raises(NotPermitted) as caught:
        scene.at("h1", OTTO, TAINT)
    assert str(caught.value) == (
        'otto@h1 may not taint h1: that needs the role "operate", and otto has "operate", but'
        ' through an agent it counts as "user"'
    )
    assert 'access.relayed = "operate"' in (caught.value.hint or "")


def test_trusted_agents(tmp_path: Path) -> None:
    scene = Scene(tmp_path, "admin")
    scene.at("h1", OTTO, TAINT)
    scene.at("h1", 0, messages.SetTaint("h0", "all of it"))
    scene.at("h1", 0, READ)
    scene.at("h1", 0, UNTAINT)
    assert scene.at("h1", 0, RUN).name == "job1"
    assert scene.fleet.jobs["job1"].uid == 0


# ---- what is shown ----


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


def test_moves_are_shown_to_those_who_see_the_job(scene: Scene) -> None:
    job = scene.fleet.jobs["a"]
    row = messages.MigrationRow(
        "m7",
        "a/0",
        "h0",
        "h1",
        "why",
        "root",
        1,
        "preparing",
        time.time(),
        0,
        0,
        0,
        0,
        0,
        0,
        [],
        None,
        None,
    )
    move = SimpleNamespace(
        name="m7",
        job=job,
        capsule=job.capsules["a/0"],
        source="h0",
        destination="h1",
        step="preparing",
        row=lambda: row,
    )
    scene.fleet.moves["m7"] = cast(Any, move)
    for uid, sees in ((ALICE, True), (VERA, True), (BOB, False)):
        assert [m.name for m in scene.here(uid, messages.GetStatus()).moving] == ["m7"] * sees
        if sees:
            assert scene.here(uid, messages.GetMigration("m7")).row == row
        else:
            with pytest.raises(NotPermitted, match="may not see m7: it is another user's"):
                scene.here(uid, messages.GetMigration("m7"))
    del scene.fleet.moves["m7"]  # and when it is history
    scene.fleet.journal.save_migration(7, row)
    assert scene.here(ALICE, messages.GetMigration("m7")).row == row
    with pytest.raises(NotPermitted, match="may not see m7"):
        scene.here(BOB, messages.GetMigration("m7"))
    for strange in ("m²", "m" + "9" * 30, "m-1", "m"):
        with pytest.raises(NotFound):
            scene.here(ALICE, messages.GetMigration(strange))


def test_a_move_is_cancelled_by_its_owner_and_by_operators(scene: Scene) -> None:
    job = scene.fleet.jobs["a"]
    cancelled: list[str] = []
    row = messages.MigrationRow(
        "m7",
        "a/0",
        "h0",
        "h1",
        "why",
        "root",
        1,
        "done",
        time.time(),
        0,
        0,
        0,
        0,
        0,
        0,
        [],
        None,
        None,
    )
    move = SimpleNamespace(
        name="m7",
        job=job,
        capsule=job.capsules["a/0"],
        source="h0",
        destination="h1",
        step="preparing",
        row=lambda: row,
        cancel=cancelled.append,
    )
    scene.fleet.moves["m7"] = cast(Any, move)
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
    del scene.fleet.moves["m7"]
    scene.fleet.journal.save_migration(7, row)
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
    assert {e.subject for e in scene.here(BOB, messages.GetEvents("%", 0)).events} <= {"b/0"}


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
        journal.tell("a/0", "moved", f"moved {source} → {destination}", "root", number)
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


def test_an_unknown_job_names_only_those_one_may_see(scene: Scene) -> None:
    for uid, known in ((ALICE, "a"), (BOB, "b"), (VERA, "a, b"), (NOBODY, "none")):
        with pytest.raises(NotFound, match='no job "x"') as caught:
            scene.here(uid, messages.SignalJob("x", signal.SIGTERM))
        assert caught.value.hint == f"known jobs: {known}"


# ---- running ----


def test_a_users_groups_must_be_their_own(scene: Scene) -> None:
    scene.here(NINA, RunJob("", 1, ["train"], {}, "/", 100, [200, 300]))
    with pytest.raises(NotPermitted, match="alice may not run a job with the groups 0, 300"):
        scene.here(ALICE, RunJob("", 1, ["train"], {}, "/", 0, [100, 300]))
    with pytest.raises(NotPermitted, match="knows no user 4242"):
        scene.at("h0", NOBODY, RUN)
    with pytest.raises(NotPermitted, match="knows no user -1"):
        scene.at("h0", -1, RUN)


def test_the_output_of_an_ended_job_is_not_another_users_to_remove(scene: Scene) -> None:
    scene.fleet.jobs["a"].state = scene.job("job1", ALICE, ["h0"]).state = "ended"
    with pytest.raises(Refused, match='"a" is another user\'s job'):
        scene.here(BOB, RunJob("a", 1, ["train"], {}, "/", 100, []))
    assert scene.here(BOB, RUN).name == "job2"
    assert "forget a" not in scene.stubs.told
    assert "forget job1" not in scene.stubs.told
    assert scene.here(ALICE, RunJob("a", 1, ["train"], {}, "/", 100, [])).name == "a"


def test_long_texts_do_not_fill_the_journal(scene: Scene) -> None:
    scene.here(ALICE, messages.Migrate("a/0", "h1", "x" * 5000, False))
    assert scene.stubs.told[-1] == f"move a/0 h1 {'x' * 1000}… by alice"
    scene.here(ALICE, RunJob("long", 1, ["x" * 5000], {}, "/", 100, []))
    assert len(scene.fleet.journal.events("long", 0)[0].text) < 1100


@pytest.mark.parametrize("wait", [float("nan"), float("inf"), -1.0, 1e300])
def test_a_wait_of_any_length_is_bounded(scene: Scene, wait: float) -> None:
    assert scene.here(ALICE, messages.ReadOutput("a/0", 0, wait)).data == b"secret"


@pytest.mark.parametrize("number", [0, -9, 65, 10**30])
def test_a_number_that_is_no_signal(scene: Scene, number: int) -> None:
    with pytest.raises(Refused, match="there is no signal"):
        scene.here(ALICE, messages.SignalJob("a", number))


@pytest.mark.parametrize(
    "ask", [messages.Heartbeat("h0", 1, []), messages.Relay(0, b""), messages.Here(1)]
)
def test_what_is_for_agents_is_not_for_people(scene: Scene, ask: Message) -> None:
    with pytest.raises(NotPermitted, match="is not for the command line"):
        scene.here(0, ask)


# ---- who am I ----


def test_who_am_i(scene: Scene) -> None:
    me = scene.here(OTTO, messages.WhoAmI())
    assert (me.name, me.role, me.uid, me.through) == ("otto", "operate", OTTO, "")
    assert me.why == 'access.operate lists "otto"'
    assert [text.split()[0] for text in me.may] == ["run", "see", "cordon,"]
    assert me.shared == [str(path) for path in scene.fleet.cluster.files.shared]
    root = scene.at("h1", 0, messages.WhoAmI())
    assert (root.name, root.role, root.through) == ("root", "user", "h1")
    assert root.may == ["cordon and taint h1, see what runs there, move it off"]
    key = scene.key(VIEW, messages.WhoAmI())
    assert (key.name, key.uid, key.may) == ("ops", None, ["see everybody's jobs, moves and events"])
    assert Principal("x", Role.USER, "", ALICE).rights() != []
