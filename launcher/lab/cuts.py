# SPDX-License-Identifier: Apache-2.0
"""Cuts two machines of a lab off from each other, and from no other machine.

The switch forwards nothing between their two ports, in either direction, of any protocol. The ports
stay up, so neither machine sees its link go down. A rule names ports, not addresses, so it also
stops what capsules send. ``kill_host`` removes the cuts of a host, so a host boots without any.
"""

from __future__ import annotations

from ...errors import WrongUsage
from . import wiring
from .commands import run
from .record import Lab, claim

_TABLE = "table bridge lab_cuts"


def separate(lab: Lab, one: str, other: str) -> None:
    """Let nothing pass between two machines (hosts or ``ctl``). May be repeated.

    Raises NotFound for an unknown machine, WrongUsage if both are the same, and what
    :func:`claim` raises.
    """
    _change(lab, one, other, cut=True)


def rejoin(lab: Lab, one: str, other: str) -> None:
    """Undo :func:`separate`. Without a cut nothing happens. Raises like it."""
    _change(lab, one, other, cut=False)


def cut_off_from(lab: Lab, host: str) -> list[str]:
    """Return the machines from which a host is separated."""
    return sorted({name for pair in lab.cuts if host in pair for name in pair} - {host})


def forget(lab: Lab, host: str) -> None:
    """Remove all cuts of a host. The caller holds the lab's lock and saves the lab."""
    kept = [pair for pair in lab.cuts if host not in pair]
    if kept != lab.cuts:
        _apply(lab, kept)
        lab.cuts = kept


def rules(cuts: list[tuple[str, str]]) -> str:
    """Return the nft rules of all cuts. They replace the earlier ones."""
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
