# SPDX-License-Identifier: Apache-2.0
"""The fence: which frames a host accepts on a job's overlay, and what its capsules cannot reach.

A host accepts a VXLAN packet with the job's id only under four conditions. The packet holds IPv4.
It was sent to the host's own cluster address (the kernel's socket also takes other addresses and
broadcasts). Its inner source MAC and address belong to one mobile address. Its outer source is the
host where the address book puts that mobile address. All other packets are dropped: those of a
stray copy on an earlier host, of hosts outside the cluster, with unknown MACs, and with MACs of
capsules that are on this host. A capsule's port on its host accepts only the capsule's own MAC and
address, and only while the address book puts the capsule there. So one transaction that changes the
address book silences the old copy and admits the new one.

One host may relay all traffic between capsules and the world (network.py). Only that host may send
to capsules under an address that is neither a capsule's nor its own.

A capsule reaches the services of hosts and the world. It does not reach the orchestrator, agents'
ports, any VXLAN port (by which it could forge frames), and other jobs. Users of this host, except
root, reach neither agents' ports nor a capsule, and cannot send VXLAN with an id of a job. Only the
job's own user reaches its capsules on their host. A capsule may use a service that a user runs
here, so answers pass. This host forwards no new connection to a capsule.

The rules that keep users and containers from sending as this host exist while the host's agent
runs, with or without jobs (:func:`hold`), and as long as a job is here.

The socket's owner (``meta skuid``) separates users' VXLAN from the kernel's. But a packet that a
user sends through a tunnel still has that user's socket after the kernel has wrapped it. So the
rules refuse only ids of jobs, and other VXLAN on this port passes. A packet that leaves by a bridge
of ours carries a mark, which only root can set, until the kernel has wrapped it.

All jobs of a host share one table (``ip liveshift``). A map leads from the VXLAN id to the job's
chain, and a set holds MAC, host and address, so the cost does not grow with jobs or capsules. A
rewind gives the job another id (``Overlay.wire_id``). A frame with an earlier id passes this table,
and the kernel drops it: no device has that id.

The rules use raw payload expressions, since nft before 1.0.7 has no words for VXLAN. Bits 96-119 of
the UDP header are the id, 176-223 the inner source MAC, 224-239 the inner protocol, 336-367 the
inner source address. Datagrams are whole at the input and forward hooks: the connection tracking
for masquerading needs them defragmented. Datagrams that the kernel merges before (GRO) have equal
headers.

Each job has a table ``netdev liveshift_<number>`` with an ingress chain for each capsule's port. An
ingress chain works in every kernel, while nftables' bridge family is often not built.
"""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...errors import LiveshiftError
from .iproute import in_turn, nft, nft_elements
from .overlay import BRIDGES, ROUNDS, STRIDE, VXLAN_PORT, Overlay, address_of, mac, most_jobs

TABLE = "ip liveshift"
HELD = "agent_runs"
"""The name of an empty chain, whose existence records that an agent holds the shared rules."""
MARK = "0x6c737678"
"""The mark of packets that a host's own processes send by a bridge of ours. The rules remove it
once the kernel has wrapped the packet."""


@dataclass(frozen=True)
class Surroundings:
    """What a host's rules must know of its cluster.

    ``hosts`` are the addresses of the cluster's hosts, ``overlays`` the network that holds all
    jobs' subnets, ``control`` the (address, TCP port) of the orchestrator, ``agents`` those of
    agents, at least one. ``relay`` is the address of the relay's host, "" for none.
    """

    hosts: Sequence[str]
    overlays: str
    control: Sequence[tuple[str, int]]
    agents: Sequence[tuple[str, int]]
    relay: str = ""


@in_turn
def hold(around: Surroundings) -> None:
    """Lay the rules that all jobs share, and keep them even without jobs, until :func:`release`.

    Otherwise a user of a host without a job could send frames under the host's address, and other
    hosts would accept them.
    """
    nft(f"{_shared(around)}\nadd chain {TABLE} {HELD}\n")


@in_turn
def release() -> None:
    """Undo :func:`hold`: the shared rules go with the last job, or now if there is no job."""
    if _held():
        jobs = nft_elements("map", *TABLE.split(), "fences")
        nft(f"delete chain {TABLE} {HELD}\n" if jobs else f"delete table {TABLE}\n")


def _held() -> bool:
    return nft_elements("chain", *TABLE.split(), HELD) is not None


