# SPDX-License-Identifier: Apache-2.0
"""A soak whose hosts lose their power: the job is moved and rewound, and is the same in the end."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from lab_session import LabSession, a_lab, environment, eventually
from moving_job import BEFORE
from protected_job import wait_protected
from reference_runs import References

from liveshift.launcher.lab.plan import CONTROL
from liveshift.runtime.agent.host.repeated_output import MOST_SEGMENTS

from .compare import differences, steps
from .growth import BYTES_ALLOWED, left_over, suspicious, usage
from .losses import Losses, SpareRounds, unexplained
from .report import Report, Spread
from .story import NAME, RANKS, SAMPLES, Tell, quiet, settled, start
from .watch import Sample, Watch

HOSTS = RANKS + 3
"""Two run ranks, two may hold images, and one takes what moves."""
STEADY = f"h{HOSTS - 1}"
"""Its power is never cut. Growth is asked of its agent and of the orchestrator."""
NOTES = RANKS * HOSTS * (1 + MOST_SEGMENTS)
"""Files that hosts may have more of: each host keeps a small note of each capsule that has left,
and what it printed before it was rewound."""
IMAGES = "run, bytes"
OPTIONS = ("--hosts", str(HOSTS), "--snapshots", "every=2", "--timeouts", "suspicion=1")


def soak_with_losses(
    name: str, place: Path, seconds: float, tell: Tell, mean: float, seed: int
) -> Report:
    """As story.soak, while one host of the job loses its power every ``mean`` seconds on average.

    What there is on the hosts is compared after the job's end with what there was after the end of
    a first job of that name. Raises AssertionError or LiveshiftError when it cannot go on.
    """
    with a_lab(name, place, *OPTIONS) as session:
        watch = Watch(session.lab, max(2.0, seconds / SAMPLES), kept={CONTROL, STEADY})
        _first(session)
        eventually(lambda: watch.take().things[IMAGES] < BYTES_ALLOWED, "images to go", 30)
        before = quiet(watch)
        job = start(session, seconds)
        wait_protected(job)
        rounds = SpareRounds(session.lab.socket, NAME, RANKS)
        losses = Losses(job, mean, seed, STEADY)
        began = time.monotonic()

        def goes_on() -> bool:
            watch.moves = len(rounds.rows)
            losses.check()
            if rounds.rows:
                tell(rounds, watch, time.monotonic() - began)
            return time.monotonic() - began < seconds

        try:
            with losses.running(), watch.running():
                rounds.go(goes_on)
        except AssertionError as error:  # the lab will be gone
            raise AssertionError(f"{error}\n{session.last_words()}") from error
        took = time.monotonic() - began
        job.go_on(BEFORE)
        job.stop()
        watch.lab = session.lab  # hosts were booted again
        after = settled(watch, before, NOTES)
        found = usage(_daemons_that_lived(watch.samples))
        problems = unexplained(rounds.failed, losses.rows)
        problems += suspicious(found, took) + left_over(before, after, NOTES)
        if not any(loss.ran for loss in losses.rows) or not rounds.rows:
            problems.append(f"too short: {len(losses.rows)} losses, {len(rounds.rows)} moves")
    made = steps(job.out, 0)
    references = References(place, environment())
    argv = (*job.argv[: job.argv.index("--steps")], "--steps", str(made))
    unlike = differences(job.out, references.directory(argv, RANKS), RANKS)
    done = [row for row in rounds.rows if row.state == "done"]
    back = [loss.back_s for loss in losses.rows if loss.ran]
    return Report(
        seconds=took,
        steps=made,
        moves=len(rounds.rows),
        failed=len(rounds.failed),
        refused=rounds.refused,
        moves_per_minute=len(rounds.rows) / took * 60,
        pause=Spread.of([row.frozen_s for row in done] or [0.0]),
        whole=Spread.of([row.seconds for row in done] or [0.0]),
        image_bytes=max((row.image_bytes for row in done), default=0),
        identical=not unlike,
        daemons=found,
        before=before,
        after=after,
        samples=watch.samples,
        pauses=[row.frozen_s for row in done],
        problems=problems + unlike,
        losses=losses.rows,
        back=Spread.of(back or [0.0]),
    )


def _first(session: LabSession) -> None:
    """A job of the same shape that has been on each host, to its end: what hosts keep of an ended
    job is there then."""
    job = start(session, 1.0)
    wait_protected(job)
    for host in (f"h{number}" for number in range(HOSTS)):
        if host not in {job.capsule(index).host for index in range(RANKS)}:
            session.cli("migrate", f"{NAME}/0", "--to", host, "--no-cost")
    job.stop()
    session.jobs.remove(job)
    shutil.rmtree(job.out)


def _daemons_that_lived(samples: list[Sample]) -> list[Sample]:
    return [sample for sample in samples if {CONTROL, STEADY} <= sample.daemons.keys()]
