# SPDX-License-Identifier: Apache-2.0
"""One row of the doctor's table."""

from __future__ import annotations

import enum
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass

DEADLINE_S = 20.0
"""One command of a check may take this many seconds. On a healthy host it takes milliseconds."""


class Verdict(enum.StrEnum):
    """What a finding means for the main job: a CPU training job that moves."""

    OK = "ok"
    WARN = "warn"  # it runs, but something is slower, missing for later, or missing for tests
    FAIL = "fail"  # it can't run here


@dataclass(frozen=True)
class Finding:
    """What was checked, what was found, what is needed, and what to do about it."""

    check: str
    found: str
    needed: str
    verdict: Verdict
    advice: str = ""


def judged(
    check: str, found: str, needed: str, good: bool, advice: str, otherwise: Verdict = Verdict.FAIL
) -> Finding:
    """Return a finding that is OK if ``good``; else it has the verdict ``otherwise`` and advice."""
    return Finding(check, found, needed, Verdict.OK if good else otherwise, "" if good else advice)


Check = Callable[[], Iterable[Finding]]


def attempt(*command: str, script: str | None = None) -> str | None:
    """Run a command with ``script`` on its stdin. Returns None if it succeeded, else the first line
    of its output, or what went wrong."""
    try:
        done = subprocess.run(
            command,
            input=script or "",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=DEADLINE_S,
        )
    except FileNotFoundError:
        return f"the program {command[0]} is missing"
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return None
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    return lines[0] if lines else f"{command[0]} ended with {done.returncode}"
