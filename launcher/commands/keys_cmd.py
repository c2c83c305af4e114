# SPDX-License-Identifier: Apache-2.0
"""``liveshift keys``: makes, lists and revokes the key pairs by which a cluster knows its own, and
says which other clusters it trusts."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ...errors import NotFound
from ...runtime.config.access import Role
from ...runtime.config.cluster import Cluster, load
from ...runtime.control import keyring, keys, signatures
from ..show import render

STATE_STYLE = {"valid": "green", "revoked": "dim", "unusable": "bold red"}


def init(config: Path) -> None:
    """Make the keys of the orchestrator and of every host in the cluster file."""
    cluster = load(config)
    _report(cluster, keys.init(cluster.paths.keys, [host.name for host in cluster.hosts]))


def add_host(config: Path, name: str) -> None:
    """Make the keys of one host, which must be in the cluster file."""
    cluster = load(config)
    _report(cluster, keys.add_host(cluster.paths.keys, cluster.host(name).name))


def add_operator(config: Path, name: str, role: str) -> None:
    """Make the keys of an operator, who asks from other machines."""
    cluster = load(config)
    directory = cluster.paths.keys
    _print(keys.add_operator(directory, name, Role(role)))
    sys.stderr.write(
        f"Hand {directory}/operators/{name}.key and {directory}/public/orchestrator.pub to {name},"
        f" who keeps them side by side (the key with mode 0600), and remove the key here.\n"
        f"liveshift --connect tcp://{cluster.orchestrator} --key {name}.key whoami\n"
    )


def revoke(config: Path, name: str) -> None:
    """Take the key of a host or an operator out of use."""
    directory = load(config).paths.keys
    keys.revoke(directory, name)
    sys.stdout.write(f"{name} is revoked\n")
    sys.stderr.write(
        f"An orchestrator that reads {directory} hangs up on {name} within a second. Copy"
        f" {directory}/public to every other machine again: each then refuses {name} by itself.\n"
    )


def trust(config: Path, name: str, key: str) -> None:
    """Let the signatures of another cluster count."""
    sys.stdout.write(f"{signatures.trust(load(config).paths.keys, name, key)}\n")


def signer(config: Path) -> None:
    """Print the public half of the key that signs what this cluster saves."""
    sys.stdout.write(f"{signatures.Signatures(load(config).paths.keys).key}\n")


def show(config: Path, output: str) -> None:
    """Print all hosts and operators that have or had a key. Raises NotFound if there are none."""
    directory = load(config).paths.keys
    entries = keyring.read(directory) if directory.is_dir() else []
    if not entries:
        raise NotFound(f"{directory} holds no keys", hint="`liveshift keys init` makes them")
    rows: list[dict[str, Any]] = [
        {
            "name": entry.holder.name,
            "kind": entry.holder.kind,
            "role": entry.holder.role.value if entry.holder.role else None,
            "state": entry.state,
            "since": entry.since,
            "file": str(entry.path),
            "problem": str(entry.problem) if entry.problem and not entry.since else None,
        }
        for entry in entries
    ]
    if output == "json":
        render.print_json(rows)
        return
    from rich.text import Text

    table = render.table("name", "kind", "role", "state", "since")
    for row in rows:
        state = Text(row["state"], style=STATE_STYLE[row["state"]])
        table.add_row(row["name"], row["kind"], row["role"] or "", state, row["since"] or "")
    render.show(table)
    for row in rows:
        if row["problem"]:
            render.failure(row["problem"])


def _report(cluster: Cluster, written: Iterable[Path]) -> None:
    _print(written)
    directory = cluster.paths.keys
    sys.stderr.write(
        f"Copy {directory}/public to every machine, and each {directory}/hosts/NAME.key to its own"
        " host only, at the same place.\n"
    )


def _print(paths: Iterable[Path]) -> None:
    for path in paths:
        sys.stdout.write(f"{path}\n")
