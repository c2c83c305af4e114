# SPDX-License-Identifier: Apache-2.0
"""`liveshift taint`, `drain`, `migrate` and `stop`."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest
from cli_harness import Call, Starter, ended

from liveshift.errors import LiveshiftError, Refused
from liveshift.runtime.messages import (
    GetMigration,
    GetStatus,
    Migrate,
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


@pytest.mark.parametrize(
    "words", [("untaint", "host", "h1"), ("untaint", "h1"), ("uncordon", "h1")]
)
def test_untaint(gpt: Any, call: Call, words: tuple[str, ...]) -> None:
    gpt.hosts["h1"].taint = "x"
    assert call(*words) == (0, "h1 takes work again\n", "")
    assert gpt.wait_for(Untaint) == Untaint("h1")


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
        "gpt/1 moved h1 → h2, stood still 0.700 s\nh1 is empty and tainted\n",
        "",
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


def test_drain_gives_up_at_its_timeout(gpt: Any, call: Call) -> None:
    gpt.hold_moves = True
    code, out, err = call("drain", "h1", "--timeout", "300ms")
    assert (code, out) == (124, "")
    assert err.startswith("error: h1 is not empty after 300ms: gpt/1 still there\n")


def test_drain_of_an_empty_host(gpt: Any, call: Call) -> None:
    assert call("drain", "h2") == (0, "h2 is empty and tainted\n", "")


def test_migrate_shows_where_the_time_went(gpt: Any, call: Call) -> None:
    code, out, err = call("migrate", "gpt/1", "--to", "h2", "--reason", "try")
    assert (code, err) == (0, "")
    assert gpt.wait_for(Migrate) == Migrate("gpt/1", "h2", "try", False)
    lines = [" ".join(line.replace("│", " ").split()) for line in out.splitlines()]
    assert lines[0] == "gpt/1: h1 → h2, epoch 2"
    assert "dump 0.400 32 % 246 MB frozen" in lines
    assert any(line.startswith("unaccounted 0.100 8.0 %") for line in lines)
    assert any(line.startswith("total 1.250 100 % 246 MB") for line in lines)
    assert lines[-1] == "stood still 0.700 s, image 246 MB at 612 MB/s"


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
    assert lines[-1] == "stood still 0.700 s"
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
    assert ended(process) == (130, "", "m1 goes on: `liveshift events m1`\n")


def test_stop_waits_for_the_end(gpt: Any, call: Call) -> None:
    assert call("stop", "gpt") == (0, "gpt has ended with code 143\n", "")
    assert gpt.jobs["gpt"].signals == [signal.SIGTERM]