def laying(overlay: Overlay, host_address: str, around: Surroundings) -> str:
    """The rules of a job's fence, which accepts only the cluster's hosts themselves at first.

    They may be loaded again; the rules that all jobs share are then those of the last time.
    """
    own, vni = overlay.bridge, overlay.vni
    lines = [
        f"flush chain {TABLE} fence_{vni}",
        f"add rule {TABLE} fence_{vni} ip daddr != {host_address} drop",
        f"add rule {TABLE} fence_{vni} @th,224,16 != 0x0800 drop",
        *(f"add rule {TABLE} fence_{vni} {rule} return" for rule in _relayed(overlay, around)),
        f"add rule {TABLE} fence_{vni} @th,176,48 . ip saddr . @th,336,32 != @placed_{vni} drop",
        _leading(overlay),
        f'add element {TABLE} owned {{ "{own}" : jump owner_{vni} }}',
        f'add element {TABLE} within {{ "{own}" . "{own}" }}',
        f'add element {TABLE} gateways {{ "{own}" . {overlay.gateway} }}',
    ]
    # Other hosts answer this host's capsules with the gateway's MAC and their own address.
    others = sorted({*around.hosts} - {host_address})
    if gateways := ", ".join(_element(mac(overlay.gateway), host, host) for host in others):
        lines.append(f"add element {TABLE} placed_{vni} {{ {gateways} }}")
    return f"""{_shared(around)}
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


def _shared(around: Surroundings) -> str:
    """The rules of a host's table that all jobs share."""
    overlays = around.overlays
    listening = sorted({*around.agents})
    endpoints = sorted({*around.control, *listening})
    everyone = f"{{ {', '.join(sorted({*around.hosts}))} }}"
    ports = f"{{ {', '.join(sorted({str(port) for _, port in endpoints}))} }}"
    pairs, theirs = (
        f"{{ {', '.join(f'{address} . {port}' for address, port in among)} }}"
        for among in (endpoints, listening)
    )
    refuse = "reject with icmp type admin-prohibited"
    vxlan = f"udp dport {VXLAN_PORT}"
    ids = _ids_of_jobs(most_jobs(overlays))
    user_to_capsule = f'oifname != "lo" ip daddr {overlays} meta skuid != 0'
    shared = {  # each call flushes these chains and writes them again, in one transaction
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
            # No connection tracking here: even if it has forgotten a connection, answers must pass.
            f"{user_to_capsule} tcp flags & (fin | syn | rst | ack) == syn jump users",
            f'oifname "{BRIDGES}" meta skuid != 0 meta mark set {MARK}',
        ],
        "sent_unasked": [f"{user_to_capsule} meta l4proto != tcp ct state new jump users"],
        "users": ["oifname vmap @owned", refuse],
        "through": [
            "iifname . oifname @within accept",  # bridge-nf-call-iptables sends bridged frames here
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
            # Traffic to the relay is bridged; bridge-nf-call-iptables sends it here.
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


def _leading(overlay: Overlay) -> str:
    """The rule that sends the frames of a job to its fence."""
    return f"add element {TABLE} fences {{ {overlay.wire_id} : jump fence_{overlay.vni} }}"


def _ids_of_jobs(most: int) -> str:
    """The match of all VXLAN ids that ``most`` jobs may have: the first byte of the id counts
    rewinds, the other two are the number of the job."""
    if most == STRIDE:  # the number of the last job takes more than two bytes
        return f"@th,96,24 <= {ROUNDS * STRIDE}"
    return f"@th,96,8 < {ROUNDS} @th,104,16 <= {most}"


def _ids(overlay: Overlay) -> set[int]:
    """The VXLAN ids that lead to the fence of a job: one, or two while the id changes."""
    ids = {_number(each[0]) for each in nft_elements("map", *TABLE.split(), "fences") or []}
    return {number for number in ids if (number - overlay.vni) % STRIDE == 0}


def renumber(overlay: Overlay) -> None:
    """From now on ``overlay.wire_id`` leads to the job's fence, and no other id of the job does.

    The caller has removed the device with the other id: its frames would pass unchecked.
    """
    others = sorted(_ids(overlay) - {overlay.wire_id})
    old = [f"delete element {TABLE} fences {{ {number} }}" for number in others]
    nft("\n".join([*old, _leading(overlay)]) + "\n")


def stands(overlay: Overlay) -> bool:
    """True if the fence exists; another program's ``nft flush ruleset`` removes it."""
    return nft_elements("set", *TABLE.split(), f"placed_{overlay.vni}") is not None


def elsewhere(overlay: Overlay) -> dict[str, str]:
    """The mobile addresses that the fence accepts from another host, and from which; raises
    LiveshiftError if there is no fence."""
    gateway = mac(overlay.gateway)  # hosts speak for themselves under it
    entries = _entries(f"{TABLE} placed_{overlay.vni}")
    return {address: host for owner, host, address in entries if owner != gateway}


def accept(overlay: Overlay, where: Mapping[str, str | None]) -> None:
    """From now on accept each mobile address only from its host (None: from its port here).

    Only differences are written, since removing an element costs a grace period of the kernel
    (10 ms).
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


def guarding(overlay: Overlay, index: int, owner: int | None) -> str:
    """The rules by which a capsule's port accepts only the capsule's own MAC and address, while it
    is here.

    ``owner`` is the uid of the job's user, who may connect to the capsule from this host.

    The port drops packets to the gateway's MAC with an address of the job's subnet: this host would
    forward them under the gateway's MAC, past the fences of other hosts.
    """
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
    """On the relay's host: forward what capsules on other hosts send to the relay.

    Such a frame gets the gateway's MAC before the bridge sees it. So it reaches this host's own
    stack and the bridge does not forward it. Otherwise, with bridge-nf-call-iptables, the
    connection would be tracked in the bridge already and would not be masqueraded later.
    """
    table = f"netdev liveshift_{overlay.vni}"
    chain = f"{table} {overlay.vxlan}"
    nft(f"""
add element {table} relays {{ {mac(overlay.relay)} }}
add chain {chain} {{ type filter hook ingress device "{overlay.vxlan}" priority 0; }}
flush chain {chain}
{_to_gateway(overlay, chain)}
""")


def _to_gateway(overlay: Overlay, chain: str) -> str:
    """The rules for frames to the relay: drop those for the job's own subnet, and give the others
    the gateway's MAC on the relay's host."""
    return f"""
add rule {chain} ether daddr {mac(overlay.relay)} ip daddr {overlay.subnet} drop
add rule {chain} ether daddr @relays ether daddr set {mac(overlay.gateway)}
"""


def unguard(overlay: Overlay, index: int) -> None:
    """Remove the rules of a port that is gone; kernels before 6.16 remove them themselves."""
    chain = f"netdev liveshift_{overlay.vni} {overlay.veth(index)}"
    for rules in (
        f"flush chain {chain}\ndelete chain {chain}\n",
        f"delete element {TABLE} housed_{overlay.vni} {{ {overlay.address(index)} }}\n",
    ):
        with contextlib.suppress(LiveshiftError):  # there may be no such chain or element
            nft(rules)


def lift(overlay: Overlay) -> None:
    """Remove the fence of a job; the last one also removes the shared rules, unless an agent holds
    them. May be repeated.
    """
    vni, own = overlay.vni, overlay.bridge
    if not stands(overlay):
        return
    of_all = nft_elements("map", *TABLE.split(), "fences") or []
    ids = sorted(_ids(overlay) or {overlay.wire_id})
    if len(of_all) == len(ids) and not _held():
        rules = f"delete table {TABLE}\n"
    else:
        rules = f"""
delete element {TABLE} fences {{ {", ".join(map(str, ids))} }}
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


def _relayed(overlay: Overlay, around: Surroundings) -> list[str]:
    """The conditions for the world's answers through the relay: the relay's host sends them with
    the gateway's MAC and with any address outside the overlays."""
    if not around.relay:
        return []
    jobs = ipaddress.ip_network(around.overlays)
    first, last = int(jobs.network_address), int(jobs.broadcast_address)
    gateway = mac(overlay.gateway).replace(":", "")
    sender = f"ip saddr {around.relay} @th,176,48 0x{gateway} @th,336,32"
    return [f"{sender} < {first:#010x}", f"{sender} > {last:#010x}"]


def _element(mac: str, host: str, address: str) -> str:
    """An element of a job's set ``placed``; nft takes raw payload as numbers."""
    return f"0x{mac.replace(':', '')} . {host} . {int(ipaddress.ip_address(address)):#010x}"


def _entries(of: str) -> set[tuple[str, ...]]:
    """The elements of ``placed`` or ``here``: (MAC, host, address) or (MAC,); raises
    LiveshiftError."""
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
    """The number of a raw payload, which nft lists in a form that depends on its version."""
    return raw if isinstance(raw, int) else int(raw, 0)
