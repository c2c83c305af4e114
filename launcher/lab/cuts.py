# SPDX-License-Identifier: Apache-2.0
"""Cutting two machines of a lab off from each other, and from nobody else.

The switch forwards nothing between their two ports, in either direction and of any protocol; the
ports stay up, so neither machine is told. A rule names ports, not addresses: it holds for what
capsules send too, and for a host that was booted anew.
"""

from __future__ import annotations

from ...errors import WrongUsage
from . import wiring
from .commands import run
from .record import Lab, claim

_TABLE = "table bridge lab_cuts"


def separate(lab: Lab, one: str, other: str) -> None:
    """Let nothing pass between two machines (hosts or ``ctl``); may be repeated.

    Raises NotFound for one that is not there, WrongUsage when they are the same.
    """
    _change(lab, one, other, cut=True)


def rejoin(lab: Lab, one: str, other: str) -> None:
    """Take back a :func:`separate`; nothing happens when there was none. Raises like it."""
    _change(lab, one, other, cut=False)


def cut_off_from(lab: Lab, host: str) -> list[str]:
    """The machines that a host is separated from."""
    return sorted({name for pair in lab.cuts if host in pair for name in pair} - {host})


def forget(lab: Lab, host: str) -> None:
    """Mend all of a host's; the caller holds the lab's lock and saves the lab."""
    kept = [pair for pair in lab.cuts if host not in pair]
    if kept != lab.cuts:
        _apply(lab, kept)
        lab.cuts = kept


def rules(cuts: list[tuple[str, str]]) -> str:
    """The nft rules of all cuts, in place of earlier ones."""
    lines = [f"{_TABLE} {{}}", f"delete {_TABLE}"]
    if cuts:
        lines += [f"{_TABLE} {{ chain forward {{", "type filter hook forward priority 0;"]
        for one, other in cuts:
            lines += [f'iifname "{a}" oifname "{b}" drop' for a, b in ((one, other), (other, one))]
        lines += ["}", "}"]
    return "".join(f"{line}\n" for line in lines)


def _change(lab: Lab, one: str, other: str, *, cut: bool) -> None:
    if one == other:
        raise WrongUsage(f"{one} cannot be cut off from itself")
    with claim(lab.directory):
        lab.refresh()
        for name in (one, other):
            lab.machine(name)
        pair = (min(one, other), max(one, other))
        cuts = [known for known in lab.cuts if known != pair] + ([pair] if cut else [])
        _apply(lab, cuts)
        lab.cuts = cuts
        lab.save()


def _apply(lab: Lab, cuts: list[tuple[str, str]]) -> None:
    inside = ["nsenter", f"--net={wiring.NAMED / lab.switch}", "--"]
    run([*inside, "nft", "-f", "-"], stdin=rules(cuts))
