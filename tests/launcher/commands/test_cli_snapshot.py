# SPDX-License-Identifier: Apache-2.0
"""`liveshift snapshot`, `resume --from`, and the keys by which clusters know what is saved."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from cli_harness import Call, Starter, ended
from cluster_files import WITH_KEYS
from doubles.suspensions import AGAIN, SAVED

from liveshift.errors import NotFound, Refused
from liveshift.runtime.control import keys
from liveshift.runtime.control.signatures import Signatures
from liveshift.runtime.messages import Message, ResumeJob, SnapshotJob

TO = ("--to", "/nfs")
HOLDERS = {"gpt/0": "h2", "gpt/1": "h2"}


def asked(double: Any, kind: type[Message]) -> list[Message]:
    return [ask for ask in double.asks if isinstance(ask, kind)]


# ---- snapshot --------------------------------------------------------------------------------


def test_snapshot_waits_until_the_job_is_saved(gpt: Any, call: Call) -> None:
    code, out, err = call("snapshot", "gpt", *TO)
    assert (code, out) == (0, f"gpt is saved: {SAVED}\n")
    assert "gpt: a snapshot is taken, and saved in /nfs" in err
    assert asked(gpt, SnapshotJob) == [SnapshotJob("gpt", "/nfs")]


def test_scripts_get_json_of_a_saved_job(gpt: Any, call: Call) -> None:
    code, out, err = call("snapshot", "gpt", *TO, "-o", "json")
    assert (code, err) == (0, "")
    assert json.loads(out) == {
        "job": "gpt",
        "directory": "/nfs",
        "holders": HOLDERS,
        "state": "saved",
        "text": f"is saved: {SAVED}",
    }


def test_a_dry_run_only_says_through_which_hosts_it_would_go(gpt: Any, call: Call) -> None:
    said = "gpt can be saved: its images would go through the memory of h2\n"
    assert call("snapshot", "gpt", *TO, "--dry-run") == (0, said, "")
    found = json.loads(call("snapshot", "gpt", *TO, "--dry-run", "-o", "json")[1])
    assert (found["state"], found["holders"]) == ("running", HOLDERS)
    assert asked(gpt, SnapshotJob) == [SnapshotJob("gpt", "/nfs", dry_run=True)] * 2
    assert gpt._status("").jobs[0].name == "gpt"


def test_snapshot_need_not_wait(gpt: Any, call: Call) -> None:
    gpt.suspensions.saves = []
    assert call("snapshot", "gpt", *TO, "--no-wait") == (0, "gpt is being saved\n", "")
    found = json.loads(call("snapshot", "gpt", *TO, "--no-wait", "-o", "json")[1])
    assert found["state"] == "saving"


def test_what_was_not_saved_is_an_error_with_the_reason(gpt: Any, call: Call) -> None:
    gpt.suspensions.saves = [("not saved", "the job goes on: h2 has no room")]
    code, out, err = call("snapshot", "gpt", *TO)
    assert (code, out) == (1, "")
    assert "error: gpt was not saved: the job goes on: h2 has no room" in err


def test_the_end_of_the_job_is_not_the_end_of_its_saving(gpt: Any, call: Call) -> None:
    gpt.suspensions.saves = [("ended", "ended with code 0"), ("saved", SAVED)]
    assert call("snapshot", "gpt", *TO)[:2] == (0, f"gpt is saved: {SAVED}\n")


def test_what_happened_before_the_order_does_not_count(gpt: Any, call: Call) -> None:
    for kind in ("saved", "not saved", "suspended"):
        gpt._tell("gpt", kind, "some days ago", "root")
    assert call("snapshot", "gpt", *TO)[:2] == (0, f"gpt is saved: {SAVED}\n")


@pytest.mark.parametrize("options", [(), ("--no-wait",), ("--dry-run",), ("-o", "json")])
def test_what_is_refused_ends_with_5(gpt: Any, call: Call, options: tuple[str, ...]) -> None:
    gpt.refuse[SnapshotJob] = Refused("gpt cannot be saved: m3 is under way", hint="wait for it")
    code, out, err = call("snapshot", "gpt", *TO, *options)
    assert (code, out) == (5, "")
    assert "error: gpt cannot be saved: m3 is under way" in err
    assert "hint: wait for it" in err


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("snapshot", "gpt"), 2),
        (("snapshot", *TO), 2),
        (("snapshot", "nix", *TO), 4),
        (("resume", "gpt", "--snapshot", "s7"), 2),
        (("keys", "trust", "west"), 2),
    ],
)
def test_wrong_usage_orders_nothing(
    gpt: Any, call: Call, words: tuple[str, ...], code: int
) -> None:
    found, out, err = call(*words)
    assert (found, out) == (code, "")
    assert err
    assert not gpt.events or all(event.kind != "saving" for event in gpt.events)
    assert asked(gpt, ResumeJob) == []


def test_an_interrupted_snapshot_says_that_it_goes_on(gpt: Any, start: Starter) -> None:
    gpt.suspensions.saves = []
    process = start("snapshot", "gpt", *TO)
    gpt.wait_for(SnapshotJob)
    assert process.stderr is not None
    assert b"a snapshot is taken" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    code, _, err = ended(process)
    assert code == 130
    assert "gpt is saving all the same: `liveshift events gpt` shows it" in err


# ---- resume from a directory -----------------------------------------------------------------


def test_a_job_that_is_not_here_is_resumed_from_a_directory(gpt: Any, call: Call) -> None:
    code, out, _ = call("resume", "bert", "--from", "/nfs", "--snapshot", "s7")
    assert (code, out) == (0, f"bert {AGAIN}\n")
    assert asked(gpt, ResumeJob) == [ResumeJob("bert", "/nfs", False, "s7")]


def test_the_newest_one_is_taken_if_none_is_named(gpt: Any, call: Call) -> None:
    found = json.loads(call("resume", "gpt", "--from", "/nfs", "--dry-run", "-o", "json")[1])
    assert (found["state"], found["snapshot"]) == ("suspended", "s7")
    assert asked(gpt, ResumeJob) == [ResumeJob("gpt", "/nfs", True, "")]


def test_an_image_that_cannot_be_loaded_is_an_error(gpt: Any, call: Call) -> None:
    gpt.suspensions.resumes = [
        ("adopted", "from s7 in /nfs"),
        ("not resumed", "stays suspended: memory.zst is damaged"),
    ]
    code, out, err = call("resume", "gpt", "--from", "/nfs")
    assert (code, out) == (1, "")
    assert "error: gpt was not resumed: stays suspended: memory.zst is damaged" in err


def test_a_directory_that_has_nothing_of_the_job_ends_with_4(gpt: Any, call: Call) -> None:
    gpt.refuse[ResumeJob] = NotFound("/nfs has no whole snapshot of bert: it has snapshots of gpt")
    code, out, err = call("resume", "bert", "--from", "/nfs")
    assert (code, out) == (4, "")
    assert "it has snapshots of gpt" in err


# ---- keys --------------------------------------------------------------------------------------


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.toml"
    path.write_text(WITH_KEYS.format(keys=tmp_path / "keys"))
    keys.init(tmp_path / "keys", ["h0"])
    return path


def test_a_cluster_prints_its_key_and_trusts_another(
    config: Path, tmp_path: Path, call: Call
) -> None:
    keys.init(tmp_path / "other", ["h0"])
    other = Signatures(tmp_path / "other")
    options = ("-c", str(config))
    assert call("keys", "signer", *options) == (0, f"{Signatures(tmp_path / 'keys').key}\n", "")
    written = tmp_path / "keys" / "trusted" / "west.pub"
    assert call("keys", "trust", "west", other.key, *options) == (0, f"{written}\n", "")
    signed = other.sign(b"data")
    assert Signatures(tmp_path / "keys").check(b"data", other.key, signed, "it") == "west"
    code, out, err = call("keys", "trust", "west", other.key, *options)
    assert (code, out) == (5, "")
    assert "is there already" in err
    code, _, err = call("keys", "trust", "east", "abc", *options)
    assert code == 2
    assert '"abc" is no key of a cluster' in err
    listed = json.loads(call("keys", "list", "-o", "json", *options)[1])
    assert {row["name"] for row in listed} == {"h0", "orchestrator"}, "another cluster is no peer"
