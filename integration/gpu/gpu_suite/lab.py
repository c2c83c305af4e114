# SPDX-License-Identifier: Apache-2.0
"""Labs for the steps that move jobs: hosts that all see this machine's one GPU."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from lab_session import ROOT, LabSession, a_lab

from .alone import LABS
from .step import Step


@contextmanager
def lab(step: Step, hosts: int, *options: str) -> Iterator[LabSession]:
    """A lab that ends with the step, also with one that is killed."""
    name = "g" + secrets.token_hex(3)
    with (step.work / LABS).open("a") as labs:
        print(name, file=labs)
    where = ("--shared", str(ROOT)) if str(ROOT).startswith(("/tmp/", "/dev/shm/")) else ()
    with a_lab(name, step.work, "--hosts", str(hosts), *where, *options) as session:
        yield session


def in_capsule(step: Step) -> tuple[str, ...]:
    """Put before a command: what lets it find the GPU's libraries, and this suite's modules."""
    kept = ("LD_LIBRARY_PATH", "SIMCUDA_DEVICES", "PYTHONPATH")
    return ("env", *(f"{name}={os.environ[name]}" for name in kept if name in os.environ))
