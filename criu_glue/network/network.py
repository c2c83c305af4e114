# SPDX-License-Identifier: Apache-2.0
"""The overlay: a job's subnet on every host, and a capsule's mobile address in it.

Each job has a bridge and a unicast VXLAN without learning on each host. Each capsule has a network
namespace with one veth, ``eth0``. The MAC follows from the address, so the whole address book is
"which host has this address now". Every device is made by name and every call may be repeated.
fence.py decides which frames the overlay accepts, and what capsules cannot reach.

Facts behind the order of the steps (tried):
- peers' neighbour entries are permanent, so nothing needs ARP, which unicast VXLAN cannot flood;
- ``bridge fdb replace`` on a VXLAN ADDS a destination, so the old entry is deleted first;
- ``rto_min 10ms`` on the routes lets data in flight at the freeze recover in milliseconds;
- the gateway has the same address and MAC on every host, so it is always the local one;
- the kernel cannot change the id of a VXLAN, so a rewind, which gives the job another id
  (overlay.py), replaces the VXLAN. The bridge stays, with the ports of capsules.

With a *relay* the world knows all capsules by the address of one host. Each job's overlay has a
further address, ``Overlay.relay``, which only that host has, and capsules' default route leads to
it. That host's kernel does the rest: its connection tracking keeps the connections, and the address
book there says where each capsule is now. So no state of a connection to the world has to move.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...errors import LiveshiftError
from . import fence
from .fence import Surroundings
from .iproute import in_turn, ip, links, nft, run
from .network_lock import RESTORE_RULES
from .overlay import VXLAN_OVERHEAD, VXLAN_PORT, Overlay, address_of, mac

COMPLETE = "liveshift"
"""The alias that a job's bridge gets once the whole overlay exists on this host. For a job that was
rewound the number of rewinds follows, and ``-changing`` while the VXLAN is replaced."""
_ALIAS = re.compile(rf"{COMPLETE}(?:-(\d+))?(-changing)?")

_SYSCTL = Path("/proc/sys")
_OWN_TABLES = {"net/ipv4/tcp_child_ehash_entries": 4096, "net/ipv4/udp_child_hash_entries": 512}
"""These settings say how many buckets the tables of new namespaces have."""


def underlay(address: str) -> tuple[str, int]:
    """The device that carries ``address`` on this host, and its MTU; raises LiveshiftError."""
    for link in json.loads(run(["ip", "-json", "addr", "show"])):
        if any(info.get("local") == address for info in link["addr_info"]):
            return str(link["ifname"]), int(link["mtu"])
    raise LiveshiftError(
        f"this host has no interface with address {address}",
        hint="hosts.<name>.address in the cluster file must be an address of that host",
    )


@in_turn
def raise_overlay(
    overlay: Overlay, host_address: str, around: Surroundings, *, lay_again: bool = False
) -> None:
    """Make the job's fence, bridge and VXLAN on this host, its gateway address and the way out.

    ``lay_again``: load the fence's rules again if the overlay exists already, since the cluster's
    hosts may have changed.

    If the overlay exists under fewer rewinds, its VXLAN gets the new id; its capsules stay plugged
    in. While capsules are plugged in, a number of rewinds that is lower than the overlay's changes
    nothing: the request is late. Without capsules the overlay is left of an earlier job of this
    subnet, and is replaced.

    Traffic from the overlay to anything but the overlay and the cluster's own hosts is
    masqueraded. The hosts themselves see mobile addresses and answer to them. ``around`` also
    states what capsules cannot reach.
    """
    bridge, vxlan = overlay.bridge, overlay.vxlan
    if (found := _standing(overlay)) is not None:
        there, whole = found
        newest = max(there, overlay, key=lambda each: each.rewinds)
        if newest.rewinds == overlay.rewinds or _ports(overlay):
            laid = lay_again or not fence.stands(newest)
            if laid:
                _lay_again(newest, host_address, around)
            if newest != there or not whole:
                _renumber(newest, host_address, around)
            elif laid:
                _enter_relay(newest, host_address, around.relay)
            return
    lower_overlay(overlay)  # remove what an interrupted attempt or an earlier job has left
    device, mtu = underlay(host_address)
    inner = mtu - VXLAN_OVERHEAD
    nft(fence.laying(overlay, host_address, around))
    ip(
        f"link add {bridge} address {mac(overlay.gateway)} mtu {inner} type bridge",
        _making(overlay, host_address, device, inner),
    )
    _no_ipv6(bridge, vxlan)
    ip(
        f"link set {vxlan} master {bridge} up",
        f"link set {bridge} up",
        f"addr add {overlay.gateway}/{overlay.prefix} dev {bridge}",
        f"route change {overlay.subnet} dev {bridge} src {overlay.gateway} rto_min 10ms",
    )
    run(["bridge", "link", "set", "dev", vxlan, "learning", "off"])
    _sysctl("net/ipv4/ip_forward", "1")
    for name in ("all", device, bridge):  # answers may take another path than their requests
        _sysctl(f"net/ipv4/conf/{name}/rp_filter", "2")
    _enter_relay(overlay, host_address, around.relay)
    _note(overlay)


def _making(overlay: Overlay, host_address: str, device: str, inner: int) -> str:
    """The command of ip(8) that makes the VXLAN of a job."""
    return (
        f"link add {overlay.vxlan} mtu {inner} type vxlan id {overlay.wire_id} dstport {VXLAN_PORT}"
        f" local {host_address} nolearning dev {device}"
    )


def _standing(overlay: Overlay) -> tuple[Overlay, bool] | None:
    """The overlay with the number of rewinds that it has on this host, and True if its VXLAN has
    the id of this number; None if there is no overlay, or one whose making was interrupted."""
    for bridge in links("dev", overlay.bridge):
        if found := _ALIAS.fullmatch(bridge.get("ifalias", "")):
            return replace(overlay, rewinds=int(found[1] or 0)), not found[2]
    return None


def _note(overlay: Overlay, *, changing: bool = False) -> None:
    """Write down at the bridge under how many rewinds the overlay exists here."""
    number = f"-{overlay.rewinds}" if overlay.rewinds else ""
    alias = f"{COMPLETE}{number}{'-changing' if changing else ''}"
    ip(f"link set dev {overlay.bridge} alias {alias}")


def _renumber(overlay: Overlay, host_address: str, around: Surroundings) -> None:
    """Replace the VXLAN of an overlay in use by one with the id of its number of rewinds.

    The note at the bridge comes first: after an interruption the next call finishes the change, as
    the fence still knows where all addresses are. The old device goes before the fence lets go of
    its id, else frames with that id would pass unchecked in between. Until the new device knows all
    addresses, frames are lost; TCP sends them again.
    """
    bridge, vxlan, elsewhere = overlay.bridge, overlay.vxlan, fence.elsewhere(overlay)
    device, mtu = underlay(host_address)
    _note(overlay, changing=True)
    if links("dev", vxlan):
        run(["ip", "link", "del", vxlan])
    fence.renumber(overlay)
    ip(_making(overlay, host_address, device, mtu - VXLAN_OVERHEAD))
    _no_ipv6(vxlan)
    ip(f"link set {vxlan} master {bridge} up")
    run(["bridge", "link", "set", "dev", vxlan, "learning", "off"])
    locate(overlay, elsewhere)
    _enter_relay(overlay, host_address, around.relay)
    _note(overlay)


def _lay_again(overlay: Overlay, host_address: str, around: Surroundings) -> None:
    """Lay the fence of an overlay in use again, for example after an ``nft flush ruleset``."""
    ports = _ports(overlay)
    where: dict[str, str | None] = dict.fromkeys(map(overlay.address, ports))
    where |= _elsewhere(overlay)
    nft(fence.laying(overlay, host_address, around))
    for index, alias in ports.items():
        owner = int(alias) if alias.isdecimal() else None
        nft(fence.guarding(overlay, index, owner))
    fence.accept(overlay, where)


def _ports(overlay: Overlay) -> dict[int, str]:
    """The capsules that are plugged in here: index → alias of the port."""
    found = links("master", overlay.bridge)
    indices = [(overlay.index(link["ifname"]), link.get("ifalias", "")) for link in found]
    return {index: alias for index, alias in indices if index is not None}


def _elsewhere(overlay: Overlay) -> dict[str, str]:
    """Which host has each mobile address that is not here. The fence shows it, or the forwarding
    table if the fence is gone; {} if the VXLAN is gone too."""
    if fence.stands(overlay):
        return fence.elsewhere(overlay)
    lines = _forwarding(overlay) if links("dev", overlay.vxlan) else []
    return {address_of(line["mac"]): line["dst"] for line in lines if "dst" in line}


def _enter_relay(overlay: Overlay, host_address: str, relay: str) -> None:
    if relay == host_address:
        fence.take_for_world(overlay)
    elif relay:
        locate(overlay, {overlay.relay: relay})


@in_turn
def lower_overlay(overlay: Overlay) -> None:
    """Remove the job's devices and rules from this host; does nothing if there are none."""
    for device in (overlay.vxlan, overlay.bridge):
        if links("dev", device):
            run(["ip", "link", "del", device])
    fence.lift(overlay)


