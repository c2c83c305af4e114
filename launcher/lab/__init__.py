# SPDX-License-Identifier: Apache-2.0
"""The lab: a cluster of virtual hosts on this machine, for trying, testing and breaking things.

Each host is a sandbox (``capsule-init --hold``), as a capsule's is, with its own pid, mount, uts,
ipc and network namespaces. It has its own address, hostname, /tmp, /var/tmp, /dev/shm, /run and
state directory. A real agent with a real key runs in it. A cable to the lab's switch connects it;
the cable can be cut, slowed or made to lose packets. Two machines can also be cut off from each
other alone. For the programs inside, a host is like a machine: no daemon knows of labs.
"""

from .clearing import down, leftovers
from .cuts import cut_off_from, rejoin, separate
from .daemons import start_daemon, stop_daemon, wait_ready
from .links import link
from .making import up
from .record import Lab, LabHost, Link, find, names
from .sandboxes import boot_host, entry, kill_host, run_in

__all__ = [
    "Lab",
    "LabHost",
    "Link",
    "boot_host",
    "cut_off_from",
    "down",
    "entry",
    "find",
    "kill_host",
    "leftovers",
    "link",
    "names",
    "rejoin",
    "run_in",
    "separate",
    "start_daemon",
    "stop_daemon",
    "up",
    "wait_ready",
]
