# SPDX-License-Identifier: Apache-2.0
"""`liveshift suspend` and `liveshift resume`, and what other commands say of a suspended job."""

from __future__ import annotations

import json
import signal
from typing import Any

import msgspec
import pytest
from cli_harness import Call, Starter, ended
from doubles.suspensions import AGAIN, NOWHERE

from liveshift.errors import Refused
from liveshift.runtime.messages import ProtectionRow, ResumeJob, RunJob, SuspendJob, WithdrawOrder

KEPT = ProtectionRow(0.0, "s7", 61.5, 500_000_000, ["h2"])


def asked(double: Any, kind: type[SuspendJob | ResumeJob]) -> list[SuspendJob | ResumeJob]:
    return [ask for ask in double.asks if isinstance(ask, kind)]


@pytest.fixture
def asleep(gpt: Any) -> Any:
    """The job gpt is suspended; h2 has its image."""
    gpt.jobs["gpt"].suspended = True
    gpt.jobs["gpt"].protection = KEPT
    return gpt


# ---- suspend ---------------------------------------------------------------------------------


def test_suspend_waits_until_the_job_runs_nowhere(gpt: Any, call: Call) -> None:
    code, out, err = call("suspend", "gpt")
    assert (code, out) == (0, f"gpt {NOWHERE}\n")
    assert "gpt: a last snapshot is taken" in err
    assert asked(gpt, SuspendJob) == [SuspendJob("gpt")]


def test_scripts_get_json_of_a_suspension(gpt: Any, call: Call) -> None:
    code, out, err = call("suspend", "gpt", "-o", "json")
    assert (code, err) == (0, "")
    holders = {"gpt/0": "h2", "gpt/1": "h2"}
    assert json.loads(out) == {
        "job": "gpt",
        "holders": holders,
        "state": "suspended",
        "text": NOWHERE,
    }


def test_a_dry_suspension_only_says_which_hosts_would_hold_the_job(gpt: Any, call: Call) -> None:
    said = "gpt would go into the memory of h2\n"
    assert call("suspend", "gpt", "--dry-run") == (0, said, "")
    found = json.loads(call("suspend", "gpt", "--dry-run", "-o", "json")[1])
    assert (found["state"], found["holders"]["gpt/1"]) == ("running", "h2")
    assert asked(gpt, SuspendJob) == [SuspendJob("gpt", dry_run=True)] * 2
    assert not gpt.jobs["gpt"].suspended


def test_suspend_need_not_wait(gpt: Any, call: Call) -> None:
    gpt.suspensions.suspends = []
    assert call("suspend", "gpt", "--no-wait") == (0, "gpt is being suspended\n", "")
    found = json.loads(call("suspend", "gpt", "--no-wait", "-o", "json")[1])
    assert found["state"] == "suspending"


@pytest.mark.parametrize(
    ("kind", "text"),
    [("not suspended", "the job goes on: h2 has no room"), ("ended", "ended with code 1")],
)
def test_a_job_that_was_not_suspended_is_an_error_with_the_reason(
    gpt: Any, call: Call, kind: str, text: str
) -> None:
    gpt.suspensions.suspends = [(kind, text)]
    code, out, err = call("suspend", "gpt")
    assert (code, out) == (1, "")
    assert f"error: gpt was not suspended: {text}" in err


def test_a_job_that_somebody_resumes_before_it_is_suspended_is_not_waited_for(
    gpt: Any, call: Call
) -> None:
    """As soon as the snapshot is written, before all its copies have ended."""
    gpt.suspensions.suspends = [("resumed", "runs on h0 and h1")]
    code, out, err = call("suspend", "gpt")
    assert (code, out) == (1, "")
    said = " ".join(err.split())
    why = "another command has resumed it meanwhile, and it runs on h0 and h1"
    assert f"gpt was not suspended: {why}" in said


def test_what_happens_to_other_subjects_and_before_the_order_does_not_count(
    gpt: Any, call: Call
) -> None:
    gpt._tell("gpt", "not suspended", "some days ago", "root")
    gpt._tell("gpt", "suspended", "some days ago", "root")
    gpt._tell("gpt", "resumed", "some days ago", "root")

    def others(job: str, *event: str) -> None:
        tell(f"{job}/0", "ended", "ended with code 0", "")
        tell(job, *event)

    tell = gpt._tell
    gpt._tell = others
    assert call("suspend", "gpt")[:2] == (0, f"gpt {NOWHERE}\n")


