# SPDX-License-Identifier: Apache-2.0
"""A training job that moves while it trains, against the same job that nobody disturbs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from lab_session import LabSession, environment
from moving_job import Job
from reference_runs import References, Result

from liveshift.launcher.report import gaps
from liveshift.runtime.messages import MigrationRow

from .step import Step

BEFORE, AFTER = 8, 12
"""Steps before the first move, and between and after moves."""
STARTED_S = 90.0
"""torch and its compiler take their time on a fresh machine."""


def compare(
    step: Step,
    session: LabSession,
    name: str,
    argv: Sequence[str],
    moves: Sequence[tuple[int, str]],
    ranks: int = 1,
    after: Callable[[Step, str, Job], None] | None = None,
) -> Job:
    """Run ``argv`` with ``ranks`` capsules, move some of them (index, host), and compare with as
    many steps of it that nobody disturbs.

    ``{out}`` in the command is its folder. It has --steps for the most that it may take, and with
    --enough it ends when that file is there; --pace is left out where nobody disturbs it.
    """
    job = session.start(name, argv, nnodes=ranks)
    job.wait_step(BEFORE, timeout=min(STARTED_S, step.left_s))
    for number, (index, host) in enumerate(moves, 1):
        row = job.migrate(index, host)
        _told(step, f"{name}/move {number}", row)
        job.go_on(AFTER)
        if after is not None:
            after(step, f"{name}/move {number}", job)
    (job.out / "enough").touch()
    result = job.result(ranks)
    for number, row in enumerate(job.moves, 1):
        step.figure(f"{name}/move {number}/pause between steps_s", _pause(step, job, row))
    began = time.monotonic()
    wanted = undisturbed(step, argv, ranks, len(result.losses[0]))
    step.figure(f"{name}/undisturbed_s", time.monotonic() - began)
    same = result == wanted
    step.figure(f"{name}/bit_identical", same)
    step.figure(f"{name}/steps", len(result.losses[0]))
    if not step.check(same, f"{name}: not what the undisturbed run computed"):
        differs = [
            f"rank {rank}, step {got[0]}"
            for rank, losses in result.losses.items()
            for got, meant in zip(losses, wanted.losses[rank], strict=False)
            if got != meant
        ]
        step.figure(f"{name}/first difference", differs[0] if differs else "the parameters")
    before = step.outcome.bit_identical
    step.outcome.bit_identical = same and before is not False
    return job


def undisturbed(step: Step, argv: Sequence[str], ranks: int, steps: int) -> Result:
    """What so many steps compute; two ranks on one GPU reach each other by sockets."""
    words = list(argv)
    words[words.index("--steps") + 1] = str(steps)
    if "--enough" in words:
        words[words.index("--enough") + 1] = "/none"
    kept = environment(NCCL_SOCKET_IFNAME="lo", NCCL_RAS_ENABLE="0", NCCL_NVLS_ENABLE="0")
    patience = min(STARTED_S, step.left_s)
    place = step.work / f"undisturbed-{time.monotonic_ns()}"
    place.mkdir()
    return References(place, kept, patience).of(words, ranks, ranks)


def _told(step: Step, where: str, row: MigrationRow) -> None:
    """The timeline of a move, phase by phase."""
    step.figure(f"{where}/seconds", row.seconds)
    step.figure(f"{where}/frozen_s", row.frozen_s)
    step.figure(f"{where}/image_bytes", row.image_bytes)
    step.figure(f"{where}/bytes", row.bytes)
    for phase in row.phases:
        told = {"start_s": round(phase.start, 3), "s": round(phase.seconds, 3)}
        more = {"bytes": phase.bytes, "frozen": phase.frozen, "detail": phase.detail}
        step.figure(f"{where}/{phase.name}", told | {k: v for k, v in more.items() if v})


def _pause(step: Step, job: Job, row: MigrationRow) -> float:
    """Seconds between the two steps of the moved rank that hold the freeze; it must have trained
    before it and after it."""
    times = [s["time"] for s in job.steps(int(row.capsule.partition("/")[2]))]
    doubts = gaps.doubts(times, row.phases, row.asked, AFTER)
    step.check(not doubts, f"{row.name} of {row.capsule}: {'; '.join(doubts)}")
    n = gaps.holding(times, row.asked + (gaps.held_at(row.phases) or 0.0))
    return times[n] - times[n - 1] if n else 0.0
