# SPDX-License-Identifier: Apache-2.0
"""What commands print with ``-o json`` that no type of the package describes.

For docs/json.md only (json_fields.py); test_json_fields.py holds these against what the
commands print.
"""

from __future__ import annotations

from dataclasses import dataclass

from liveshift.launcher.checks.finding import Finding
from liveshift.launcher.show import timeouts_view
from liveshift.runtime import messages


@dataclass
class Reason:
    """Why a capsule does not leave."""

    error: str
    hint: str | None


@dataclass
class Drained:
    """`left`: the capsules that are still there; `refused`: those of them that cannot move;
    `holds`: suspended jobs whose images are in the host's memory and nowhere else;
    `empty_s`: seconds after which the host was to be empty, null where that was not known;
    `deadline`: how it was to become empty in time, null where there was no deadline."""

    host: str
    empty: bool
    left: list[str]
    holds: list[str]
    moves: list[messages.MigrationRow]
    refused: dict[str, Reason]
    empty_s: float | None
    deadline: messages.Evacuating | None


@dataclass
class DrainPlan:
    """`lacking_slots`: how many more slots the other hosts would need. `empty_s`: seconds until the
    host would be empty, null where that is not known; `deadline`: how it would become empty in
    time, null without `--within` and `--severity`."""

    host: str
    moves: list[messages.Planned]
    refused: dict[str, Reason]
    free_slots: int
    lacking_slots: int
    empty_s: float | None
    deadline: messages.Evacuating | None


@dataclass
class Tainted:
    """`capsules`: those that will move; `taint`: the reason that was given; `deadline`: how the
    host will become empty in time, null where there is no deadline."""

    host: str
    taint: str
    capsules: list[str]
    deadline: messages.Evacuating | None


@dataclass
class Stopped:
    """`state`: ended or, with `--no-wait`, ending; `code`: null while it is not known."""

    job: str
    state: str
    code: int | None


@dataclass
class Rewound:
    """`state`: rewound or, with `--no-wait`, ordered. `ago`: seconds between the snapshot and the
    order; they are trained again. `where`: the host of each capsule that was planned. `text`: how
    it went, in words."""

    job: str
    state: str
    snapshot: str
    ago: float
    where: dict[str, str]
    text: str


@dataclass
class Saved:
    """`state` is saved; saving with `--no-wait`; running with `--dry-run`. `holders` names the host
    whose memory the image of each capsule goes through; it is empty if a move went first. `text`
    says what was done."""

    job: str
    directory: str
    holders: dict[str, str]
    state: str
    text: str


@dataclass
class Suspended:
    """`state` is suspended; suspending with `--no-wait`; running with `--dry-run`. `holders` names
    the host that holds the image of each capsule, as far as it was chosen when the suspension was
    ordered: it is empty if a move went first. `text` says what was done."""

    job: str
    holders: dict[str, str]
    state: str
    text: str


@dataclass
class Resumed:
    """`state` is running; resuming with `--no-wait`; suspended with `--dry-run`. The job had been
    suspended for `suspended_s` seconds. `where` names the planned host of each capsule. `text` says
    what was done."""

    job: str
    snapshot: str
    suspended_s: float
    where: dict[str, str]
    state: str
    text: str


@dataclass
class Examined:
    """`ok`: whether the main job can run here, as the exit code says."""

    ok: bool
    warnings: int
    checks: list[Finding]


@dataclass
class KeyEntry:
    """`since`: when the key was revoked, as the ring writes it; `role`: of operators only."""

    name: str
    kind: str
    role: str | None
    state: str
    since: str | None
    file: str
    problem: str | None


@dataclass
class DeadlineRule:
    """`sum`: deadlines that together must fit into `bound`."""

    sum: str
    seconds: float
    bound: str
    bound_seconds: float
    why: str


@dataclass
class Validated:
    """`digest`: hosts with an equal one use an equal file."""

    file: str
    cluster: str
    hosts: list[str]
    digest: str
    deadlines: list[timeouts_view.DeadlineRow]
    rules: list[DeadlineRule]


@dataclass
class Setting:
    """`line`: of the file; null where the value is the default."""

    key: str
    value: object
    line: int | None


@dataclass
class Variable:
    """`value`: null where the variable is left alone."""

    name: str
    value: str | None
    reason: str


@dataclass
class Configuration:
    """`environment`: what every job gets where its caller says nothing else."""

    file: str
    digest: str
    settings: list[Setting]
    environment: list[Variable]


@dataclass
class Changed:
    """`done`: added or removed; `files`: keys that were written; `commands`: what remains."""

    done: str
    files: list[str]
    commands: list[str]


@dataclass
class LabRow:
    """`state`: running, down or broken."""

    name: str
    state: str
    hosts: list[str]
    directory: str