@pytest.mark.parametrize("options", [(), ("--no-wait",), ("--dry-run",), ("-o", "json")])
def test_a_suspension_that_is_refused_ends_with_5(
    gpt: Any, call: Call, options: tuple[str, ...]
) -> None:
    gpt.refuse[SuspendJob] = Refused(
        "gpt cannot be suspended: no host can hold its snapshots", hint="add a host"
    )
    code, out, err = call("suspend", "gpt", *options)
    assert (code, out) == (5, "")
    assert "error: gpt cannot be suspended: no host can hold its snapshots" in err
    assert "hint: add a host" in err


@pytest.mark.parametrize("verb", ["suspend", "resume"])
def test_a_job_that_does_not_exist_ends_with_4(gpt: Any, call: Call, verb: str) -> None:
    code, out, err = call(verb, "nix")
    assert (code, out) == (4, "")
    assert "nix" in err


def test_an_interrupted_suspend_says_that_it_goes_on(gpt: Any, start: Starter) -> None:
    gpt.suspensions.suspends = []
    process = start("suspend", "gpt")
    gpt.wait_for(SuspendJob)
    assert process.stderr is not None
    assert b"a last snapshot" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    code, _, err = ended(process)
    assert code == 130
    said = " ".join(err.split())
    assert "gpt is suspending all the same: `liveshift events gpt` shows it" in said


@pytest.mark.parametrize("withdraws", [True, False])
def test_an_interrupted_suspend_takes_an_order_back_that_waits(
    gpt: Any, start: Starter, withdraws: bool
) -> None:
    gpt.suspensions.suspends = []
    gpt.suspensions.withdraws = withdraws
    process = start("suspend", "gpt")
    gpt.wait_for(SuspendJob)
    assert process.stderr is not None
    assert b"a last snapshot" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    code, _, err = ended(process)
    assert code == 130
    assert gpt.asks[-1] == WithdrawOrder("gpt")
    said = " ".join(err.split())
    assert ("gpt is not suspended: the order is taken back" in said) is withdraws
    assert ("gpt is suspending all the same" in said) is not withdraws


@pytest.mark.parametrize(
    ("verb", "option", "text"),
    [
        (("suspend",), "--no-wait", "gpt is suspended after the end of m3, m4"),
        (("suspend",), "--dry-run", "gpt would be suspended after the end of m3, m4"),
        (("snapshot", "--to", "/nfs"), "--no-wait", "gpt is saved after the end of m3, m4"),
        (("snapshot", "--to", "/nfs"), "--dry-run", "gpt can be saved after the end of m3, m4"),
    ],
)
def test_an_order_during_a_move_says_that_it_waits(
    gpt: Any, call: Call, verb: tuple[str, ...], option: str, text: str
) -> None:
    gpt.suspensions.waits_for = ["m3", "m4"]
    gpt.suspensions.suspends = gpt.suspensions.saves = []
    assert call(*verb, "gpt", option) == (0, text + "\n", "")


# ---- resume ----------------------------------------------------------------------------------


def test_resume_waits_until_the_job_runs(asleep: Any, call: Call) -> None:
    code, out, err = call("resume", "gpt")
    assert (code, out) == (0, f"gpt {AGAIN}\n")
    assert "gpt: goes on from s7: gpt/0 on h2, gpt/1 on h2" in " ".join(err.split())
    assert asked(asleep, ResumeJob) == [ResumeJob("gpt")]


def test_scripts_get_json_of_a_resumption(asleep: Any, call: Call) -> None:
    code, out, err = call("resume", "gpt", "-o", "json")
    assert (code, err) == (0, "")
    assert json.loads(out) == {
        "job": "gpt",
        "snapshot": "s7",
        "suspended_s": 61.5,
        "where": {"gpt/0": "h2", "gpt/1": "h2"},
        "state": "running",
        "text": AGAIN,
    }


def test_a_dry_resumption_only_says_where(asleep: Any, call: Call) -> None:
    said = "gpt would go on: gpt/0 on h2, gpt/1 on h2\n"
    assert call("resume", "gpt", "--dry-run") == (0, said, "")
    found = json.loads(call("resume", "gpt", "--dry-run", "-o", "json")[1])
    assert (found["state"], found["where"]["gpt/0"]) == ("suspended", "h2")
    assert asked(asleep, ResumeJob) == [ResumeJob("gpt", dry_run=True)] * 2
    assert asleep.jobs["gpt"].suspended


def test_resume_need_not_wait(asleep: Any, call: Call) -> None:
    asleep.suspensions.resumes = []
    said = "gpt is being resumed: gpt/0 on h2, gpt/1 on h2\n"
    assert call("resume", "gpt", "--no-wait") == (0, said, "")
    found = json.loads(call("resume", "gpt", "--no-wait", "-o", "json")[1])
    assert found["state"] == "resuming"


