# SPDX-License-Identifier: Apache-2.0
"""The fence: who is heard on a job's overlay, and what its capsules do not reach.

Of what comes by VXLAN with the job's id, a host hears only IPv4 that was sent to the host's own
cluster address (the kernel's socket takes what comes to any address, and broadcasts), whose inner
source MAC and address are those of one mobile address, and which comes from the very host where
the address book puts that address (outer source). The rest is dropped: what a stray copy on an
earlier host sends, hosts of no cluster, MACs of nobody, and MACs of capsules that are here. On the
host itself a capsule's port lets in what bears its own MAC and address, and only while the book has
it here. So a book that is entered silences the old copy and lets the new one be heard in one
transaction.

One host may relay what capsules have to do with the world (network.py). It alone may send to them
under an address that is neither a capsule's nor its own.

A capsule reaches the services of hosts and the world, but not: the orchestrator, agents' ports, any
VXLAN port (by which it could forge frames), and other jobs. The users of this host but root reach
neither agents' ports nor a capsule, and send no VXLAN with an id of jobs. But the user whose job it
is reaches its capsules on their host. A capsule may ask a service that a user runs here, so answers
go through. Nor does anything begin a connection to a capsule through this host.

What keeps users and containers from speaking as this host stands while its agent runs, jobs or not
(:func:`hold`), and as long as a job is here.

VXLAN that users' sockets send is told from the kernel's by its owner (``meta skuid``). But what a
user sends through a tunnel still has that user's socket when the kernel has wrapped it. So the id
decides, and others' VXLAN on this port goes on; and what goes out by a bridge of ours bears a mark,
which only root can set, until it was wrapped.

One table for all jobs of a host (``ip liveshift``): the VXLAN id leads to the job's chain by a
map, MAC, host and address by a set, so the cost does not grow with jobs or capsules. Raw payload
expressions, since nft before 1.0.7 has no words for VXLAN: bits 96-119 of the UDP header are the
id, 176-223 the inner source MAC, 224-239 the inner protocol, 336-367 the inner source address. At
the input and forward hooks datagrams are whole (defragmented for the connection tracking that
masquerading needs), and those that the kernel merges before it (GRO) have equal headers.

Per job a table ``netdev liveshift_<id>`` with a chain for each capsule's port, at ingress: there
it works in every kernel, while nftables' bridge family often is not built.
"""

from __future__ import annotations

import contextlib
import ipaddress
import subprocess
from collections.abc import Iterable, Mapping, Sequence

from ...errors import LiveshiftError
from .iproute import nft, nft_elements
from .overlay import BRIDGES, VXLAN_PORT, Overlay, address_of, mac, most_jobs

TABLE = "ip liveshift"
HELD = "agent_runs"
"""The chain, an empty one, that says so."""
MARK = "0x6c737678"
"""Of what a host's own processes send by a bridge of ours, until the kernel has wrapped it."""


def lay(
    overlay: Overlay,
    host_address: str,
    cluster: Iterable[str],
    overlays: str,
    control: Iterable[tuple[str, int]],
    agents: Iterable[tuple[str, int]],
    relay: str = "",
) -> None:
    """Lay the fence of a job; nobody is heard yet but the cluster's hosts themselves.

    ``cluster``: the addresses of its hosts, ``overlays``: the network that holds all jobs'
    subnets, ``control``: the (address, TCP port) of the orchestrator, ``agents``: those of agents,
    at one least, ``relay``: the address of the host that relays what capsules have to do with the
    world, "" for none. May be repeated; the rules that all jobs share are then those of the last
    call.
    """
    nft(laying(overlay, host_address, cluster, overlays, control, agents, relay))


def hold(
    cluster: Iterable[str],
    overlays: str,
    control: Iterable[tuple[str, int]],
    agents: Iterable[tuple[str, int]],
) -> None:
    """Lay what all jobs share, and keep it when there is none, until :func:`release`.

    Else a user of a host without a job could send frames that bear its address, and be heard as it.
    """
    nft(f"{_shared(sorted({*cluster}), overlays, control, agents)}\nadd chain {TABLE} {HELD}\n")


def release() -> None:
    """Let the last job's end take the rules away, or take them away now where there is none."""
    if _held():
        jobs = nft_elements("map", *TABLE.split(), "fences")
        nft(f"delete chain {TABLE} {HELD}\n" if jobs else f"delete table {TABLE}\n")


def _held() -> bool:
    return nft_elements("chain", *TABLE.split(), HELD) is not None


