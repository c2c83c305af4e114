# SPDX-License-Identifier: Apache-2.0
"""The commands of the bit-exact scenarios. Tests that compare results use the same ones, so one
untouched run serves many of them (reference_runs.py leaves ``--pace`` out)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lab_session import GPT, JOBS, SUPPORT, TORCHRUN

PACED_GPT = (str(SUPPORT / "paced_gpt.py"), "--pace", "0.2", "--batch", "4", "--block", "16")
TRAIN_GPT = (*TORCHRUN, *PACED_GPT, "--out", "{out}", "--steps", "160")
PLAIN_GPT = ("python", *PACED_GPT, "--out", "{out}", "--steps", "160")
SMALL_GPT = (str(GPT), "--batch", "8", "--block", "32", "--out", "{out}", "--steps")
LOADER = (
    *("torchrun", "--nproc-per-node", "2", str(JOBS / "loader.py")),
    *("--steps", "240", "--pace", "0.09", "--out", "{out}", "--contexts", "fork", "spawn"),
)
"""Two ranks in one capsule, with workers that the DataLoader forks and spawns."""
FSDP = (*TORCHRUN, str(JOBS / "fsdp.py"), "--steps", "240", "--pace", "0.05", "--out", "{out}")
CARRIED = (
    *("python", str(JOBS / "carried.py"), "--out", "{out}"),
    *("--steps", "900", "--pace", "0.05"),  # two moves long, also on a machine with other work
)
"""``--own DIRECTORY`` is still missing."""


@dataclass(frozen=True)
class Scenario:
    """``ranks``: of all capsules. ``ends``: after so many steps, which it takes minutes for.
    ``untouched``: the command whose results are the same, if it is not ``argv`` itself."""

    argv: Sequence[str]
    nnodes: int
    ranks: int
    ends: bool = True
    untouched: Sequence[str] = ()
