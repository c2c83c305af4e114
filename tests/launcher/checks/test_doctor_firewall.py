# SPDX-License-Identifier: Apache-2.0
"""The doctor finds firewalls that drop what capsules send through a host.

Each is loaded for real into a network namespace of the test's own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from liveshift.launcher.checks import firewall
from liveshift.launcher.checks.finding import Finding

LOOK = """\
import dataclasses, json
from liveshift.launcher.checks.firewall import forwarding
print(json.dumps([dataclasses.asdict(finding) for finding in forwarding()]))
"""

DOCKER = """
table ip filter {
  chain DOCKER-USER { counter return; }
  chain FORWARD {
    type filter hook forward priority 0; policy drop;
    jump DOCKER-USER
    oifname "docker0" ct state related,established accept
  }
}
"""

FIREWALLD = """
table inet firewalld {
  chain filter_FORWARD {
    type filter hook forward priority 10; policy accept;
    ct state established,related accept
    iifname "lo" accept
    reject with icmpx admin-prohibited
  }
}
"""

HARMLESS = """
table inet filter {
  chain forward { type filter hook forward priority 0; policy accept; tcp dport 25 drop; }
  chain input { type filter hook input priority 0; policy drop; iifname "lo" accept; }
}
table ip liveshift {
  chain through { type filter hook forward priority -300; tcp dport 7400 reject; }
}
"""


class Place:
    """A network namespace; ``run`` runs a command in it."""

    def __init__(self, pid: int) -> None:
        self.inside = ["nsenter", f"--net=/proc/{pid}/ns/net"]

    def run(self, *command: str, text: str = "") -> str:
        done = subprocess.run(
            [*self.inside, *command], input=text, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done
        return done.stdout

    def found(self) -> Finding:
        (said,) = json.loads(self.run(sys.executable, "-c", LOOK))
        return Finding(**said)


@pytest.fixture
def place() -> Iterator[Place]:
    command = ["unshare", "--net", "sh", "-c", "echo ready; exec sleep 300"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as sleeper:
        try:
            assert sleeper.stdout is not None
            assert sleeper.stdout.readline() == "ready\n"
            yield Place(sleeper.pid)
        finally:
            sleeper.kill()


@pytest.mark.root
@pytest.mark.parametrize(
    ("rules", "chain"),
    [
        (DOCKER.replace("ip filter", "ip mine"), "ip mine FORWARD"),
        (FIREWALLD, "inet firewalld filter_FORWARD"),
    ],
)
def test_a_chain_that_drops_by_default_is_opened_as_advised(
    place: Place, rules: str, chain: str
) -> None:
    place.run("nft", "-f", "-", text=HARMLESS + rules)
    finding = place.found()
    assert (finding.verdict, finding.found) == ("warn", f"dropped by default in {chain}")
    first, _, second = finding.advice.partition(";")[0].partition(" && ")
    place.run("sh", "-c", first)
    assert place.found().verdict == "warn", "one of both directions is not enough"
    place.run("sh", "-c", second)
    assert (place.found().verdict, place.found().advice) == ("ok", "")


@pytest.mark.root
def test_docker_s_own_chain_is_named(place: Place) -> None:
    place.run("nft", "-f", "-", text=DOCKER)
    finding = place.found()
    assert finding.found == "dropped by default in ip filter FORWARD"
    assert finding.advice.startswith(
        "iptables -I DOCKER-USER -i lsb+ -j ACCEPT && iptables -I DOCKER-USER -o lsb+ -j ACCEPT;"
    )
    # What iptables makes of it, in nft's words.
    for side in ("iifname", "oifname"):
        rule = f'insert rule ip filter DOCKER-USER {side} "lsb*" counter accept'
        place.run("nft", "-f", "-", text=rule)
    assert place.found().verdict == "ok"


@pytest.mark.root
def test_others_rules_are_no_warning(place: Place) -> None:
    assert (place.found().verdict, place.found().found) == ("ok", "no chain drops it")
    place.run("nft", "-f", "-", text=HARMLESS)
    assert place.found().verdict == "ok"


LEGACY = """\
-P INPUT ACCEPT
-P FORWARD DROP
-P OUTPUT ACCEPT
-A FORWARD -i docker0 -j ACCEPT
"""


def test_iptables_without_nftables() -> None:
    (found,) = firewall.closed_legacy(LEGACY)
    assert found.chain == "iptables FORWARD"
    assert found.advice.startswith("iptables -I FORWARD -i lsb+ -j ACCEPT && ")
    (found,) = firewall.closed_legacy("-N DOCKER-USER\n" + LEGACY)
    assert found.advice.startswith("iptables -I DOCKER-USER -i lsb+")
    half = LEGACY + "-A FORWARD -i lsb+ -j ACCEPT\n"
    assert len([*firewall.closed_legacy(half)]) == 1
    assert list(firewall.closed_legacy(half + "-A DOCKER-USER -o lsb+ -j ACCEPT\n")) == []
    assert list(firewall.closed_legacy(LEGACY.replace("DROP", "ACCEPT"))) == []
    assert list(firewall.closed_legacy("")) == []


def test_rules_that_cannot_be_read_are_no_good_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*command: str) -> Any:
        raise OSError("Operation not permitted")

    monkeypatch.setattr(firewall, "_output_of", broken)
    (finding,) = firewall.forwarding()
    assert finding.verdict == "warn"
    assert "Operation not permitted" in finding.found