def laying(
    overlay: Overlay,
    host_address: str,
    cluster: Iterable[str],
    overlays: str,
    control: Iterable[tuple[str, int]],
    agents: Iterable[tuple[str, int]],
    relay: str = "",
) -> str:
    """The rules that :func:`lay` loads."""
    hosts, own, vni = sorted({*cluster}), overlay.bridge, overlay.vni
    lines = [
        f"flush chain {TABLE} fence_{vni}",
        f"add rule {TABLE} fence_{vni} ip daddr != {host_address} drop",
        f"add rule {TABLE} fence_{vni} @th,224,16 != 0x0800 drop",
        *(
            f"add rule {TABLE} fence_{vni} {rule} return"
            for rule in _relayed(overlay, overlays, relay)
        ),
        f"add rule {TABLE} fence_{vni} @th,176,48 . ip saddr . @th,336,32 != @placed_{vni} drop",
        f"add element {TABLE} fences {{ {vni} : jump fence_{vni} }}",
        f'add element {TABLE} owned {{ "{own}" : jump owner_{vni} }}',
        f'add element {TABLE} within {{ "{own}" . "{own}" }}',
        f'add element {TABLE} gateways {{ "{own}" . {overlay.gateway} }}',
    ]
    # Hosts answer capsules elsewhere from behind the gateway's MAC, under their own address.
    others = [host for host in hosts if host != host_address]
    if gateways := ", ".join(_element(mac(overlay.gateway), host, host) for host in others):
        lines.append(f"add element {TABLE} placed_{vni} {{ {gateways} }}")
    return f"""{_shared(hosts, overlays, control, agents)}
table {TABLE} {{
  set placed_{vni} {{ typeof @th,176,48 . ip saddr . @th,336,32; }}
  set housed_{vni} {{ type ipv4_addr; }}
  chain fence_{vni} {{ }}
  chain owner_{vni} {{ }}
}}
table netdev liveshift_{vni} {{
  set here {{ type ether_addr; }}
  set relays {{ type ether_addr; }}
}}
{chr(10).join(lines)}
"""


def _shared(
    hosts: Sequence[str],
    overlays: str,
    control: Iterable[tuple[str, int]],
    agents: Iterable[tuple[str, int]],
) -> str:
    """The rules of a host's table that are no job's own."""
    listening = sorted({*agents})
    endpoints = sorted({*control, *listening})
    everyone = f"{{ {', '.join(hosts)} }}"
    ports = f"{{ {', '.join(sorted({str(port) for _, port in endpoints}))} }}"
    pairs, theirs = (
        f"{{ {', '.join(f'{address} . {port}' for address, port in among)} }}"
        for among in (endpoints, listening)
    )
    refuse = "reject with icmp type admin-prohibited"
    vxlan = f"udp dport {VXLAN_PORT}"
    ids = f"@th,96,24 <= {most_jobs(overlays)}"
    user_to_capsule = f'oifname != "lo" ip daddr {overlays} meta skuid != 0'
    shared = {  # flushed and written anew with every call, in the same transaction
        "from_capsules": [
            f"ip daddr {overlays} iifname . ip daddr != @gateways {refuse}",
            f"tcp dport {ports} reject with tcp reset",
            f"{vxlan} {refuse}",
        ],
        "arriving": [
            f'iifname != "lo" ip saddr {overlays} jump from_capsules',
            f"{vxlan} @th,96,24 vmap @fences",
        ],
        "sent": [
            f"{vxlan} meta mark {MARK} meta mark set 0 accept",
            f"{vxlan} meta skuid != 0 {ids} {refuse}",
            f"meta skuid != 0 ip daddr . tcp dport {theirs} reject with tcp reset",
            # Without connection tracking: an answer is never refused, whatever that has forgotten.
            f"{user_to_capsule} tcp flags & (fin | syn | rst | ack) == syn jump users",
            f'oifname "{BRIDGES}" meta skuid != 0 meta mark set {MARK}',
        ],
        "sent_unasked": [f"{user_to_capsule} meta l4proto != tcp ct state new jump users"],
        "users": ["oifname vmap @owned", refuse],
        "through": [
            "iifname . oifname @within accept",  # bridge-nf-call-iptables brings those here
            f"ip saddr {overlays} ip daddr {overlays} {refuse}",
            f"ip saddr {overlays} ip daddr . tcp dport {pairs} reject with tcp reset",
            f"ip saddr {overlays} {vxlan} {refuse}",
            f"ip saddr != {everyone} {vxlan} {ids} {refuse}",
        ],
        "inward": [
            "iifname . oifname @within accept",
            f"ip daddr {overlays} ct state new {refuse}",
        ],
        "way_out": [
            # What goes to the relay is bridged; bridge-nf-call-iptables brings it here.
            f'oifname "{BRIDGES}" accept',
            f"ip saddr {overlays} ip daddr {everyone} accept",
            f"ip saddr {overlays} ip daddr != {overlays} masquerade",
        ],
    }
    lines = [f"flush chain {TABLE} {chain}" for chain in shared]
    lines += [
        f"add rule {TABLE} {chain} {rule}" for chain, rules in shared.items() for rule in rules
    ]
    return f"""
table {TABLE} {{
  set within {{ type ifname . ifname; }}
  set gateways {{ type ifname . ipv4_addr; }}
  map fences {{ typeof @th,96,24 : verdict; }}
  map owned {{ type ifname : verdict; }}
  chain from_capsules {{ }}
  chain users {{ }}
  chain arriving {{ type filter hook input priority -300; }}
  chain sent {{ type filter hook output priority -300; }}
  chain sent_unasked {{ type filter hook output priority 0; }}
  chain through {{ type filter hook forward priority -300; }}
  chain inward {{ type filter hook forward priority 0; }}
  chain way_out {{ type nat hook postrouting priority srcnat; }}
}}
{chr(10).join(lines)}
"""


