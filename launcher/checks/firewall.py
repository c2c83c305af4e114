# SPDX-License-Identifier: Apache-2.0
"""Checks whether a firewall of this machine stops what capsules send through it.

The machine forwards what a capsule sends to the world. If br_netfilter is loaded (container engines
may load it), the frames between capsules on one bridge come to the same hook. nftables asks every
chain at that hook. So a chain of another program that drops by default drops them, although
liveshift's own table accepts them.
"""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ...criu_glue.network.overlay import BRIDGES
from .finding import DEADLINE_S, Finding, Verdict

FORWARDS = "FORWARD"
DOCKER = "DOCKER-USER"
"""The chain that Docker asks first. Docker leaves its rules to the administrator."""

LEGACY_TABLES = Path("/proc/net/ip_tables_names")
"""This file names the tables that iptables without nftables has in this network namespace."""

INTERFACES = BRIDGES.replace("*", "+")
"""The pattern of our bridges as iptables writes it."""

Rule = dict[str, Any]


class ClosedChain(NamedTuple):
    """A chain that drops forwarded packets by default, and the commands that let packets of
    capsules pass."""

    chain: str
    advice: str


def forwarding() -> Iterator[Finding]:
    """Look for chains at the forward hook that drop by default and have no rule for our bridges."""
    needed = f"what {BRIDGES} forward is accepted in every chain that drops by default"
    try:
        ruleset = json.loads(_output_of("nft", "-j", "list", "ruleset") or '{"nftables": []}')
        found = [*closed(ruleset["nftables"]), *closed_legacy(_legacy())]
    except (OSError, ValueError, KeyError, subprocess.SubprocessError) as error:
        problem = f"cannot read this machine's rules: {error}"
        advice = "run as root; `nft -j list ruleset` must work"
        yield Finding("forwarding", problem, needed, Verdict.WARN, advice)
        return
    if found:
        names = ", ".join(chain for chain, _ in found)
        advice = "; ".join(advice for _, advice in found)
        text = f"dropped by default in {names}"
        yield Finding("forwarding", text, needed, Verdict.WARN, f"{advice}; keep the rules")
    else:
        yield Finding("forwarding", "no chain drops it", needed, Verdict.OK)


def closed(ruleset: Iterable[dict[str, Any]]) -> Iterator[ClosedChain]:
    """Find chains that drop by default in the output of ``nft -j list ruleset``. A rule for our
    bridges counts anywhere in the chain's table."""
    known: list[dict[str, Any]] = [entry for entry in ruleset if len(entry) == 1]
    chains = [entry["chain"] for entry in known if "chain" in entry]
    rules: list[Rule] = [entry["rule"] for entry in known if "rule" in entry]
    for chain in chains:
        where = (chain["family"], chain["table"])
        if chain.get("hook") != "forward" or where[0] not in ("ip", "inet"):
            continue
        in_table = [rule for rule in rules if (rule["family"], rule["table"]) == where]
        own = [rule for rule in in_table if rule["chain"] == chain["name"]]
        drops = chain.get("policy") == "drop" or (own and _drops_all(own[-1]))
        if not drops or {"iifname", "oifname"} <= {side for r in in_table for side in _opens(r)}:
            continue
        names = {c["name"] for c in chains if (c["family"], c["table"]) == where}
        name = " ".join((*where, chain["name"]))
        yield ClosedChain(name, _advice(name, names))


def closed_legacy(rules: str) -> Iterator[ClosedChain]:
    """Find a chain that drops by default in the output of ``iptables -S``."""
    lines = [line.split() for line in rules.splitlines()]
    accepting = [rule for rule in lines if rule[-2:] == ["-j", "ACCEPT"]]
    opened = {side for rule in accepting for side in ("-i", "-o") if _has(rule, side)}
    if ["-P", FORWARDS, "DROP"] in lines and len(opened) < 2:
        names = {rule[1] for rule in lines if rule[0] == "-N"}
        yield ClosedChain(f"iptables {FORWARDS}", _advice("ip filter FORWARD", names))


def _has(rule: list[str], side: str) -> bool:
    return any(pair == (side, INTERFACES) for pair in itertools.pairwise(rule))


def _advice(chain: str, names: set[str]) -> str:
    """Return the commands that open a chain. iptables must change its own tables."""
    if chain == "ip filter FORWARD":
        into = DOCKER if DOCKER in names else FORWARDS
        return " && ".join(
            f"iptables -I {into} {side} {INTERFACES} -j ACCEPT" for side in ("-i", "-o")
        )
    return " && ".join(
        f"nft insert rule {chain} {side} '\"{BRIDGES}\"' accept" for side in ("iifname", "oifname")
    )


def _drops_all(rule: Rule) -> bool:
    kinds = {kind for part in rule["expr"] for kind in part}
    return bool(kinds & {"drop", "reject"}) and kinds <= {"drop", "reject", "counter", "log"}


def _opens(rule: Rule) -> Iterator[str]:
    """Yield the sides (iifname, oifname) for which a rule accepts what our bridges forward."""
    if not any("accept" in part for part in rule["expr"]):
        return
    for part in rule["expr"]:
        match = part.get("match", {})
        left = match.get("left")
        if match.get("right") == BRIDGES and match.get("op") == "==" and isinstance(left, dict):
            yield left.get("meta", {}).get("key", "")


def _legacy() -> str:
    """Return the rules of the iptables that predates nftables. If it has no tables, it is not
    asked, since that would load its kernel modules."""
    if not LEGACY_TABLES.exists() or "filter" not in LEGACY_TABLES.read_text().split():
        return ""
    return _output_of(shutil.which("iptables-legacy") or "iptables", "-S")


def _output_of(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    if done.returncode != 0:
        raise OSError(done.stderr.strip() or f"{command[0]} ended with {done.returncode}")
    return done.stdout
