# SPDX-License-Identifier: Apache-2.0
"""Which interface images go over, and when that is worth a warning."""

from __future__ import annotations

import socket
from pathlib import Path

import psutil
import pytest
from cluster_files import SMALL
from msgspec.structs import replace

from liveshift.launcher.checks import data_link as check
from liveshift.launcher.checks.finding import Verdict
from liveshift.launcher.show.status_tables import hosts, warnings
from liveshift.runtime.agent.host.data_link import Interface, interfaces, read_link
from liveshift.runtime.config.cluster import parse
from liveshift.runtime.messages import HostRow
from liveshift.runtime.model import link_rates
from liveshift.runtime.model.link_rates import FILE, Measured, bits

GBIT = 10**9
ETH = Interface("eth0", True, 10 * GBIT, ("10.88.0.10",), True)
FAST = Interface("ib0", True, 100 * GBIT, ("10.1.0.10",), True)


def measured(**rates: float) -> dict[str, Measured]:
    return {host: Measured(rate, 0.0) for host, rate in rates.items()}


def warned(*among: Interface, **rates: float) -> str:
    return read_link("h0", "10.88.0.10", measured(**rates), list(among)).warning


def test_the_interface_with_the_address_is_said_with_its_rates() -> None:
    link = read_link("h0", "10.88.0.10", measured(h1=1.1e9), [ETH])
    assert (link.interface, link.speed, link.up) == ("eth0", 10 * GBIT, True)
    assert link.rates == {"h1": 1.1e9}
    assert link.warning == ""


def test_this_machine_has_its_loopback_interface() -> None:
    (found,) = [i for i in interfaces() if "127.0.0.1" in i.addresses]
    assert found.up
    assert not found.physical
    assert found.name in psutil.net_if_stats()
    assert read_link("h0", "127.0.0.1", {}).interface == found.name
    assert socket.if_nametoindex(found.name)


def test_an_address_that_is_not_here_is_told() -> None:
    link = read_link("h0", "10.88.0.99", {}, [ETH])
    assert link.interface == ""
    assert "no interface of this machine has the address 10.88.0.99 (hosts.h0.addr" in link.warning


def test_an_interface_that_is_down_is_told() -> None:
    down = Interface("eth0", False, 10 * GBIT, ("10.88.0.10",), True)
    assert "eth0, which has the address 10.88.0.10 (hosts.h0.address), is down" in warned(down)


def test_a_faster_interface_that_is_up_is_pointed_out() -> None:
    words = warned(ETH, FAST)
    assert "go over eth0 (10 Gbit/s), though ib0 (100 Gbit/s) is up" in words
    assert "set hosts.h0.address to 10.1.0.10" in words


@pytest.mark.parametrize(
    "other",
    [
        Interface("ib0", False, 100 * GBIT, ("10.1.0.10",), True),
        Interface("docker0", True, 100 * GBIT, ("172.17.0.1",), False),
        Interface("eth1", True, 10 * GBIT, ("10.1.0.10",), True),
        Interface("eth1", True, 0, ("10.1.0.10",), True),
    ],
    ids=["down", "made by software", "as fast", "of unknown speed"],
)
def test_what_is_no_better_is_not(other: Interface) -> None:
    assert warned(ETH, other) == ""


def test_of_an_unknown_speed_nothing_is_said() -> None:
    assert warned(Interface("eth0", True, 0, ("10.88.0.10",), True), FAST, h1=1e6) == ""


def test_a_rate_far_below_the_interface_is_told_with_the_slowest_way() -> None:
    words = warned(ETH, h1=1.0e9, h2=11e6, h3=12e6)
    assert words.startswith("only 88 Mbit/s were measured to h2, and eth0 (10 Gbit/s) is what")


def test_what_the_wire_itself_carries_is_not_blamed_on_the_interface() -> None:
    fast = Interface("ib0", True, 400 * GBIT, ("10.88.0.10",), True)
    assert warned(fast, h1=1.2e9) == ""
    assert "only 2.4 Gbit/s" in warned(fast, h1=0.3e9)


def test_rates_are_kept_by_host(tmp_path: Path) -> None:
    assert link_rates.load(tmp_path) == {}
    link_rates.keep(tmp_path, "h1", 1e9)
    link_rates.keep(tmp_path, "h2", 2e9)
    link_rates.keep(tmp_path, "h1", 3e9)
    assert {h: m.rate for h, m in link_rates.load(tmp_path).items()} == {"h1": 3e9, "h2": 2e9}
    assert [link_rates.rate(tmp_path, host) for host in ("h1", "h3")] == [3e9, 0.0]
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    (tmp_path / FILE).write_text("no JSON")
    assert link_rates.load(tmp_path) == {}
    link_rates.keep(tmp_path / "not there", "h1", 1.0)


def test_bits_are_said_as_interfaces_are_called() -> None:
    assert [bits(r) for r in (1e6, 9.4e8, 9.999e8, 2.5e10, 1.117e9)] == [
        "1 Mbit/s",
        "940 Mbit/s",
        "1 Gbit/s",
        "25 Gbit/s",
        "1.12 Gbit/s",
    ]


# ---- the doctor and the status -----------------------------------------------------------------


def test_the_doctor_finds_out_which_host_this_is(tmp_path: Path) -> None:
    text = SMALL.replace("10.88.0.11", "127.0.0.1") + f'[paths]\nrun = "{tmp_path}"\n'
    link_rates.keep(tmp_path, "h0", 1e9)
    (finding,) = check.data_link(parse(text).cluster)
    assert finding.found.startswith("h1: 127.0.0.1 on lo, ")
    assert "8 Gbit/s measured to h0" in finding.found


def test_the_doctor_knows_a_machine_that_is_none_of_the_hosts() -> None:
    (finding,) = check.data_link(parse(SMALL).cluster)
    assert finding.verdict is Verdict.WARN
    assert "127.0.0.1" in finding.found
    assert not list(check.data_link(None))


def row(warning: str, state: str = "up") -> HostRow:
    link = replace(read_link("h0", "10.88.0.10", measured(h1=1e9), [ETH]), warning=warning)
    return HostRow(
        name="h0",
        address="10.88.0.10",
        state=state,
        spare="floating",
        slots=1,
        used=0,
        taint=None,
        taint_by=None,
        memory_free=0,
        capsules=[],
        link=link,
    )


def test_status_shows_the_interface_and_warns() -> None:
    table = hosts([row("")], wide=True)
    (cell,) = [c for c in table.columns if c.header == "data link"]
    assert list(cell.cells) == ["eth0, 10 Gbit/s; 8 Gbit/s to h1"]
    rows = [row(""), row("the wrong one"), row("of old", "lost")]
    assert [w.plain for w in warnings(rows, wide=True)] == ["h0: the wrong one"]
    assert warnings(rows, wide=False) == [], "it is up: no move fails of that"
    assert rows[1].link is not None
    down = replace(rows[1], link=replace(rows[1].link, up=False))
    assert [w.plain for w in warnings([down], wide=False)] == ["h0: the wrong one"]
