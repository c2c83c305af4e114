# SPDX-License-Identifier: Apache-2.0
"""The overlay: a job's subnet on every host, and a capsule's mobile address in it.

Per host and job a bridge and a unicast VXLAN without learning; per capsule a network namespace
with one veth, ``eth0``. The MAC follows from the address, so the whole address book is "which
host has this address now". Every device is made by name and every call may be repeated.

Facts behind the order of things (tried; see ARCHITECTURE.md):
- peers' neighbour entries are permanent, so nothing needs ARP, which unicast VXLAN cannot flood;
- ``bridge fdb replace`` on a VXLAN ADDS a destination: the old entry is deleted first;
- ``rto_min 10ms`` on the routes lets data in flight at the freeze recover in milliseconds;
- the gateway has the same address and MAC on every host, so it is always the local one.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import signal
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import LiveshiftError

VXLAN_PORT = 4789
VXLAN_OVERHEAD = 50
COMPLETE = "liveshift"
"""Alias of a job's bridge once all of its overlay stands on this host."""

LOCK_TABLE = "liveshift_lock"
UNLOCK = ("nft", "delete", "table", "inet", LOCK_TABLE)


@dataclass(frozen=True)
class Overlay:
    """A job's subnet. ``vni`` is its VXLAN id and also names its devices."""

    vni: int
    subnet: str

    @property
    def bridge(self) -> str:
        return f"lsb{self.vni}"

    @property
    def vxlan(self) -> str:
        return f"lsx{self.vni}"

    @property
    def prefix(self) -> int:
        return ipaddress.ip_network(self.subnet).prefixlen

    @property
    def gateway(self) -> str:
        return str(ipaddress.ip_network(self.subnet)[-2])

    def address(self, index: int) -> str:
        """The mobile address of capsule ``index``, the first being .1."""
        return str(ipaddress.ip_network(self.subnet)[index + 1])

    def veth(self, index: int) -> str:
        return f"lsv{self.vni}.{index}"


def mac(address: str) -> str:
    """The MAC of a mobile address: locally administered, ``ls`` and the four address bytes."""
    packed = ipaddress.ip_address(address).packed
    return "06:6c:" + ":".join(f"{byte:02x}" for byte in packed)


def underlay(address: str) -> tuple[str, int]:
    """The device that carries ``address`` on this host, and its MTU; raises LiveshiftError."""
    for link in json.loads(_run(["ip", "-json", "addr", "show"])):
        if any(info.get("local") == address for info in link["addr_info"]):
            return str(link["ifname"]), int(link["mtu"])
    raise LiveshiftError(
        f"this host has no interface with address {address}",
        hint="hosts.<name>.address in the cluster file must be an address of that host",
    )


def raise_overlay(overlay: Overlay, host_address: str, cluster: Iterable[str]) -> None:
    """Make the job's bridge and VXLAN on this host, its gateway address and the way out.

    Traffic from the overlay to anything but the overlay and the cluster's own hosts is
    masqueraded; the hosts themselves see mobile addresses and answer to them.
    """
    if (there := _link(overlay.bridge)) and there.get("ifalias") == COMPLETE:
        return
    lower_overlay(overlay)  # what an interrupted attempt left
    device, mtu = underlay(host_address)
    inner = mtu - VXLAN_OVERHEAD
    bridge, vxlan = overlay.bridge, overlay.vxlan
    _ip(
        f"link add {bridge} address {mac(overlay.gateway)} mtu {inner} type bridge",
        f"link add {vxlan} mtu {inner} type vxlan id {overlay.vni} dstport {VXLAN_PORT} "
        f"local {host_address} nolearning dev {device}",
        f"link set {vxlan} master {bridge} up",
        f"link set {bridge} up",
        f"addr add {overlay.gateway}/{overlay.prefix} dev {bridge}",
        f"route change {overlay.subnet} dev {bridge} src {overlay.gateway} rto_min 10ms",
    )
    _run(["bridge", "link", "set", "dev", vxlan, "learning", "off"])
    _sysctl("net/ipv4/ip_forward", "1")
    for name in ("all", device, bridge):  # answers may come back by another way than they went
        _sysctl(f"net/ipv4/conf/{name}/rp_filter", "2")
    stay = ", ".join(sorted({*cluster, overlay.subnet}))
    table = f"liveshift_{overlay.vni}"
    _nft(
        f"table ip {table} {{ chain out {{ type nat hook postrouting priority srcnat;\n"
        f"ip saddr {overlay.subnet} ip daddr != {{ {stay} }} masquerade;\n}}\n}}\n"
    )
    _ip(f"link set dev {bridge} alias {COMPLETE}")


def lower_overlay(overlay: Overlay) -> None:
    """Remove the job's devices and rules from this host; nothing happens when there are none."""
    for device in (overlay.vxlan, overlay.bridge):
        if _link(device):
            _run(["ip", "link", "del", device])
    subprocess.run(
        ["nft", "delete", "table", "ip", f"liveshift_{overlay.vni}"],
        capture_output=True,
        check=False,
    )


