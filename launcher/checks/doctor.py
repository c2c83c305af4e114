# SPDX-License-Identifier: Apache-2.0
"""``liveshift doctor``: checks whether this host can run and move a job, and says what to do."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from functools import partial

from rich.text import Text

from ...runtime.config.cluster import Paths, Reading
from ...runtime.config.timeouts import Timeouts
from ..show import render
from ..show.visible_text import VisibleConsole
from . import cluster as cluster_checks
from . import data_link, deadlines, firewall, kernel, machine, network, software
from .finding import Check, Finding, Verdict

STYLES = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.FAIL: "bold red"}
LEAST_WIDTH = 30
"""The text of a finding gets at least this many columns, even on a narrow terminal."""


def doctor(output: str, criu: str | None, reading: Reading | None = None) -> int:
    """Examine this host and print the result to stdout, as "table" or "json".

    ``criu``: the program to look at; None: search for it. ``reading``: a cluster file; without one
    the defaults are checked. Returns 1 if the main job, a CPU training job that moves, can't run
    here; else 0. Makes and removes one network namespace.
    """
    findings = list(examine(criu, reading))
    failed = [finding for finding in findings if finding.verdict is Verdict.FAIL]
    if output == "json":
        warnings = sum(finding.verdict is Verdict.WARN for finding in findings)
        render.print_json({"ok": not failed, "warnings": warnings, "checks": findings})
    else:
        _print(findings)
    return 1 if failed else 0


def examine(criu: str | None, reading: Reading | None = None) -> Iterator[Finding]:
    """Run every check. A check that raises becomes a finding itself."""
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
        "forwarding": firewall.forwarding,
        "data link": partial(data_link.data_link, cluster),
        "keys": partial(cluster_checks.own_keys, cluster),
        "ports": partial(cluster_checks.ports, cluster),
        "cluster files": partial(cluster_checks.equal_files, cluster),
        "shared paths": partial(cluster_checks.shared_paths, cluster),
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
        except Exception as error:  # a broken check must not hide the others
            found = f"the check broke: {type(error).__name__}: {error}"
            yield Finding(name, found, "", Verdict.FAIL, "report this as a bug")


def _print(findings: list[Finding]) -> None:
    """Print a line for each check, and below it what is needed and what to do, if that matters."""
    console = VisibleConsole(file=sys.stdout, highlight=False)
    width = console.width if console.is_terminal else None
    first = max(len(finding.check) for finding in findings)
    for finding in findings:
        # As Text, since the output of a program may look like markup.
        verdict = Text(f"{finding.verdict.value:<4}", STYLES[finding.verdict])
        rows = [(f"{finding.check:<{first}}  ", finding.found)]
        if finding.verdict is not Verdict.OK and finding.needed:
            rows.append((" " * (first + 2) + "needed: ", finding.needed))
        if finding.advice:
            rows.append((" " * (first + 2) + "do: ", finding.advice))
        for number, (head, text) in enumerate(rows):
            lead = Text.assemble(Text("    ") if number else verdict, "  ", head)
            for part in _wrapped(text, width, len(lead.plain)):
                console.print(Text.assemble(lead, part), soft_wrap=True)
                lead = Text(" " * len(lead.plain))
    text, worst = summary(findings)
    for part in _wrapped(text, width, 0):
        console.print(Text(part, STYLES[worst]), soft_wrap=True)


def summary(findings: list[Finding]) -> tuple[str, Verdict]:
    """Return the last line (can the main job run here, and the warnings) and the worst verdict."""
    failed = [finding.check for finding in findings if finding.verdict is Verdict.FAIL]
    warned = [finding.check for finding in findings if finding.verdict is Verdict.WARN]
    many = f"{len(warned)} warning{'s' if len(warned) > 1 else ''} ({', '.join(warned)})"
    if failed:
        also = f"; {many}" if warned else ""
        return f"The main job can't run here: {', '.join(failed)}{also}", Verdict.FAIL
    if warned:
        return f"The main job can run here, with {many}.", Verdict.WARN
    return "The main job can run here.", Verdict.OK


def _wrapped(text: str, width: int | None, indent: int) -> list[str]:
    """Break words into lines that fit a terminal after ``indent`` columns. A pipe (``width`` None)
    gets one line."""
    if width is None:
        return [" ".join(text.split())]
    return textwrap.wrap(text, max(LEAST_WIDTH, width - indent)) or [""]
