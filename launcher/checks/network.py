# SPDX-License-Identifier: Apache-2.0
"""Checks the network that capsules need, by making it in a temporary network namespace."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...criu_glue.network import fence
from ...criu_glue.network.overlay import Overlay
from .finding import Finding, Verdict, attempt, judged

PREFIX = "lsdoc-"

JOB = Overlay(77, "198.18.0.0/24")
FENCE = fence.laying(
    JOB,
    "192.0.2.1",
    fence.Surroundings(
        ["192.0.2.1", "192.0.2.2"],
        "198.18.0.0/15",
        control=[("192.0.2.1", 7400)],
        agents=[("192.0.2.2", 7401)],
    ),
) + fence.guarding(JOB, 0, 1000)
"""The rules that an agent loads for a job and its first capsule."""

LOCK_AND_MASQUERADE = """
table inet lsdoc {
    chain in { type filter hook input priority -300; iifname "eth0" drop; }
    chain out { type nat hook postrouting priority 100; oifname "eth0" masquerade; }
}
"""
"""Rules as an agent loads them: the lock of a capsule's network, and the way out to the world."""

LOSS = """
table inet lsdoc_lab {
    chain in { type filter hook input priority 0; numgen random mod 100 < 1 drop; }
}
"""


def links() -> Iterator[Finding]:
    """Try veth, bridge, VXLAN and nftables, then what only the lab's bad links need."""
    with _namespace() as (name, problem):
        if problem is not None:
            advice = "run as root; install iproute2"
            yield Finding("network namespace", problem, "ip netns", Verdict.FAIL, advice)
            return
        ip = ("ip", "-n", name, "link", "add")
        in_it = ("ip", "netns", "exec", name)
        veth = ("type", "veth", "peer", "name", JOB.veth(0))
        yield _tried("veth", attempt(*ip, "eth0", *veth), "veth")
        yield _tried("bridge", attempt(*ip, "ov", "type", "bridge"), "bridge")
        vxlan = "vx0 type vxlan id 77 dstport 4789 nolearning local 127.0.0.1"
        yield _tried("VXLAN", attempt(*ip, *vxlan.split()), "vxlan")
        rules = attempt(*in_it, "nft", "-f", "-", script=LOCK_AND_MASQUERADE)
        yield judged(
            "nftables",
            rules or "loaded a drop rule and masquerading",
            "drop rules, masquerading",
            not rules,
            "install nftables; the kernel needs CONFIG_NF_TABLES_INET, CONFIG_NFT_MASQ",
        )
        laid = attempt(*in_it, "nft", "-f", "-", script=FENCE)
        yield judged(
            "fence",
            laid or "laid one around a job's overlay",
            "rules on raw payload, at ingress, that reject",
            not laid,
            "nftables >= 1.0.6; the kernel needs CONFIG_NF_TABLES_NETDEV, CONFIG_NFT_REJECT",
        )
        yield _bad_links(name, in_it)


def _bad_links(name: str, in_it: tuple[str, ...]) -> Finding:
    queue = ("tbf", "rate", "100mbit", "burst", "32k", "latency", "50ms")
    reasons = {
        "tbf": attempt("tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", *queue),
        "nft numgen": attempt(*in_it, "nft", "-f", "-", script=LOSS),
    }
    refused = [f"{what}: {reason}" for what, reason in reasons.items() if reason is not None]
    return judged(
        "lab's bad links",
        "; ".join(refused) or "tbf, nft numgen",
        "optional: slow and lossy links in the lab",
        not refused,
        "tests of slow and lossy links will not run here",
        Verdict.WARN,
    )


def _tried(check: str, problem: str | None, module: str) -> Finding:
    advice = f"modprobe {module}, or boot a kernel that has it"
    return judged(check, problem or "made one", f"{module} links", not problem, advice)


@contextmanager
def _namespace() -> Iterator[tuple[str, str | None]]:
    """Make a network namespace. Yields its name, and why it was not made (None: it was made). At
    the end it is removed with everything in it."""
    _sweep()
    name = f"{PREFIX}{os.getpid()}"
    problem = attempt("ip", "netns", "add", name)
    try:
        yield name, problem
    finally:
        if problem is None:
            attempt("ip", "netns", "delete", name)


def _sweep() -> None:
    """Remove the namespaces of doctors that were killed."""
    for path in Path("/run/netns").glob(f"{PREFIX}*"):
        pid = path.name.removeprefix(PREFIX)
        if pid.isdecimal() and not Path("/proc", pid).exists():
            attempt("ip", "netns", "delete", path.name)