def plug_in(overlay: Overlay, netns: str, index: int, peers: Iterable[str], locked: bool) -> None:
    """Make a capsule's network namespace with its mobile address, locked if it is to receive.

    A namespace of that name left over from an earlier stay on this host is replaced.
    """
    unplug(overlay, netns, index)
    address, veth = overlay.address(index), overlay.veth(index)
    bridge = _link(overlay.bridge)
    if bridge is None:
        raise LiveshiftError(f"the overlay {overlay.subnet} does not stand on this host")
    mtu = bridge["mtu"]
    _run(["ip", "netns", "add", netns])
    # By default one ICMP error a second would go out; the lock needs one per retransmission.
    limit = "echo 0 > /proc/sys/net/ipv4/icmp_ratelimit"
    _run(["ip", "netns", "exec", netns, "sh", "-c", limit])
    if locked:
        _nft(_LOCK, netns)
    own = mac(address)
    _ip(
        f"link add {veth} mtu {mtu} type veth peer name eth0 address {own} mtu {mtu} netns {netns}",
        f"link set {veth} master {overlay.bridge} up",
    )
    neighbours = {*peers, overlay.gateway} - {address}
    _ip(
        "link set lo up",
        "link set eth0 up",
        f"addr add {address}/{overlay.prefix} dev eth0",
        f"route change {overlay.subnet} dev eth0 src {address} rto_min 10ms",
        f"route add default via {overlay.gateway} dev eth0 src {address} rto_min 10ms",
        *(f"neigh replace {p} lladdr {mac(p)} dev eth0 nud permanent" for p in neighbours),
        netns=netns,
    )
    locate(overlay, {address: None})


def unplug(overlay: Overlay, netns: str, index: int) -> None:
    """Remove a capsule's network namespace and veth; nothing happens when there are none."""
    if _link(overlay.veth(index)):
        _run(["ip", "link", "del", overlay.veth(index)])
    if Path(f"/run/netns/{netns}").exists():
        _run(["ip", "netns", "del", netns])


def end_namespace(netns: str) -> None:
    """Kill what runs in a network namespace and remove it; nothing happens when there is none."""
    if Path(f"/run/netns/{netns}").exists():
        for pid in _run(["ip", "netns", "pids", netns]).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        _run(["ip", "netns", "del", netns])


def locate(overlay: Overlay, where: Mapping[str, str | None]) -> None:
    """Enter into this host's tables which host has each mobile address (None: this one)."""
    commands: list[str] = []
    for line in json.loads(_run(["bridge", "-json", "fdb", "show", "dev", overlay.vxlan])):
        if "dst" in line and any(line["mac"] == mac(a) for a in where):
            commands.append(f"fdb del {line['mac']} dev {overlay.vxlan} dst {line['dst']} self")
    for address, host in where.items():
        if host is not None:
            commands.append(f"fdb append {mac(address)} dev {overlay.vxlan} dst {host} self static")
            commands.append(f"fdb replace {mac(address)} dev {overlay.vxlan} master static")
    # The bridge's own entry for an address that is here follows its veth by learning; an entry
    # that points to the VXLAN from earlier would win over it and is taken out first.
    for address in (a for a, host in where.items() if host is None):
        subprocess.run(
            ["bridge", "fdb", "del", mac(address), "dev", overlay.vxlan, "master"],
            capture_output=True,
            check=False,
        )
    if commands:
        _run(["bridge", "-batch", "-"], "\n".join(commands) + "\n")
    _ip(
        *(
            f"neigh replace {address} lladdr {mac(address)} dev {overlay.bridge} nud permanent"
            for address in where
        )
    )


def lock(pid: int) -> None:
    """Let nothing through eth0 of the network namespace of ``pid``; loopback stays open.

    With lo locked too CRIU's probe of 127.0.0.1 takes 133 s. What peers send is answered with
    ICMP host unreachable, not dropped: an established connection takes that for a soft error
    and does not back its retransmissions off meanwhile (RFC 6069; tcp_ld_RTO_revert), so data
    in flight arrives milliseconds after the unlock instead of up to twice the freeze later.
    """
    _run(["nsenter", "--target", str(pid), "--net", "--", "nft", "-f", "-"], _LOCK)


def unlock(pid: int) -> None:
    _run(["nsenter", "--target", str(pid), "--net", "--", *UNLOCK])


_LOCK = f"""table inet {LOCK_TABLE} {{
  chain in {{ type filter hook input priority -300;
    iifname "eth0" meta l4proto tcp reject with icmp type host-unreachable
    iifname "eth0" drop
  }}
  chain out {{ type filter hook output priority -300;
    oifname "eth0" icmp type destination-unreachable accept
    oifname "eth0" drop
  }}
}}
"""


def _link(name: str) -> dict[str, Any] | None:
    """What the kernel says of a device (asked by netlink: /sys may show another namespace's)."""
    done = subprocess.run(
        ["ip", "-json", "link", "show", "dev", name], capture_output=True, text=True, check=False
    )
    return json.loads(done.stdout)[0] if done.returncode == 0 else None


def _ip(*commands: str, netns: str | None = None) -> None:
    where = ["-netns", netns] if netns else []
    _run(["ip", *where, "-batch", "-"], "\n".join(commands) + "\n")


def _nft(rules: str, netns: str | None = None) -> None:
    inside = ["ip", "netns", "exec", netns] if netns else []
    _run([*inside, "nft", "-f", "-"], rules)


def _sysctl(key: str, value: str) -> None:
    Path(f"/proc/sys/{key}").write_text(value)


def _run(command: list[str], stdin: str | None = None) -> str:
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
        raise LiveshiftError(
            f"network: `{' '.join(command)}` failed: {said}" + (f"\n{stdin}" if stdin else ""),
            hint="`liveshift doctor` checks VXLAN, bridges and nftables on this host",
        )
    return done.stdout