@pytest.mark.parametrize(
    ("kind", "text"),
    [("not resumed", "is suspended again: CRIU could not"), ("ended", "ended with code 137")],
)
def test_a_job_that_was_not_resumed_is_an_error_with_the_reason(
    asleep: Any, call: Call, kind: str, text: str
) -> None:
    asleep.suspensions.resumes = [(kind, text)]
    code, out, err = call("resume", "gpt")
    assert (code, out) == (1, "")
    assert f"error: gpt was not resumed: {text}" in " ".join(err.split())


def test_a_resumption_that_is_refused_ends_with_5(asleep: Any, call: Call) -> None:
    asleep.refuse[ResumeJob] = Refused("gpt cannot be resumed: no host has room for gpt/0")
    code, out, err = call("resume", "gpt")
    assert (code, out) == (5, "")
    assert "error: gpt cannot be resumed: no host has room for gpt/0" in err


# ---- other commands --------------------------------------------------------------------------


def test_status_shows_a_suspended_job_and_where_it_is(asleep: Any, call: Call) -> None:
    code, out, _ = call("status")
    assert code == 0
    shown = [" ".join(line.split()) for line in out.splitlines()]
    assert any(line.startswith("gpt suspended") for line in shown), out
    assert "gpt: suspended 1 min 01 s ago; s7 is 500 MB in the memory of h2" in " ".join(shown)
    found = json.loads(call("status", "-o", "json")[1])
    (job,) = found["jobs"]
    assert job["state"] == "suspended"
    assert [(c["state"], c["host"]) for c in job["capsules"]] == [("suspended", "")] * 2
    assert [host["used"] for host in found["hosts"]] == [0, 0, 0]


@pytest.mark.parametrize("words", [("gpt",), ("gpt/1",)])
def test_logs_says_that_the_job_is_suspended(
    asleep: Any, call: Call, words: tuple[str, ...]
) -> None:
    code, out, err = call("logs", *words)
    assert (code, out) == (5, "")
    assert "error: gpt is suspended: its output is part of its image" in err
    assert "hint: `liveshift resume gpt`" in err


def test_a_drain_does_not_warn_of_images_that_another_host_has_too(asleep: Any, call: Call) -> None:
    assert call("drain", "h2") == (0, "h2 is empty and tainted\n", "")


def test_a_drain_warns_of_images_that_no_other_host_has(asleep: Any, call: Call) -> None:
    asleep.jobs["gpt"].protection = msgspec.structs.replace(KEPT, alone=["h2"])
    code, out, err = call("drain", "h2")
    assert (code, out) == (0, "h2 is empty and tainted\n")
    said = " ".join(err.split())
    assert "h2 has an image of gpt, which is suspended, and no other host has it:" in said
    assert "`liveshift resume gpt` before you switch h2 off" in said
    assert json.loads(call("drain", "h2", "-o", "json")[1])["holds"] == ["gpt"]


def test_a_drain_of_a_host_without_images_warns_of_nothing(asleep: Any, call: Call) -> None:
    assert call("drain", "h1") == (0, "h1 is empty and tainted\n", "")
    drained = json.loads(call("drain", "h1", "-o", "json")[1])
    assert (drained["empty"], drained["left"], drained["holds"]) == (True, [], [])


def test_a_drain_does_not_warn_of_images_of_a_job_that_runs(gpt: Any, call: Call) -> None:
    gpt.jobs["gpt"].protection = KEPT
    assert call("drain", "h2") == (0, "h2 is empty and tainted\n", "")
    assert json.loads(call("drain", "h2", "-o", "json")[1])["holds"] == []


def test_run_says_that_its_job_is_suspended_and_goes_on_with_its_output(
    double: Any, start: Starter
) -> None:
    process = start("run", "--verbose", "--name", "gpt", "--", "train")
    double.wait_for(RunJob)
    double.print("gpt/0", b"step 1\n")
    with double.changed:
        double.suspensions.suspend(double.jobs["gpt"], SuspendJob("gpt"), double._tell)
        double.changed.notify_all()
    assert process.stderr is not None
    seen = b""
    while b"suspended" not in seen.split(b"suspending")[-1]:
        line = process.stderr.readline()
        assert line, seen
        seen += line
    with double.changed:
        double.suspensions.resume(double.jobs["gpt"], ResumeJob("gpt"), double._tell)
        double.changed.notify_all()
    double.print("gpt/0", b"step 2\n")
    double.end("gpt/0", 0)
    code, out, _ = ended(process)
    assert (code, out) == (0, "step 1\nstep 2\n")
