# SPDX-License-Identifier: Apache-2.0
"""A soak, from the first step of the job to the verdict."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from lab_session import JOBS, LabSession, a_lab, environment, eventually
from moving_job import BEFORE, Job
from reference_runs import References

from .compare import differences, steps, unborne
from .growth import PEAK, left_over, suspicious, too_large, usage
from .report import Report, Spread
from .rounds import Rounds
from .watch import Watch

RANKS = 2
HOSTS = RANKS + 1
NAME = "soak"
PACE_S = 0.1
SAMPLES = 240
"""So many samples of a long run, but no more than one every two seconds."""
QUIET_S = 15.0
"""So long it may take until hosts have put away what the last move left."""
WARM_ROUNDS = 2
"""Every rank has been on every host before it is said what there is of each kind."""

Tell = Callable[[Rounds, Watch, float], None]


def soak(name: str, place: Path, seconds: float, tell: Tell, beside: int = 0) -> Report:
    """Move a job on a lab ``name`` for so long; its results are left below ``place``.

    ``tell`` hears after every move: the moves, the samples, the seconds so far. ``beside``: so many
    jobs that do nothing are on the hosts meanwhile; what an agent may take for them is judged.
    Raises AssertionError or LiveshiftError when it cannot go on.
    """
    every = max(2.0, seconds / SAMPLES)
    slots = 1 + -(-beside // HOSTS)
    with a_lab(name, place, "--hosts", str(HOSTS), "--slots", str(slots)) as session:
        job = start(session, seconds)
        for number in range(beside):
            session.cli("run", "--detach", "--name", f"idle-{number}", "--", "sleep", "infinity")
        rounds = Rounds(session.lab.socket, NAME, RANKS)
        watch = Watch(session.lab, every)
        moved = len(rounds.rows)
        rounds.go(lambda: len(rounds.rows) < moved + WARM_ROUNDS * RANKS * HOSTS)
        before = quiet(watch)
        began = time.monotonic()

        def goes_on() -> bool:
            watch.moves = len(rounds.rows)
            tell(rounds, watch, time.monotonic() - began)
            return time.monotonic() - began < seconds and not rounds.failed

        with watch.running():
            rounds.go(goes_on)
        took = time.monotonic() - began
        after = settled(watch, before)
        job.go_on(BEFORE)
        job.stop()
        found = usage(watch.samples)
        problems = [f"{row.name} {row.state}: {row.error}" for row in rounds.failed]
        problems += unborne(job.out, rounds.rows)
        problems += suspicious(found, took) + left_over(before, after) + _said(session)
        problems += _memory(watch, beside) if beside else []
    made = steps(job.out, 0)
    references = References(place, environment())
    argv = ("python", str(JOBS / "tiny.py"), "--out", "{out}", "--steps", str(made))
    unlike = differences(job.out, references.directory(argv, RANKS), RANKS)
    return Report(
        seconds=took,
        steps=made,
        moves=len(rounds.rows),
        failed=len(rounds.failed),
        refused=rounds.refused,
        moves_per_minute=(len(rounds.rows) - WARM_ROUNDS * RANKS * HOSTS) / took * 60,
        pause=Spread.of([row.frozen_s for row in rounds.rows]),
        whole=Spread.of([row.seconds for row in rounds.rows]),
        image_bytes=max(row.image_bytes for row in rounds.rows),
        identical=not unlike,
        daemons=found,
        before=before,
        after=after,
        samples=watch.samples,
        pauses=[row.frozen_s for row in rounds.rows],
        problems=problems + unlike,
    )


def start(session: LabSession, seconds: float) -> Job:
    """The job, of which a run of so many seconds never sees the end."""
    most = int(4 * (seconds + 600) / PACE_S)  # never reached: it is told that it is enough
    argv = (
        *("python", str(JOBS / "tiny.py"), "--out", "{out}"),
        *("--steps", str(most), "--pace", str(PACE_S), "--enough", "{out}/enough"),
    )
    job = session.start(NAME, argv, nnodes=RANKS)
    job.wait_step(BEFORE)
    return job


def quiet(watch: Watch) -> dict[str, int]:
    """What there is of each kind once two looks in a row see the same; files may grow."""
    seen: list[dict[str, int]] = []

    def same() -> bool:
        seen.append(watch.take().things)
        counts = [{k: v for k, v in look.items() if "bytes" not in k} for look in seen[-2:]]
        return len(counts) == 2 and counts[0] == counts[1]

    eventually(same, "hosts to come to rest", QUIET_S)
    watch.samples.clear()
    watch.take()
    return seen[-1]


def settled(watch: Watch, before: dict[str, int], notes: int = 0) -> dict[str, int]:
    """What there is once nothing more is there than before; or at last, if that never comes."""
    until = time.monotonic() + QUIET_S
    while left_over(before, seen := watch.take().things, notes) and time.monotonic() < until:
        time.sleep(0.2)
    return seen


def _memory(watch: Watch, beside: int) -> list[str]:
    """Which daemons still have too much once they have had time to give back what moves needed, and
    which had far too much at some moment of the moves."""
    peaks = [f"at its peak, {words}" for words in too_large(watch.samples, beside, PEAK)]
    until = time.monotonic() + QUIET_S
    while (found := too_large([watch.take()], beside)) and time.monotonic() < until:
        time.sleep(0.5)
    return peaks + found


def _said(session: LabSession) -> list[str]:
    """Errors in what the daemons said, one line for each daemon."""
    found = []
    for log in sorted((session.lab.directory / "log").iterdir()):
        lines = [
            line
            for line in log.read_text(errors="replace").splitlines()
            if " ERROR " in line or line.startswith("Traceback")
        ]
        if lines:
            found.append(f"{log.stem} logged {len(lines)} errors, the first: {lines[0][:200]}")
    return found
