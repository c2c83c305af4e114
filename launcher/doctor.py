# SPDX-License-Identifier: Apache-2.0
"""``liveshift doctor``: can this host run and move a job? Found, needed, and what to do."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..errors import Refused
from ..runtime.config import Paths, Reading
from ..runtime.timeouts import Timeouts
from .checks import data_link, deadlines, kernel, machine, network, software
from .checks.finding import Check, Finding, Verdict

STYLES = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.FAIL: "bold red"}
PLAIN_WIDTH = 160
"""Columns of the table where stdout is no terminal and has no width of its own."""


def doctor(output: str, criu: str | None, reading: Reading | None = None) -> int:
    """Examine this host and print the result to stdout, as "table" or "json".

    ``criu`` is the program to look at, None to search; ``reading`` is a cluster file, without which
    the defaults are looked at. Returns 1 when the main job, a CPU
    training job that moves, can't run here; else 0. Makes and removes one network namespace.
    Raises Refused for another ``output``.
    """
    if output not in ("table", "json"):
        raise Refused(f'cannot print the findings as "{output}"', hint="use -o table or -o json")
    findings = list(examine(criu, reading))
    failed = [finding for finding in findings if finding.verdict is Verdict.FAIL]
    if output == "json":
        told = {"ok": not failed, "checks": [asdict(finding) for finding in findings]}
        json.dump(told, sys.stdout, indent=2, ensure_ascii=False)
        sys.stdout.write("\n")
    else:
        _print(findings, failed)
    return 1 if failed else 0


def examine(criu: str | None, reading: Reading | None = None) -> Iterator[Finding]:
    """Run every check; one that breaks is itself a finding."""
    cluster = reading.cluster if reading else None
    timeouts = cluster.timeouts if cluster else Timeouts()
    state = (cluster.paths if cluster else Paths()).state
    source = reading.file if reading else "the defaults: no --config"
    checks: dict[str, Check] = {
        "privileges": machine.privileges,
        "kernel": kernel.release,
        "checkpoint/restore": kernel.checkpoint_restore,
        "namespaces": kernel.namespaces,
        "network": network.links,
        "data link": partial(data_link.data_link, cluster),
        "CRIU": partial(software.criu, criu),
        "python": software.python,
        "torch": software.torch,
        "memory": machine.memory,
        "pipe-max-size": machine.pipes,
        "/run": machine.run_directory,
        "write tracking": kernel.write_tracking,
        "deadlines": partial(deadlines.deadlines, timeouts, state, source),
        "GPU driver": partial(machine.gpus, cluster.gpu.libraries if cluster else None),
    }
    for name, check in checks.items():
        try:
            yield from check()
        except Exception as error:  # a doctor that dies of the first oddity tells nothing
            found = f"the check broke: {type(error).__name__}: {error}"
            yield Finding(name, found, "", Verdict.FAIL, "report this as a bug")


def _print(findings: list[Finding], failed: list[Finding]) -> None:
    console = Console(file=sys.stdout, highlight=False)
    if not console.is_terminal:
        console = Console(file=sys.stdout, highlight=False, width=PLAIN_WIDTH)
    table = Table("check", "found", "needed", "verdict", "what to do")
    for column in (table.columns[1], table.columns[4]):
        column.ratio, column.overflow = 1, "fold"
    for finding in findings:
        verdict = Text(finding.verdict.value, STYLES[finding.verdict])
        # As Text: what a program said may look like markup.
        words = [Text(t) for t in (finding.check, finding.found, finding.needed)]
        table.add_row(*words, verdict, Text(finding.advice))
    console.print(table)
    if failed:
        names = ", ".join(finding.check for finding in failed)
        console.print(Text(f"The main job can't run here: {names}", STYLES[Verdict.FAIL]))
    else:
        console.print(Text("The main job can run here.", STYLES[Verdict.OK]))