@in_turn
def plug_in(
    overlay: Overlay,
    netns: str,
    index: int,
    peers: Iterable[str],
    locked: bool,
    owner: int,
    relayed: Iterable[str] | None = None,
) -> None:
    """Make a capsule's network namespace with its mobile address.

    ``locked``: the namespace is for a capsule that will come from another host. ``owner`` is the
    uid of the job's user, who may connect to the capsule; the veth's alias keeps it. ``relayed``:
    with a relay, the addresses of the cluster's hosts, which the capsule reaches through its own
    host and not through the relay; without a relay, None.

    The address of a locked namespace is still on another host. So it sends and receives nothing
    until :func:`locate` enters that the address is here, even if the lock is opened before. A
    namespace of that name from an earlier stay on this host is replaced.
    """
    unplug(overlay, netns, index)
    address, veth = overlay.address(index), overlay.veth(index)
    bridge = links("dev", overlay.bridge)
    if not bridge:
        raise LiveshiftError(f"the overlay {overlay.subnet} does not exist on this host")
    mtu = bridge[0]["mtu"]
    _make_namespace(netns)
    if locked:
        nft(RESTORE_RULES, netns)
    own = mac(address)
    ip(f"link add {veth} mtu {mtu} type veth peer name eth0 address {own} mtu {mtu} netns {netns}")
    _no_ipv6(veth)
    nft(fence.guarding(overlay, index, owner))
    ip(f"link set {veth} alias {owner} master {overlay.bridge} up")
    neighbours = {*peers, overlay.gateway, overlay.relay} - {address}
    way_out = overlay.gateway if relayed is None else overlay.relay
    by_gateway = [f"{host}/32 via {overlay.gateway}" for host in relayed or ()]
    ip(
        "link set lo up",
        "link set eth0 up",
        f"addr add {address}/{overlay.prefix} dev eth0",
        f"route change {overlay.subnet} dev eth0 src {address} rto_min 10ms",
        *(
            f"route add {route} dev eth0 src {address} rto_min 10ms"
            for route in (f"default via {way_out}", *by_gateway)
        ),
        *(f"neigh replace {p} lladdr {mac(p)} dev eth0 nud permanent" for p in neighbours),
        netns=netns,
    )
    if not locked:
        locate(overlay, {address: None})


