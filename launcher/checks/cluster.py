# SPDX-License-Identifier: Apache-2.0
"""Checks a cluster file against this machine and the way to the others: keys, ports, equal files,
shared paths."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from ...errors import LiveshiftError, NotFound
from ...runtime.agent.host.data_link import interfaces
from ...runtime.config.cluster import Cluster, HostSettings
from ...runtime.config.values import ORCHESTRATOR
from ...runtime.control import keys
from ..client.client import Client
from ..client.context import DAEMONS
from .finding import Finding, Verdict

CONNECT_S = 2.0
"""A port that takes longer than this many seconds counts as silent. In a cluster a connection takes
milliseconds."""

REQUEST_S = 3.0
AT_ONCE = 32

LOCAL = frozenset({"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs"})
"""These file systems belong to one machine alone, unless that machine exports them."""


def own_keys(cluster: Cluster | None) -> Iterator[Finding]:
    """Check the secret keys of this machine (its host's, the orchestrator's), and the public keys
    that it needs."""
    if cluster is None:
        return
    host, directory = this_host(cluster), cluster.paths.keys
    names = [host.name] if host else []
    if keys.secret_path(directory, ORCHESTRATOR).exists():
        names.append(ORCHESTRATOR)
    needed = f"{directory}: the secret key of this machine, public/ with all hosts"
    if not names:
        found = (
            f"{directory} has no secret key for this machine, and no host in the file has its"
            " address"
        )
        yield Finding("keys", found, needed, Verdict.WARN, "copy them from where they were made")
        return
    try:
        for name in names:
            keys.load_private(directory, name)
        public = keys.public_keys(directory)
        missing = [h.name for h in cluster.hosts if h.name not in public]
        keys.public_key(directory, ORCHESTRATOR)
    except LiveshiftError as error:
        yield Finding("keys", str(error), needed, Verdict.FAIL, error.hint or "see SECURITY.md")
        return
    if missing:
        found = f"no public key of {', '.join(missing)} in {directory}"
        advice = "`liveshift keys add-host NAME` where they are made, then copy public/ again"
        yield Finding("keys", found, needed, Verdict.WARN, advice)
        return
    yield Finding("keys", f"of {' and '.join(names)}, and public ones", needed, Verdict.OK)


def ports(cluster: Cluster | None) -> Iterator[Finding]:
    """Check whether the other machines' TCP ports take connections. UDP 4789 (VXLAN) is not tried:
    nothing would answer."""
    if cluster is None:
        return
    here = this_host(cluster)
    targets = {str(cluster.orchestrator): "the orchestrator"}
    for host in cluster.hosts:
        if here is None or host.name != here.name:
            targets |= {str(host.data): host.name, str(host.pages): host.name}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        problems = dict(zip(targets, pool.map(_connect, targets), strict=True))
    needed = "TCP to the orchestrator's port and to each host's data_port and pages_port"
    wrong = {address: why for address, why in problems.items() if why}
    if not wrong:
        found = f"{len(targets)} connections to {len(set(targets.values()))} machines"
        yield Finding("ports", found, needed, Verdict.OK)
        return
    found = "; ".join(f"{targets[address]} at {address}: {why}" for address, why in wrong.items())
    silent = any(why == "no answer" for why in wrong.values())
    advice = "start the daemon where a connection is refused"
    if silent:
        advice += "; open the port in the firewall (UDP 4789 too) where there is no answer"
    yield Finding("ports", found, needed, Verdict.WARN, advice)


def equal_files(cluster: Cluster | None) -> Iterator[Finding]:
    """Check whether all agents use the orchestrator's cluster file. A daemon of this machine is
    asked."""
    if cluster is None:
        return
    needed = "the orchestrator's file on every host"
    socket_ = next((p for n in DAEMONS if (p := cluster.paths.run / n).is_socket()), None)
    if socket_ is None:
        yield Finding("cluster files", "not compared: no daemon runs here", needed, Verdict.OK)
        return
    from ...runtime.messages import GetStatus, Status

    try:
        with Client(socket_) as client:
            rows = client.get(Status, GetStatus(), REQUEST_S).hosts
    except LiveshiftError as error:
        found = f"not compared: {error}"
        yield Finding("cluster files", found, needed, Verdict.WARN, error.hint or "see its log")
        return
    other = [row.name for row in rows if row.other_file]
    if other:
        advice = "copy the orchestrator's file there: the agent loads it by itself"
        found = f"{', '.join(other)} {'uses' if len(other) == 1 else 'use'} another file"
        yield Finding("cluster files", found, needed, Verdict.WARN, advice)
    else:
        yield Finding("cluster files", f"equal on {len(rows)} hosts", needed, Verdict.OK)


def shared_paths(cluster: Cluster | None) -> Iterator[Finding]:
    """Check whether the paths of ``files.shared`` exist here, on a file system that others see."""
    if cluster is None or not cluster.files.shared:
        return
    mounts = {p.mountpoint: p.fstype for p in psutil.disk_partitions(all=True)}
    missing = [str(path) for path in cluster.files.shared if not path.exists()]
    local = {
        str(path): kind
        for path in cluster.files.shared
        if path.exists() and (kind := _file_system(path, mounts)) in LOCAL
    }
    needed = "the same files at the same paths on every host"
    if missing:
        found = f"this machine lacks {', '.join(missing)}"
        advice = "mount them, or take them out of files.shared"
        yield Finding("shared paths", found, needed, Verdict.FAIL, advice)
    elif local and len(cluster.hosts) > 1:
        found = ", ".join(f"{path} is on {kind}" for path, kind in local.items())
        advice = (
            "such a file system is this machine's alone, as a rule: mount a shared one there, or"
            " list the path under files.carried"
        )
        yield Finding("shared paths", found, needed, Verdict.WARN, advice)
    else:
        found = ", ".join(f"{p} ({_file_system(p, mounts)})" for p in cluster.files.shared)
        yield Finding("shared paths", found, needed, Verdict.OK)


def this_host(cluster: Cluster) -> HostSettings | None:
    """Return the host of the cluster that has one of this machine's addresses, or None."""
    mine = {address for interface in interfaces() for address in interface.addresses}
    return next((host for host in cluster.hosts if host.address in mine), None)


def _connect(address: str) -> str:
    """Try one TCP connection. Returns why it failed in a few words, or ""."""
    host, _, port = address.rpartition(":")
    began = time.monotonic()
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except TimeoutError:
        return "no answer"
    except ConnectionRefusedError:
        return "connection refused"
    except OSError as error:
        waited = time.monotonic() - began
        return f"{error.strerror or error} (after {waited:.1f} s)"
    return ""


def _file_system(path: Path, mounts: dict[str, str]) -> str:
    """Return the type of the file system that holds a path; raises NotFound."""
    real = path.resolve()
    for parent in (real, *real.parents):
        if str(parent) in mounts:
            return mounts[str(parent)]
    raise NotFound(f"{path} is not on any file system that /proc/mounts lists")
