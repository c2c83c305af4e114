# SPDX-License-Identifier: Apache-2.0
"""Who may ask the orchestrator for what: owners, roles, keys, root of a host; and refusals."""

from __future__ import annotations

import signal
from pathlib import Path

import msgspec
import pytest
from api_scene import (
    ADA,
    ALICE,
    BOB,
    CORDON,
    NINA,
    NOBODY,
    OTTO,
    TAINT,
    UNCORDON,
    UNTAINT,
    USERS,
    VERA,
    Scene,
    people,
    scene,
)

from liveshift.errors import NotFound, NotPermitted, Refused
from liveshift.runtime import messages
from liveshift.runtime.config.access import Principal, Role
from liveshift.runtime.journal.journal import Journal
from liveshift.runtime.messages import Message, RunJob

__all__ = ["people", "scene"]


# ---- the desk ----


def test_only_operators_may_call_a_host_dead(scene: Scene) -> None:
    """It says something about a host, and a job may train twice if it is wrong."""
    with pytest.raises(NotPermitted, match=r'may not rewind a: .*needs the role "operate"'):
        scene.here(ALICE, messages.RewindJob("a", "h1"))
    scene.here(OTTO, messages.RewindJob("a", "h1"))
    scene.key(Role.OPERATE, messages.RewindJob("a", "h1"))
    assert scene.stubs.told == ["rewind a h1", "rewind a h1"]


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
        (messages.RewindJob("a"), OPERATE),
        (messages.SuspendJob("a"), OPERATE),
        (messages.SuspendJob("a", dry_run=True), OPERATE),
        (messages.WithdrawOrder("a"), OPERATE),
        (messages.ResumeJob("a"), OPERATE),
        (messages.ResumeJob("a", dry_run=True), OPERATE),
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


@pytest.mark.parametrize("name", ["a/0", "a/nonsense", "a/"])
@pytest.mark.parametrize(
    "ask",
    [
        STOP,
        HUP,
        messages.RewindJob("a"),
        messages.SuspendJob("a"),
        messages.WithdrawOrder("a"),
        messages.ResumeJob("a"),
        messages.SnapshotJob("a", "/kept"),
    ],
)
def test_what_is_done_to_a_whole_job_takes_its_own_name(
    scene: Scene, ask: Message, name: str
) -> None:
    """Whoever stops a/0 does not mean a/1."""
    asked = msgspec.structs.replace(ask, job=name)
    for who in (ALICE, OTTO):
        with pytest.raises(NotFound, match=f'no job "{name}"') as caught:
            scene.here(who, asked)
        assert caught.value.hint == "the job is a: this is done to all of it"
    with pytest.raises(NotFound, match=f'no job "{name}"') as caught:
        scene.here(BOB, asked)
    assert caught.value.hint == "known jobs: b"
    assert scene.stubs.told == []


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
    scene.at("h1", 0, TAINT)
    scene.at("h1", 0, messages.SetTaint("h1", "hotter"))
    assert scene.fleet.taints["h1"] == ("hotter", "root@h1")
    scene.here(OTTO, messages.SetTaint("h1", "fails"))
    scene.fleet.deadlines["h1"] = 600.0
    with pytest.raises(NotPermitted, match="root@h1 may not untaint h1, which otto tainted"):
        scene.at("h1", 0, UNTAINT)
    with pytest.raises(NotPermitted, match="root@h1 may not taint h1, which otto tainted"):
        scene.at("h1", 0, TAINT)  # it would be its own to remove then
    assert scene.fleet.taints["h1"] == ("fails", "otto")
    assert scene.fleet.deadlines == {"h1": 600.0}
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


def test_nobody_uses_up_the_names_of_jobs_without_a_name(scene: Scene) -> None:
    """These would all have one name, and each would remove the output of the one before."""
    scene.here(NINA, RunJob("job999999999", 1, ["train"], {}, "/", 100, []))
    for who, name in ((ALICE, "job1"), (BOB, "job2"), (ALICE, "job3")):
        assert scene.here(who, RUN).name == name
        scene.fleet.jobs[name].state = "ended"
    assert {"job1", "job2", "job3"} <= set(scene.fleet.jobs)


def test_long_texts_do_not_fill_the_journal(scene: Scene) -> None:
    scene.here(ALICE, messages.Migrate("a/0", "h1", "x" * 5000, False))
    assert scene.stubs.told[-1] == f"move a/0 h1 {'x' * 1000}… by alice"
    scene.here(ALICE, RunJob("long", 1, ["x" * 5000], {}, "/", 100, []))
    assert len(scene.fleet.journal.events("long", 0)[0].text) < 1100


def test_no_text_of_a_person_is_obeyed_by_a_terminal_or_looks_like_another_line(
    scene: Scene,
) -> None:
    evil = "\x1b]0;owned\x07\x1b[2J\nINFO forged\x9b1m\u202e"
    harmless = "?]0;owned??[2J INFO forged?1m?"
    scene.here(ALICE, RunJob("esc", 1, ["true", evil], {}, "/", 100, []))
    scene.here(OTTO, messages.SetTaint("h1", evil))
    scene.here(ALICE, messages.Migrate("a/0", "h1", evil, False))
    assert scene.stubs.told[-1] == f"move a/0 h1 {harmless} by alice"
    scene.fleet.unknown["h0"] = [messages.CapsuleState(f"c{evil}/0", 1, 1, 0, 0, 0.0, [], evil)]
    shown = scene.here(OTTO, messages.GetStatus())
    assert shown.jobs[-1].command == f"true {harmless}"
    assert (shown.unknown[0].capsule, shown.unknown[0].command) == (f"c{harmless}/0", harmless)
    assert shown.hosts[1].taint == harmless
    scene.fleet.journal.add_event("h1", "moving", evil)  # such as an error of a host
    texts = [event.text for event in scene.here(OTTO, messages.GetEvents("", 0)).events]
    assert len(texts) == 7
    assert all(text.isprintable() for text in texts)


def test_long_command_lines_do_not_fill_the_status(scene: Scene) -> None:
    """Some dozen of them were more than a message may have, and operators saw nothing any more."""
    scene.here(ALICE, RunJob("long", 1, ["train", *["x" * 100_000] * 15], {}, "/", 100, []))
    seen = messages.CapsuleState("c/0", 1, 1, 0, 0, 0.0, [], "y" * 100_000)
    scene.fleet.unknown["h0"] = [seen]
    shown = scene.here(OTTO, messages.GetStatus())
    assert len(messages.encode_answer(1, shown)) < 10_000
    assert shown.jobs[-1].command == f"train {'x' * 994}…"


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