def _make_namespace(netns: str) -> None:
    """Make a network namespace that has small tables of connections of its own.

    By default the kernel keeps the connections of all namespaces in one table. On a host with 24
    GiB of memory it has 262,144 buckets. CRIU and the agent list a capsule's connections several
    times in a freeze, and each time the kernel walks through the whole table. We measured 5 ms for
    one such walk, and less than 0.1 ms in a small table.

    The process that makes a namespace is in another one, and the kernel takes the size of the new
    table from a setting of that one (ip-sysctl: tcp_child_ehash_entries, Linux 6.1). We do not
    change this setting of the host. Instead we make an intermediate namespace for it. The kernel
    derives two limits from the size of the table; we set them to the host's values.
    """
    limits = [f"net/ipv4/{name}" for name in ("tcp_max_tw_buckets", "tcp_max_syn_backlog")]
    kept = {name: (_SYSCTL / name).read_text().strip() for name in limits}
    sizes = [
        f"[ ! -e {_SYSCTL}/{name} ] || echo {size} > {_SYSCTL}/{name}"
        for name, size in _OWN_TABLES.items()
    ]
    make = [*sizes, f"exec ip netns add {netns}"]
    run(["unshare", "--net", "sh", "-c", "\n".join(make)])
    # By default the kernel sends one ICMP error a second; the lock needs one per retransmission.
    # The last setting applies to eth0, which does not exist yet; loopback exists, so it keeps IPv6.
    settings = [
        *(f"echo {value} > {_SYSCTL}/{name} || exit 1" for name, value in kept.items()),
        f"echo 0 > {_SYSCTL}/net/ipv4/icmp_ratelimit",
        f"cd {_SYSCTL}/net/ipv6/conf/default 2> /dev/null || exit 0",
        "echo 1 > disable_ipv6",
    ]
    run(["ip", "netns", "exec", netns, "sh", "-c", "\n".join(settings)])


