# SPDX-License-Identifier: Apache-2.0
"""The lab's network: a switch (a bridge in a network namespace of its own), a cable to every host.

Everything is made inside the lab's own network namespaces, nothing in the machine's. So removing
the namespaces removes it all, and labs with the same addresses never meet.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

from ...errors import LiveshiftError
from . import plan
from .commands import ip, run
from .record import Lab, LabHost

NAMED = Path("/run/netns")
"""ip(8) keeps named network namespaces in this directory."""

BRIDGE = "lab"


def make_switch(lab: Lab) -> None:
    """Make the switch. The alias of its bridge names the lab's directory, should lab.json be
    lost."""
    run(["ip", "netns", "add", lab.switch])
    ip(
        lab.switch,
        "link set lo up",
        f"link add {BRIDGE} type bridge",
        f"link set {BRIDGE} alias {lab.directory}",
        f"link set {BRIDGE} up",
    )


def plug_in(lab: Lab, machine: LabHost) -> None:
    """Make a host's network namespace, with eth0 on a cable to the switch's port of its name.

    A host keeps its MAC when it boots again, as a machine does: its peers remember the MAC.
    """
    run(["ip", "netns", "add", machine.netns])
    ip(
        lab.switch,
        f"link add {machine.name} type veth peer name eth0 address {plan.mac(machine.address)}"
        f" netns {machine.netns}",
        f"link set {machine.name} master {BRIDGE} up",
    )
    ip(
        machine.netns,
        "link set lo up",
        f"addr add {machine.address}/{plan.PREFIX_LENGTH} dev eth0",
        "link set eth0 up",
    )


def unplug(lab: Lab, machine: LabHost) -> None:
    """Remove a host's cable and network namespace with all in it. May be repeated.

    The port is removed first and by itself: with the namespace it would go some time later.
    """
    with suppress(LiveshiftError):
        ip(lab.switch, f"link del {machine.name}")
    remove(machine.netns)


def namespaces(lab: str | None = None) -> list[str]:
    """Return the names of all existing network namespaces of a lab (None: of all labs)."""
    try:
        found = sorted(os.listdir(NAMED))
    except FileNotFoundError:
        return []
    return [n for n in found if (of := plan.lab_of_netns(n)) and lab in (None, of)]


def identity(netns: str) -> int | None:
    """Return the inode of a named network namespace.

    None: it does not exist, or it is an empty file that an interrupted ``ip netns add`` left.
    """
    try:
        found = os.stat(NAMED / netns)
        return found.st_ino if found.st_dev == os.stat("/proc/self/ns/net").st_dev else None
    except FileNotFoundError:
        return None


def remove(netns: str) -> None:
    """Remove the name of a network namespace; may be repeated."""
    if identity(netns) is None:
        (NAMED / netns).unlink(missing_ok=True)
    else:
        run(["ip", "netns", "del", netns])


def owner(lab: str) -> Path | None:
    """Return the directory of the lab whose switch has this name; None if it is not known."""
    switch = plan.netns(lab, plan.SWITCH)
    if identity(switch) is None:
        return None
    for link in json.loads(run(["ip", "-netns", switch, "-json", "link", "show"])):
        if link["ifname"] == BRIDGE and "ifalias" in link:
            return Path(link["ifalias"])
    return None
