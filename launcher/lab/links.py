# SPDX-License-Identifier: Apache-2.0
"""Makes a host's link worse: slower, lossy, longer, cut. Both directions get the same.

Slow: tbf. Lossy: nftables at the ingress of both ends; packets are then no larger than a frame,
since a wire does not lose 64 KiB at once. Longer: netem, which many kernels lack. Cut: the switch's
port goes down, and the host's eth0 loses its carrier.
"""

from __future__ import annotations

import re

from ...errors import LiveshiftError, Refused, WrongUsage
from . import wiring
from .commands import ip, run
from .record import Lab, LabHost, Link, claim

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
_FASTEST = 10**12  # bit/s
_BURST_S = 0.004
_SMALLEST_BURST = 16384  # bytes
_QUEUE = "50ms"  # how long a packet waits in a full queue before it is dropped
_NETEM_PACKETS = 100000  # packets that may be on their way at once


def link(
    lab: Lab,
    host: str,
    *,
    rate: str | None = None,
    loss: float | None = None,
    delay: str | None = None,
    cut: bool | None = None,
) -> Link:
    """Change a host's link; None leaves a property as it is. Returns all properties.

    ``rate``: such as "200mbit", or "none". ``loss``: in percent. ``delay``: one way, such as "5ms",
    or "none". ``cut``: True takes the cable out. Raises WrongUsage for a value that a link cannot
    have, Refused if the kernel lacks the means; the link is then as it was.
    """
    given_rate = None if rate is None else bits_per_second(rate)
    given_loss = None if loss is None else _percent(loss)
    given_delay = None if delay is None else milliseconds(delay)
    with claim(lab.directory):
        lab.refresh()
        machine = lab.machine(host)
        before = machine.link
        after = Link(
            rate=before.rate if given_rate is None else given_rate,
            loss=before.loss if given_loss is None else given_loss,
            delay=before.delay if given_delay is None else given_delay,
            cut=before.cut if cut is None else cut,
        )
        try:
            apply(lab, machine, after)
        except LiveshiftError:
            apply(lab, machine, before)
            raise
        machine.link = after
        lab.save()
        return after


def bits_per_second(text: str) -> int:
    """Return the rate that a text names: "200mbit", "1.5 Gbit/s"; 0 for "none". Raises
    WrongUsage."""
    if text.strip().lower() in ("none", "0"):
        return 0
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([kmg]?)bit(?:/s)?", text.strip().lower())
    rate = round(float(match[1]) * _UNITS[match[2]]) if match else 0
    if not 8000 <= rate <= _FASTEST:
        raise WrongUsage(
            f'"{text}" is no rate of a link',
            hint='such as "200mbit" (kbit, mbit, gbit; 8kbit at least), or "none"',
        )
    return rate


def milliseconds(text: str) -> float:
    """Return the delay that a text names, in ms: "5ms", "0.1s", "250us"; 0 for "none". Raises
    WrongUsage."""
    if text.strip().lower() in ("none", "0"):
        return 0.0
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?(us|ms|s)", text.strip().lower())
    delay = float(match[1]) * {"us": 0.001, "ms": 1.0, "s": 1000.0}[match[2]] if match else -1.0
    if not 0 <= delay <= 10_000:
        raise WrongUsage(
            f'"{text}" is no delay of a link', hint='such as "5ms" (us, ms, s; at most 10s), "none"'
        )
    return delay


def _percent(loss: float) -> float:
    if not 0 <= loss <= 100:
        raise WrongUsage(
            f"a link cannot lose {loss} % of its packets", hint="--loss takes 0 to 100"
        )
    return float(loss)


def apply(lab: Lab, machine: LabHost, link: Link) -> None:
    """Give both ends of a host's cable these properties, in place of the ones that they had."""
    for netns, device in ((machine.netns, "eth0"), (lab.switch, machine.name)):
        if _has_queue(netns, device):
            _tc(netns, f"qdisc del dev {device} root")
        for command in queues(device, link):
            _tc(netns, command)
        inside = ["nsenter", f"--net={wiring.NAMED / netns}", "--"]
        run([*inside, "nft", "-f", "-"], stdin=drops(device, link))
        ip(netns, f"link set {device} gso_max_segs {1 if link.loss else 65535}")
    ip(lab.switch, f"link set {machine.name} {'down' if link.cut else 'up'}")


def queues(device: str, link: Link) -> list[str]:
    """Return the tc commands that delay and slow what goes out of ``device``."""
    commands = []
    at = "root"
    if link.delay:
        commands.append(
            f"qdisc add dev {device} root handle 1: netem limit {_NETEM_PACKETS}"
            f" delay {round(link.delay * 1000)}us"
        )
        at = "parent 1:1"
    if link.rate:
        burst = max(round(link.rate / 8 * _BURST_S), _SMALLEST_BURST)
        commands.append(
            f"qdisc add dev {device} {at} handle 10: tbf rate {link.rate}bit burst {burst}"
            f" latency {_QUEUE}"
        )
    return commands


def drops(device: str, link: Link) -> str:
    """Return the nft rules that drop part of what comes in at ``device``. They replace earlier
    ones."""
    table = f"table netdev lab_{device}"
    rules = f"{table} {{}}\ndelete {table}\n"
    if link.loss:
        rules += (
            f"{table} {{\n chain in {{\n  type filter hook ingress device {device} priority 0;\n"
            f"  numgen random mod 10000 < {round(link.loss * 100)} drop\n }}\n}}\n"
        )
    return rules


def _has_queue(netns: str, device: str) -> bool:
    shown = run(["tc", "-netns", netns, "qdisc", "show", "dev", device, "root"])
    return bool(shown.strip()) and not shown.startswith("qdisc noqueue")


def _tc(netns: str, command: str) -> None:
    try:
        run(["tc", "-netns", netns, *command.split()])
    except LiveshiftError as error:
        if " netem " in command and re.search("kind is unknown|No such file", error.message):
            raise Refused(
                "this kernel cannot delay packets: it has no netem queue (sch_netem)",
                hint="`modprobe sch_netem` where it is a module; rate, loss and cut work without",
            ) from None
        raise