def stands(overlay: Overlay) -> bool:
    """Whether the fence is there; somebody else's ``nft flush ruleset`` takes it away."""
    return nft_elements("set", *TABLE.split(), f"placed_{overlay.vni}") is not None


def hear(overlay: Overlay, where: Mapping[str, str | None]) -> None:
    """From now on hear each mobile address from that host only (None: from its port here).

    Only what differs is written: taking an element out costs a grace period of the kernel (10 ms).
    """
    heard, here = f"placed_{overlay.vni}", f"netdev liveshift_{overlay.vni} here"
    asked = {mac(address): host for address, host in where.items()}
    known = _entries(f"{TABLE} {heard}")
    ports = _entries(here)
    wanted = {(m, host, address_of(m)) for m, host in asked.items() if host is not None}
    stale = {entry for entry in known - wanted if entry[0] in asked}
    arrived = {(m,) for m, host in asked.items() if host is None} - ports
    left = {(m,) for m, *_ in wanted} & ports
    changes = [
        ("delete", f"{TABLE} {heard}", [_element(*entry) for entry in sorted(stale)]),
        ("delete", here, [m for (m,) in sorted(left)]),
        ("add", f"{TABLE} {heard}", [_element(*entry) for entry in sorted(wanted - known)]),
        ("add", here, [m for (m,) in sorted(arrived)]),
    ]
    rules = [f"{verb} element {of} {{ {', '.join(e)} }}" for verb, of, e in changes if e]
    if rules:
        nft("\n".join(rules) + "\n")


def guard(overlay: Overlay, index: int, owner: int | None) -> None:
    """Let a capsule's port take only what bears its own MAC and address, while it is here.

    ``owner``: the uid whose job it is, which may connect to it from this host.

    What it sends to the gateway's MAC is not for its own subnet: the host would send it on under
    the gateway's MAC, past the fence of others.
    """
    nft(guarding(overlay, index, owner))


def guarding(overlay: Overlay, index: int, owner: int | None) -> str:
    """The rules that :func:`guard` loads."""
    address, port, vni = overlay.address(index), overlay.veth(index), overlay.vni
    chain, theirs = f"netdev liveshift_{vni} {port}", f"{TABLE} owner_{vni}"
    let = f"ip daddr @housed_{vni} meta skuid {owner} meta mark set {MARK} accept"
    own = f"""flush chain {theirs}
add rule {theirs} {let}
add element {TABLE} housed_{vni} {{ {address} }}"""
    return f"""
add chain {chain} {{ type filter hook ingress device "{port}" priority 0; policy drop; }}
flush chain {chain}
add rule {chain} ether saddr != {mac(address)} drop
add rule {chain} ether saddr != @here drop
{_to_gateway(overlay, chain)}
add rule {chain} ether daddr {mac(overlay.gateway)} ip daddr {overlay.subnet} \
ip daddr != {overlay.gateway} drop
add rule {chain} ip saddr {address} accept
add rule {chain} arp saddr ether {mac(address)} arp saddr ip {address} accept
{own if owner is not None else ""}
"""