@in_turn
def unplug(overlay: Overlay, netns: str, index: int) -> None:
    """Remove a capsule's network namespace and veth; does nothing if there are none."""
    if links("dev", overlay.veth(index)):
        run(["ip", "link", "del", overlay.veth(index)])
    fence.unguard(overlay, index)
    if Path(f"/run/netns/{netns}").exists():
        run(["ip", "netns", "del", netns])


def end_namespace(netns: str) -> None:
    """Kill all processes in a network namespace and remove it; does nothing if there is none."""
    if Path(f"/run/netns/{netns}").exists():
        for pid in run(["ip", "netns", "pids", netns]).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        run(["ip", "netns", "del", netns])


@in_turn
def locate(overlay: Overlay, where: Mapping[str, str | None]) -> None:
    """Enter into this host's tables which host has each mobile address (None: this one).

    The fence changes first, so that it drops frames from the old host from then on.
    """
    fence.accept(overlay, where)
    macs = {mac(address): host for address, host in where.items()}
    known = [line for line in _forwarding(overlay) if line["mac"] in macs]
    commands = [
        f"fdb del {line['mac']} dev {overlay.vxlan} dst {line['dst']} self"
        for line in known
        if "dst" in line
    ]
    for at, host in macs.items():
        if host is not None:
            commands.append(f"fdb append {at} dev {overlay.vxlan} dst {host} self static")
            commands.append(f"fdb replace {at} dev {overlay.vxlan} master static")
    # The bridge learns the entry of an address that is here from its veth. An older entry that
    # points to the VXLAN would win over that entry, so we remove it.
    commands += [
        f"fdb del {line['mac']} dev {overlay.vxlan} master"
        for line in known
        if line.get("master") and macs[line["mac"]] is None
    ]
    if commands:
        run(["bridge", "-batch", "-"], "\n".join(commands) + "\n")
    ip(
        *(
            f"neigh replace {address} lladdr {mac(address)} dev {overlay.bridge} nud permanent"
            for address in where
        )
    )


def _forwarding(overlay: Overlay) -> list[dict[str, Any]]:
    """The VXLAN's entries, which say which host has a MAC (``dst``), and the bridge's entries that
    lead to the VXLAN (``master``)."""
    return list(json.loads(run(["bridge", "-json", "fdb", "show", "dev", overlay.vxlan])))


def _no_ipv6(*devices: str) -> None:
    """Switch IPv6 off, since the fence's rules are for IPv4 only, and a user of this host could
    reach ff02::1%device."""
    for device in devices:
        with contextlib.suppress(FileNotFoundError):  # the kernel has no IPv6
            _sysctl(f"net/ipv6/conf/{device}/disable_ipv6", "1")


def _sysctl(key: str, value: str) -> None:
    (_SYSCTL / key).write_text(value)
