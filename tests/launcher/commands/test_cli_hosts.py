# SPDX-License-Identifier: Apache-2.0
"""`liveshift taint`, `drain`, `migrate` and `stop`."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest
from cli_harness import Call, Starter, ended

from liveshift.errors import LiveshiftError, Refused
from liveshift.runtime.cost.words import in_words
from liveshift.runtime.messages import (
    Cordon,
    Departing,
    Evacuating,
    GetMigration,
    GetStatus,
    Migrate,
    PlanEvacuation,
    RunJob,
    SetTaint,
    Untaint,
)


@pytest.mark.parametrize("words", [("host", "h1"), ("h1",)])
def test_taint_says_what_will_move(gpt: Any, call: Call, words: tuple[str, ...]) -> None:
    assert call("taint", *words, "--reason", "ECC") == (
        0,
        "h1 is tainted: gpt/1 will move to a spare\n",
        "",
    )
    assert gpt.wait_for(SetTaint) == SetTaint("h1", "ECC")


SOON = Evacuating(
    "h1",
    30.0,
    41.5,
    False,
    [
        Departing("gpt/1", 12.0, False, 0.9, at_most_s=18.3),
        Departing("gpt/2", 41.5, True, at_most_s=62.6),
    ],
)


def test_a_deadline_that_will_be_missed_is_said_at_once(gpt: Any, call: Call) -> None:
    gpt.evacuating = SOON
    code, out, _ = call("taint", "h1", "--within", "30s")
    assert code == 124
    assert out.splitlines()[1:] == [
        "h1 will be empty after about 41.5 s, one by one",
        "gpt/2 may not be gone in time: it needs up to 62.6 s, of 30 s",
    ]
    assert gpt.wait_for(SetTaint) == SetTaint("h1", "by hand", 30.0)


def test_scripts_read_of_a_deadline_and_a_severity_is_passed_on(gpt: Any, call: Call) -> None:
    gpt.evacuating = SOON
    code, out, _ = call("taint", "h1", "--severity", "notice", "-o", "json")
    assert code == 124
    found = json.loads(out)["deadline"]
    assert (found["within"], found["empty_s"], found["together"]) == (30.0, 41.5, False)
    assert [each["late"] for each in found["capsules"]] == [False, True]
    assert gpt.wait_for(SetTaint) == SetTaint("h1", "by hand", 0.0, "notice")


def test_a_move_is_asked_for_by_a_way_or_within_a_time_not_both(gpt: Any, call: Call) -> None:
    assert call("migrate", "gpt/1", "--way", "stop")[0] == 0
    assert gpt.wait_for(Migrate).way == "stop"
    assert call("migrate", "gpt/1", "--way", "stop", "--within", "30s")[0] == 2
    assert call("migrate", "gpt/1", "--way", "fast")[0] == 2


@pytest.mark.parametrize("words", [("untaint", "host", "h1"), ("untaint", "h1")])
def test_untaint(gpt: Any, call: Call, words: tuple[str, ...]) -> None:
    gpt.hosts["h1"].taint = "x"
    assert call(*words) == (0, "h1 is untainted: it takes work\n", "")
    assert gpt.wait_for(Untaint) == Untaint("h1")
    assert call(*words) == (0, "h1 is not tainted: it takes work\n", "")


def test_a_cordon_keeps_work_away_and_moves_nothing(gpt: Any, call: Call) -> None:
    said = "h1 is cordoned: no new work comes to it; gpt/1 may stay\n"
    assert call("cordon", "h1") == (0, said, "")
    assert gpt.wait_for(Cordon) == Cordon("h1")
    assert gpt.moves == {}
    assert "up, cordoned" in call("status")[1]
    assert json.loads(call("status", "-o", "json")[1])["hosts"][1]["cordon"] == "root"
    said = "h1 is not tainted: it stays cordoned: `liveshift uncordon h1` ends that\n"
    assert call("untaint", "h1") == (0, said, "")
    assert call("uncordon", "h1") == (0, "h1 is uncordoned: it takes work\n", "")
    assert "cordoned" not in call("status")[1]


def test_uncordon_ends_what_a_drain_leaves(gpt: Any, call: Call) -> None:
    assert call("drain", "h2")[0] == 0
    assert call("uncordon", "h2") == (0, "h2 is untainted: it takes work\n", "")
    said = "h2 is neither cordoned nor tainted: it takes work\n"
    assert call("uncordon", "h2") == (0, said, "")


def test_a_drain_is_tried_dry(gpt: Any, call: Call) -> None:
    code, out, err = call("drain", "h1", "--dry-run")
    assert (code, err) == (0, "")
    assert out == "gpt/1 would move h1 → h2, as asked (nothing is done)\n"
    assert (gpt.hosts["h1"].taint, gpt.moves) == (None, {})
    gpt.warnings = ["breaks a connection to outside the cluster: [2001:db8::2]:22 (ssh)"]
    assert call("drain", "h1", "--dry-run")[1] == out + f"warning: gpt/1: {gpt.warnings[0]}\n"
    assert call("drain", "h2", "--dry-run")[1] == "h2 is empty (nothing is done)\n"
    code, _, err = call("drain", "h8", "--dry-run")
    assert (code, err.splitlines()[0]) == (4, 'error: no host "h8" in this cluster')


def test_a_dry_drain_says_whether_all_would_be_gone_in_time(gpt: Any, call: Call) -> None:
    late = Departing("gpt/1", 6.0, True, 1.0, at_most_s=12.0)
    gpt.evacuating = Evacuating("h1", 4.0, 6.0, False, [late])
    code, out, _ = call("drain", "h1", "--dry-run", "--within", "4s")
    assert (code, gpt.hosts["h1"].taint, gpt.moves) == (124, None, {})
    assert "h1 would be empty after about 6.00 s" in out
    assert "gpt/1 may not be gone in time: it needs up to 12.0 s, of 4 s" in out
    assert gpt.wait_for(PlanEvacuation) == PlanEvacuation("h1", 4.0)
    gpt.evacuating = Evacuating("h1", 60.0, 2.0, False, [Departing("gpt/1", 2.0, False)])
    code, out, _ = call("drain", "h1", "--dry-run", "--severity", "notice", "-o", "json")
    assert (code, json.loads(out)["deadline"]["within"]) == (0, 60.0)


def test_a_drain_says_first_when_the_host_will_be_empty(gpt: Any, call: Call) -> None:
    two = [Departing("gpt/1", 2.0, False), Departing("other/1", 5.2, False)]
    gpt.evacuating = Evacuating("h1", 0.0, 5.2, False, two)
    code, _, err = call("drain", "h1")
    assert (code, err.splitlines()[0]) == (0, "h1 will be empty after about 5.20 s, one by one")
    assert gpt.wait_for(PlanEvacuation) == PlanEvacuation("h1")
    told = json.loads(call("drain", "h1", "-o", "json")[1])
    assert (told["empty_s"], told["deadline"]) == (5.2, None)
    gpt.refuse[PlanEvacuation] = Refused("a host does not answer")
    told = json.loads(call("drain", "h1", "-o", "json")[1])
    assert (told["empty"], told["empty_s"]) == (True, None), "it is no reason to stay"


def test_a_drain_of_what_cannot_leave_says_no_time(gpt: Any, call: Call) -> None:
    refused = Departing("gpt/1", 0.0, False, error="no spare")
    for leaving in ([], [Departing("other/1", 2.0, False)]):
        gpt.evacuating = Evacuating("h1", 0.0, 2.0, False, [*leaving, refused])
        assert "will be empty" not in call("drain", "h1")[2]


def test_a_dry_drain_counts_the_slots_of_all_together(gpt: Any, call: Call) -> None:
    gpt._run(RunJob("other", 2, ["train"], {}, "/", 0, []))  # on h0 and h1 as well
    code, out, err = call("drain", "h1", "--dry-run", "-o", "json")
    assert code == 5
    assert "2 capsules have 1 free slot elsewhere" in err
    plan = json.loads(out)
    assert [move["capsule"] for move in plan["moves"]] == ["gpt/1", "other/1"]
    assert (plan["free_slots"], plan["lacking_slots"]) == (1, 1)
    gpt.refuse[Migrate] = Refused("holds a userfaultfd", hint="close it")
    code, _, err = call("drain", "h1", "--dry-run")
    assert code == 5
    assert "error: h1 would not become empty: holds a userfaultfd" in err
    assert "hint: close it" in err


def test_what_scripts_read(gpt: Any, call: Call) -> None:
    taint = json.loads(call("taint", "h1", "--reason", "ECC", "-o", "json")[1])
    assert taint == {"host": "h1", "taint": "ECC", "capsules": ["gpt/1"], "deadline": None}
    drained = json.loads(call("drain", "h0", "-o", "json")[1])
    assert (drained["host"], drained["empty"], drained["left"]) == ("h0", False, ["gpt/0"])
    assert "no spare" in drained["refused"]["gpt/0"]["error"]
    code, out, _ = call("run", "--detach", "-o", "json", "--name", "two", "--", "true")
    assert (code, json.loads(out)) == (0, {"name": "two"})
    assert call("run", "-o", "json", "--", "true")[0] == 2
    ended = {"job": "two", "state": "ended", "code": 143}
    assert json.loads(call("stop", "two", "-o", "json")[1]) == ended


def test_a_drain_tells_scripts_of_its_moves(gpt: Any, call: Call) -> None:
    code, out, err = call("drain", "h1", "-o", "json")
    assert (code, err) == (0, "")
    told = json.loads(out)
    assert (told["empty"], told["left"], told["refused"]) == (True, [], {})
    assert [(m["capsule"], m["state"], m["destination"]) for m in told["moves"]] == [
        ("gpt/1", "done", "h2")
    ]


def test_taint_of_an_unknown_host(gpt: Any, call: Call) -> None:
    assert call("taint", "h9") == (
        4,
        "",
        'error: no host "h9" in this cluster\nhint: its hosts are: h0, h1, h2\n',
    )


def test_drain_waits_until_the_host_is_empty(gpt: Any, start: Starter) -> None:
    gpt.hold_moves = True
    process = start("drain", "h1", "--reason", "reboot")
    gpt.wait_for(SetTaint)
    gpt.wait_for(GetStatus, 3)
    assert process.poll() is None
    gpt.finish_move("m1")
    assert ended(process) == (
        0,
        "gpt/1 moved h1 → h2, paused 0.70 s\nh1 is empty and tainted\n",
        f"gpt/1: {in_words(gpt.cost)}\n",
    )


def test_drain_without_a_spare_is_refused_with_the_reason(gpt: Any, call: Call) -> None:
    gpt.hosts["h2"].taint = "broken"
    code, out, err = call("drain", "h1")
    assert (code, out) == (5, "")
    assert "error: gpt/1 cannot leave h1: no spare can take gpt/1 (add a host)\n" in err
    assert "liveshift uncordon h1" in err


def test_drain_after_a_move_that_failed(gpt: Any, start: Starter) -> None:
    gpt.hold_moves = True
    process = start("drain", "h1")
    gpt.wait_for(SetTaint)
    gpt.finish_move("m1", LiveshiftError("a mapped file differs", hint="install the same torch"))
    code, out, err = ended(process)
    assert (code, out) == (5, "")
    assert "gpt/1 stays on h1" in err
    assert "error: gpt/1 cannot leave h1: a mapped file differs" in err
    assert "hint: install the same torch; h1 stays tainted" in err


def test_drain_of_a_capsule_that_ends_before_it_has_moved(gpt: Any, start: Starter) -> None:
    gpt.hold_moves = True
    process = start("drain", "h1")
    gpt.wait_for(SetTaint)
    gpt.end_before_move("m1")
    assert ended(process) == (
        0,
        "h1 is empty and tainted\n",
        "gpt/1 ended with code 0 before it could move h1 → h2\n",
    )


def test_drain_gives_up_at_its_timeout(gpt: Any, call: Call) -> None:
    gpt.hold_moves = True
    code, out, err = call("drain", "h1", "--timeout", "300ms")
    assert (code, out) == (124, "")
    assert err.startswith("error: h1 is not empty after 300ms: gpt/1 still there\n")


def test_drain_of_an_empty_host(gpt: Any, call: Call) -> None:
    assert call("drain", "h2") == (0, "h2 is empty and tainted\n", "")


def test_migrate_shows_where_the_time_went(gpt: Any, call: Call) -> None:
    code, out, err = call("migrate", "gpt/1", "--to", "h2", "--reason", "try")
    assert (code, err) == (0, f"{in_words(gpt.cost)}\n")
    assert gpt.wait_for(Migrate) == Migrate("gpt/1", "h2", "try", False)
    lines = [" ".join(line.replace("│", " ").split()) for line in out.splitlines()]
    assert lines[0] == "gpt/1: h1 → h2, epoch 2"
    assert "dump 0.400 32 % 246 MB frozen" in lines
    assert any(line.startswith("unaccounted 0.100 8.0 %") for line in lines)
    assert any(line.startswith("total 1.250 100 % 246 MB") for line in lines)
    assert lines[-1] == "paused 0.70 s; copied 246 MB paused at 612 MB/s"


def test_migrate_as_json(gpt: Any, call: Call) -> None:
    code, out, _ = call("migrate", "gpt/1", "-o", "json")
    row = json.loads(out)
    assert code == 0
    assert (row["state"], row["destination"], row["frozen_s"]) == ("done", "h2", 0.7)
    assert [phase["name"] for phase in row["phases"]] == ["prepare", "dump", "restore"]


def test_migrate_dry_run_prints_the_plan(gpt: Any, call: Call) -> None:
    code, out, _ = call("migrate", "gpt/1", "--to", "h2", "--dry-run")
    assert code == 0
    assert gpt.moves == {}
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[0] == "gpt/1: h1 → h2 (nothing is done)"
    assert "CRIU 4.2.1" in lines
    assert "image about 250 MB" in lines


def test_migrate_to_another_gpu(gpt: Any, call: Call) -> None:
    code, out, err = call("migrate", "gpt/1", "--to-gpu", "h1/5", "--from-gpu", "3", "-r", "ECC")
    assert (code, err) == (0, "")
    assert gpt.wait_for(Migrate) == Migrate("gpt/1", "", "ECC", False, "h1/5", "3")
    lines = [" ".join(line.replace("│", " ").split()) for line in out.splitlines()]
    assert lines[0] == "gpt/1: h1 GPU 3 → h1 GPU 5, epoch 1"
    assert lines[-1] == "paused 0.70 s"
    code, out, _ = call("migrate", "gpt/1", "--to-gpu", "5", "-o", "json")
    row = json.loads(out)
    assert (code, row["kind"], row["state"]) == (0, "swap", "done")
    assert (row["source"], row["destination"]) == ("h1 GPU 3", "h1 GPU 5")


def test_the_plan_of_another_gpu_has_no_image(gpt: Any, call: Call) -> None:
    code, out, _ = call("migrate", "gpt/1", "--to-gpu", "5", "--dry-run")
    assert (code, gpt.moves) == (0, {})
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[0] == "gpt/1: h1 GPU 3 → h1 GPU 5 (nothing is done)"
    assert "device memory 80 GiB" in lines
    assert "image" not in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--to", "h2", "--to-gpu", "h1/5"), "give one of --to and --to-gpu"),
        (("--from-gpu", "3"), "--from-gpu goes with --to-gpu"),
    ],
)
def test_gpus_and_hosts_do_not_mix(gpt: Any, call: Call, words: tuple[str, ...], said: str) -> None:
    code, out, err = call("migrate", "gpt/1", *words)
    assert (code, out) == (2, "")
    assert said in " ".join(err.replace("│", " ").split())
    assert not [ask for ask in gpt.asks if isinstance(ask, Migrate)]


@pytest.mark.parametrize(
    ("error", "code"),
    [(Refused("a file differs", hint="copy it"), 5), (LiveshiftError("CRIU failed", hint="no"), 1)],
)
def test_migrate_that_fails(gpt: Any, start: Starter, error: LiveshiftError, code: int) -> None:
    gpt.hold_moves = True
    process = start("migrate", "gpt/1")
    gpt.wait_for(GetMigration)
    gpt.finish_move("m1", error)
    ending, out, err = ended(process)
    assert (ending, out) == (code, "")
    assert f"gpt/1 did not move h1 → h2: {error}\nhint: {error.hint}\n" in err


@pytest.mark.parametrize("output", ["table", "json"])
def test_migrate_of_what_ends_before_it_has_moved(gpt: Any, start: Starter, output: str) -> None:
    gpt.hold_moves = True
    process = start("migrate", "gpt/1", "-o", output)
    gpt.wait_for(GetMigration)
    gpt.end_before_move("m1", 3)
    ending, out, err = ended(process)
    words = "gpt/1 ended with code 3 before it could move h1 → h2"
    assert (ending, err) == (5, f"error: {words}\n")
    if output == "json":
        row = json.loads(out)
        assert (row["state"], row["error"]) == ("job ended", words)
    else:
        assert out == ""


def test_migrate_to_where_it_is(gpt: Any, call: Call) -> None:
    assert call("migrate", "gpt/1", "--to", "h1") == (
        5,
        "",
        "error: gpt/1 cannot move to h1\nhint: name another host\n",
    )


def test_a_move_goes_on_when_its_watcher_is_interrupted(gpt: Any, start: Starter) -> None:
    gpt.hold_moves = True
    process = start("migrate", "gpt/1")
    gpt.wait_for(GetMigration)
    process.send_signal(signal.SIGINT)
    words = "m1 goes on: `liveshift events m1` shows how; `liveshift cancel m1` ends it\n"
    assert ended(process) == (130, "", words)


def test_a_drain_goes_on_when_its_watcher_is_interrupted(gpt: Any, start: Starter) -> None:
    gpt.hold_moves = True
    process = start("drain", "h1")
    gpt.wait_for(GetStatus, 3)
    process.send_signal(signal.SIGINT)
    assert ended(process) == (
        130,
        "",
        "the drain of h1 goes on without this command: `liveshift events m1` shows it;"
        " `liveshift untaint h1` lets no further move begin\n"
        "m1 will end as it would; `liveshift cancel m1` ends it now\n",
    )


def test_cancel_waits_until_the_move_is_over(gpt: Any, start: Starter) -> None:
    gpt.hold_moves = True
    gpt.begin_move("gpt/1", "h2")
    process = start("cancel", "m1")
    gpt.wait_for(GetMigration)
    assert process.poll() is None
    gpt.finish_move("m1", Refused("cancelled by root"))
    assert ended(process) == (0, "m1 is cancelled: gpt/1 stays on h1\n", "")


def test_a_cancelled_move_that_went_on_is_no_success(gpt: Any, start: Starter) -> None:
    """Its source fell silent with the whole image over: the capsule must run somewhere."""
    gpt.hold_moves = True
    gpt.begin_move("gpt/1", "h2")
    process = start("cancel", "m1")
    gpt.wait_for(GetMigration)
    gpt.finish_move("m1")
    code, out, err = ended(process)
    assert (code, out) == (1, "")
    assert "m1 was not cancelled: gpt/1 moved h1 → h2" in err


def test_stop_says_what_it_waits_for(gpt: Any, start: Starter) -> None:
    gpt.signals_end = False
    gpt.begin_move("gpt/1", "h2")
    process = start("stop", "gpt")
    gpt.wait_for(GetStatus, 8)
    for capsule in ("gpt/0", "gpt/1"):
        gpt.end(capsule, 143)
    assert ended(process) == (
        0,
        "gpt has ended with code 143\n",
        "waiting for gpt/0 on h0 (it has SIGTERM, and is killed after the grace time),"
        " gpt/1 (its move m1 ends first)\n",
    )


def test_stop_says_why_an_end_is_not_known_yet(gpt: Any, start: Starter) -> None:
    gpt.signals_end = False
    gpt.trouble = "the journal /v/journal.sqlite cannot be written: the disk at /v is full"
    process = start("stop", "gpt")
    gpt.wait_for(GetStatus, 8)
    for capsule in ("gpt/0", "gpt/1"):
        gpt.end(capsule, 143)
    code, out, err = ended(process)
    assert (code, out) == (0, "gpt has ended with code 143\n")
    assert err.endswith(f"is killed after the grace time); {gpt.trouble}\n")
    assert err.startswith("waiting for gpt/0 on h0")


def test_what_no_journal_knows_is_ended_in_words_and_for_scripts(gpt: Any, call: Call) -> None:
    assert call("stop", "old", "--unknown", "h1") == (0, "old has ended on h1\n", "")
    code, out, err = call("stop", "old", "--unknown", "h1", "-o", "json")
    assert (code, err) == (0, "")
    assert json.loads(out) == {"job": "old", "state": "ended", "code": None}


def test_stop_of_what_a_dead_host_ran_says_when_it_ends(gpt: Any, call: Call) -> None:
    gpt.hosts["h1"].state = "lost"
    assert call("stop", "old", "--unknown", "h1") == (
        0,
        "old is being ended\n",
        "h1 is not up: what it runs of old is ended when it is back\n",
    )


def test_stop_waits_for_the_end(gpt: Any, call: Call) -> None:
    assert call("stop", "gpt") == (0, "gpt has ended with code 143\n", "")
    assert gpt.jobs["gpt"].signals == [signal.SIGTERM]
    assert {ask.job for ask in gpt.asks if isinstance(ask, GetStatus)} == {"gpt"}


def test_status_names_hosts_that_use_another_file(gpt: Any, call: Call) -> None:
    assert "differs" not in call("status")[1]
    for name in ("h0", "h1", "h2"):
        gpt.hosts[name].other_file = name != "h0"
    gpt.hosts["h2"].state = "lost"  # which file it uses now is not known
    said = (
        "h1: the cluster file there differs from the orchestrator's: copy the orchestrator's to it"
    )
    lines = call("status")[1].splitlines()
    assert [line for line in lines if "differs" in line] == [
        f"{said}, and the agent loads it by itself"
    ]
    rows = json.loads(call("status", "-o", "json")[1])["hosts"]
    assert [row["other_file"] for row in rows] == [False, True, True]