def take_for_world(overlay: Overlay) -> None:
    """On the relay's host: what capsules elsewhere send to the relay is this host's to send on.

    It gets the gateway's MAC before the bridge sees it, and so reaches this host's own stack
    without being forwarded by the bridge: with bridge-nf-call-iptables the connection would be
    tracked there already, and be masqueraded no more.
    """
    nft(taking_for_world(overlay))


def taking_for_world(overlay: Overlay) -> str:
    """The rules that :func:`take_for_world` loads."""
    table = f"netdev liveshift_{overlay.vni}"
    chain = f"{table} {overlay.vxlan}"
    return f"""
add element {table} relays {{ {mac(overlay.relay)} }}
add chain {chain} {{ type filter hook ingress device "{overlay.vxlan}" priority 0; }}
flush chain {chain}
{_to_gateway(overlay, chain)}
"""


def _to_gateway(overlay: Overlay, chain: str) -> str:
    """What is for the relay is not for the job's own subnet; only the relay's host takes it."""
    return f"""
add rule {chain} ether daddr {mac(overlay.relay)} ip daddr {overlay.subnet} drop
add rule {chain} ether daddr @relays ether daddr set {mac(overlay.gateway)}
"""


def unguard(overlay: Overlay, index: int) -> None:
    """Remove the rules of a port that is gone; kernels before 6.16 do so themselves."""
    chain = f"netdev liveshift_{overlay.vni} {overlay.veth(index)}"
    script = f"flush chain {chain}\ndelete chain {chain}\n"
    subprocess.run(
        ["nft", "-f", "-"], input=script, text=True, capture_output=True, check=False
    )  # which fails when there is none
    with contextlib.suppress(LiveshiftError):  # the same
        nft(f"delete element {TABLE} housed_{overlay.vni} {{ {overlay.address(index)} }}\n")


def lift(overlay: Overlay) -> None:
    """Remove the fence of a job, and with the last one what all share, unless an agent holds it.

    May be repeated.
    """
    vni, own = overlay.vni, overlay.bridge
    if not stands(overlay):
        return
    jobs = nft_elements("map", *TABLE.split(), "fences") or []
    if len(jobs) == 1 and not _held():
        rules = f"delete table {TABLE}\n"
    else:
        rules = f"""
delete element {TABLE} fences {{ {vni} }}
delete element {TABLE} owned {{ "{own}" }}
flush chain {TABLE} fence_{vni}
delete chain {TABLE} fence_{vni}
flush chain {TABLE} owner_{vni}
delete chain {TABLE} owner_{vni}
delete set {TABLE} housed_{vni}
delete set {TABLE} placed_{vni}
delete element {TABLE} within {{ "{own}" . "{own}" }}
delete element {TABLE} gateways {{ "{own}" . {overlay.gateway} }}
"""
    table = f"netdev liveshift_{vni}"
    nft(f"{rules}\nadd table {table}\ndelete table {table}\n")


def _relayed(overlay: Overlay, overlays: str, relay: str) -> list[str]:
    """The world's answers by way of the relay: it sends them from behind the gateway's MAC, under
    any address but one of an overlay's."""
    if not relay:
        return []
    jobs = ipaddress.ip_network(overlays)
    first, last = int(jobs.network_address), int(jobs.broadcast_address)
    sender = f"ip saddr {relay} @th,176,48 0x{mac(overlay.gateway).replace(':', '')} @th,336,32"
    return [f"{sender} < {first:#010x}", f"{sender} > {last:#010x}"]


def _element(mac: str, host: str, address: str) -> str:
    """An element of a job's ``placed``: raw payload is a number to nft."""
    return f"0x{mac.replace(':', '')} . {host} . {int(ipaddress.ip_address(address)):#010x}"


def _entries(of: str) -> set[tuple[str, ...]]:
    """What ``placed`` or ``here`` holds: (MAC, host, address) or (MAC,); raises LiveshiftError."""
    found = nft_elements("set", *of.split())
    if found is None:
        raise LiveshiftError(f"network: there is no set {of}", hint="`nft list ruleset` shows all")
    return {_entry(each["concat"]) if isinstance(each, dict) else (each,) for each in found}


def _entry(concat: Sequence[int | str]) -> tuple[str, ...]:
    number, host, address = concat
    digits = f"{_number(number):012x}"
    mac = ":".join(digits[at : at + 2] for at in range(0, 12, 2))
    return mac, str(host), str(ipaddress.ip_address(_number(address)))


def _number(raw: int | str) -> int:
    """Raw payload as nft lists it, which depends on its version."""
    return raw if isinstance(raw, int) else int(raw, 0)
