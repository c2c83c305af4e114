# SPDX-License-Identifier: Apache-2.0
"""Jobs that find no boundary, whose gates nobody opens, or that have rare collectives: they go on,
and it is told why."""

from __future__ import annotations

import re
import sys

import pytest
from lab_session import GPT, JOBS, TORCHRUN, LabSession, NewLab, eventually
from moving_job import Job
from reference_runs import References

from liveshift.interposer import layout
from liveshift.launcher import lab as labs

TRAIN_GPT = (*TORCHRUN, str(GPT), "--batch", "8", "--out", "{out}", "--steps", "100")
"""As test_bit_exact.py has it, so that one reference run serves both."""
pytestmark = [pytest.mark.lab, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def lab(new_lab: NewLab) -> LabSession:
    """With little patience: a boundary is looked for for 1.5 s, a silent agent waited for 2 s."""
    # Without pre-copy a freeze takes some seconds on a slow link: time in which to do harm.
    return new_lab("--hosts", "4", "--timeouts", "collective=60", "--precopy", "enabled=false")


def quiesced(job: Job) -> str:
    """What the last move's quiesce phase says."""
    (detail,) = (p.detail for p in job.migrations()[-1].phases if p.name == "quiesce")
    return detail


@pytest.mark.long
def test_an_order_that_no_collective_shows(lab: LabSession, references: References) -> None:
    """Tried twice; the rank behind is named with its threads; then it is frozen in place."""
    argv = (
        *(sys.executable, str(JOBS / "hidden_order.py")),
        *("--steps", "300", "--pace", "0.3", "--out", "{out}"),
    )
    job = lab.start("hidden", argv, nnodes=3)
    job.wait_step(5)
    for _ in range(3):  # a move may come just between two steps, where there is a boundary
        job.migrate(2)
        if quiesced(job) == "frozen in place":
            break
    assert quiesced(job) == "frozen in place"
    told = " ".join(lab.cli("events", job.name).out.split())
    behind = r"frozen in place: no collective boundary within 1\.5 s: .*rank 1 owes operation \d+"
    assert re.search(behind + r" of \d+ on pair, last gloo\.allreduce \(threads: ", told), told
    result = job.result(3)
    result.assert_equals(references.of(job.argv, 3, 3))


@pytest.mark.long
def test_ranks_whose_pages_are_of_another_version(lab: LabSession, references: References) -> None:
    """As after an upgrade with another layout: agents cannot read them, nor close such gates."""
    argv = ("python", str(JOBS / "tiny.py"), "--steps", "800", "--pace", "0.1", "--out", "{out}")
    job = lab.start("older", argv, nnodes=2)
    job.wait_step(5)
    another = layout.LAYOUT + 1
    for index in (0, 1):
        job.write_layout(index, another)
    job.migrate(1)
    assert quiesced(job) == "frozen in place"
    told = " ".join(lab.cli("events", job.name).out.split())
    assert re.search(rf"frozen in place: no collective boundary: .* page layout {another};", told)
    result = job.result(2)
    job.assert_trained_across(2)
    result.assert_equals(references.of(job.argv, 2, 2))


@pytest.mark.long
def test_where_collectives_are_rare_computing_shows_that_a_move_is_over(
    lab: LabSession, references: References
) -> None:
    how = ("--steps", "2000", "--pace", "0.1", "--out", "{out}")
    job = lab.start("rare", (sys.executable, str(JOBS / "rare.py"), *how), nnodes=2)
    job.wait_step(5)
    row = job.migrate(1)
    (resume,) = (phase for phase in row.phases if phase.name == "resume")
    assert resume.detail.startswith("it computes; no collective within"), resume
    assert resume.seconds < 2, "else it would have been waited for in vain"
    result = job.result(2)
    job.assert_trained_across(2)
    result.assert_equals(references.of(job.argv, 2, 2))


@pytest.mark.long
def test_communicators_without_an_identity(lab: LabSession, references: References) -> None:
    job = lab.start("lazy", ("env", "TORCH_GLOO_LAZY_INIT=1", *TRAIN_GPT), nnodes=2)
    job.wait_step(10)
    job.migrate(1)
    assert quiesced(job) == "frozen in place"
    told = " ".join(lab.cli("events", job.name).out.split())
    assert re.search(r"frozen in place: .*do not agree on", told), told
    result = job.result(2)
    result.assert_equals(references.of(TRAIN_GPT, 2, 2))  # when they connect changes no result


@pytest.mark.long
def test_a_gate_that_nobody_opens(lab: LabSession, references: References) -> None:
    """The agent of the rank that stays dies while the gates are closed, and its next life is not
    told to open them: the rank does so by itself after the lease. (Without any agent the host would
    not learn where the other rank's address is now.)"""
    job = lab.start("nobody", TRAIN_GPT, nnodes=2)
    job.wait_step(10)
    stays = job.capsule(0).host
    used = {job.capsule(index).host for index in (0, 1)}
    to = next(host for host in ("h3", "h2", "h1") if host not in used)
    lab.cli("lab", "link", to, "--rate", "1gbit")
    try:
        with lab.popen("migrate", f"{job.name}/1", "--to", to) as moving:
            eventually(lambda: [r for r in lab.status().moving if r.state == "freezing"], "it", 20)
            labs.stop_daemon(lab.lab, stays)
            _, err = moving.communicate(timeout=90)
        assert moving.returncode == 0, err.decode()
    finally:
        lab.cli("lab", "link", to, "--rate", "none", "--mend")
    assert quiesced(job).startswith("paused after collective")
    lab.start_agent(stays)
    job.go_on(5)
    result = job.result(2)
    result.assert_equals(references.of(job.argv, 2, 2))
