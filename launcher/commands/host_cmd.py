# SPDX-License-Identifier: Apache-2.0
"""``liveshift host add|remove``: edits the cluster file and the keys, prints what to copy where.

Both run on the orchestrator's machine, where the cluster file and all keys are. The orchestrator
and the agents take a changed file up by themselves (runtime/daemon/cluster_file.py). What has to go
to other machines is printed as commands on stdout: liveshift itself copies nothing, since it does
not know how root reaches them. For a host that is this very machine nothing is copied.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...errors import LiveshiftError, NotFound, Refused, WrongUsage
from ...runtime.config.cluster import Cluster, HostSettings, load, parse
from ...runtime.config.values import ORCHESTRATOR, Address, HostName, Unfit, read_value
from ...runtime.control import keyring, keys
from ...runtime.messages import GetStatus, Status
from ..checks.cluster import this_host
from ..client.client import Client
from ..show import render
from .install_units import PROGRAM

ANSWER_S = 3.0
"""`host remove` waits this many seconds for the orchestrator to say what runs on the host."""


def add(config: Path, name: str, address: str, settings: dict[str, Any], output: str) -> None:
    """Enter a host into the cluster file and make its keys; print the commands that remain.

    ``settings``: further keys of its table, as TOML has them. Keys that the host has already are
    kept. Raises WrongUsage for a name or an address that no host can have; Refused if the file has
    the host or its address already, or an operator has the name; NotFound on a machine that does
    not make the cluster's keys; ConfigError if the changed file would be wrong. The file is then as
    it was.
    """
    import tomlkit

    try:
        read_value(HostName, name)
        read_value(Address, address)
    except Unfit as unfit:
        raise WrongUsage(f"host {name}: {unfit}") from None
    config = config.absolute()
    first = _has_no_hosts(config)
    text = config.read_text(encoding="utf-8-sig") if first else _text(config)
    before = () if first else parse(text, str(config)).cluster.hosts
    for host in before:
        if host.name == name:
            raise Refused(
                f'{config} has a host "{name}" already, with the address {host.address}',
                hint=f"choose another name, or `liveshift host remove {name}` first",
            )
        if host.address == address:
            raise Refused(
                f"{address} is the address of {host.name} already",
                hint="give this host an address of its own",
            )
    document = tomlkit.parse(text)
    table = tomlkit.table()
    for key, value in {"address": address, **settings}.items():
        table.add(key, value)
    if first:
        document["hosts"] = tomlkit.table(is_super_table=True)
    hosts: Any = document["hosts"]
    hosts.add(name, table)
    cluster = parse(tomlkit.dumps(document), str(config)).cluster
    written = _make_keys(cluster, name, first)
    replace(config, tomlkit.dumps(document))
    _report("added", [str(path) for path in written], list(adding(config, cluster, name)), output)


def remove(config: Path, name: str, output: str) -> None:
    """Take a host out of the cluster file and revoke its key; print the commands that remain.

    Raises NotFound for a host that is not in the file, Refused while capsules run there or if it is
    the only host.
    """
    import tomlkit

    config = config.absolute()
    text = _text(config)
    before = parse(text, str(config)).cluster
    gone = before.host(name)
    if len(before.hosts) == 1:
        raise Refused(f"{name} is the only host of the cluster", hint="a cluster has one at least")
    _refuse_in_use(before, name)
    document = tomlkit.parse(text)
    hosts: Any = document["hosts"]
    hosts.remove(name)
    cluster = parse(tomlkit.dumps(document), str(config)).cluster
    replace(config, tomlkit.dumps(document))
    directory = cluster.paths.keys
    held = keyring.read(directory) if directory.is_dir() else []
    touched = (
        keys.revoke(directory, name)
        if any(e.holder.name == name and e.since is None for e in held)
        else []
    )
    commands = list(removing(config, cluster, gone, here=name == _here(before)))
    _report("removed", [str(path) for path in touched], commands, output)


def adding(config: Path, cluster: Cluster, name: str) -> Iterator[str]:
    """Yield the commands that bring a new host into a cluster, the new host's own first."""
    new, directory = cluster.host(name), cluster.paths.keys
    examine = _command(*PROGRAM, "doctor", "--config", str(config))
    units = ("install-units", "agent", "--host", name, "--config", str(config), "--start")
    start = _command(*PROGRAM, *units)
    if name == _here(cluster):
        yield f"# {name} is this machine, which has its keys and the file"
        yield examine
        yield start
    else:
        secret = keys.secret_path(directory, name)
        to = f"root@{new.address}"
        yield f"# to {name}: install liveshift there first, with the same {sys.executable}"
        make = _command("mkdir", "-p", str(secret.parent), str(config.parent))
        yield _command("ssh", to, f"{make} && {_command('chmod', '700', str(secret.parent))}")
        yield _command("scp", "-rp", f"{directory}/public", f"{to}:{directory}/")
        yield _command("scp", "-p", str(secret), f"{to}:{secret}")
        yield _command("scp", "-p", str(config), f"{to}:{config}")
        yield _command("ssh", to, examine)
        yield _command("ssh", to, start)
    yield from _to_others(config, cluster, name)


def removing(config: Path, cluster: Cluster, gone: HostSettings, *, here: bool) -> Iterator[str]:
    """Yield the commands that take a host out, its own first. ``here``: it is this machine."""
    yield f"# {gone.name}: end its agent"
    args = ("systemctl", "disable", "--now", "liveshift-agent")
    yield _command(*args) if here else _command("ssh", f"root@{gone.address}", _command(*args))
    yield from _to_others(config, cluster, "")


def _to_others(config: Path, cluster: Cluster, name: str) -> Iterator[str]:
    """Yield the commands for the other hosts. Public keys come first: with the new file an agent
    expects the new host's at once."""
    done = (name, _here(cluster))
    others = [host for host in cluster.hosts if host.name not in done]
    if others:
        yield f"# to the other hosts: {', '.join(h.name for h in others)}; no restart is needed"
    for host in others:
        to = f"root@{host.address}"
        yield _command("scp", "-rp", f"{cluster.paths.keys}/public", f"{to}:{cluster.paths.keys}/")
        yield _command("scp", "-p", str(config), f"{to}:{config}")


def _here(cluster: Cluster) -> str:
    """Return the name of the host that this machine is; "" if it is none."""
    host = this_host(cluster)
    return host.name if host else ""


def _refuse_in_use(cluster: Cluster, name: str) -> None:
    try:
        with Client(cluster.paths.run / "orchestrator.sock") as client:
            rows = client.get(Status, GetStatus(), timeout=ANSWER_S).hosts
    except LiveshiftError as error:
        render.note(
            f"note: whether anything runs on {name} is not known ({error.message}); the"
            " orchestrator refuses the new file if so",
            "yellow",
        )
        return
    found = [row for row in rows if row.name == name]
    if found and found[0].capsules:
        raise Refused(
            f"{name} still runs {', '.join(found[0].capsules)}",
            hint=f"`liveshift drain {name}` first, or stop the jobs",
        )


def _has_no_hosts(config: Path) -> bool:
    """Whether a file names no host yet. All else in it is checked once the host is in it."""
    import tomllib

    try:
        return not tomllib.loads(config.read_text(encoding="utf-8-sig")).get("hosts")
    except (OSError, ValueError):  # _text reports it as every command does
        return False


def _make_keys(cluster: Cluster, name: str, first: bool) -> list[Path]:
    """Make the host's key pair, unless it is there already; with the first host of a new cluster
    also the orchestrator's. Returns the files written. Raises NotFound if this is not the machine
    that has the cluster's keys."""
    directory = cluster.paths.keys
    if first and not keys.public_path(directory, ORCHESTRATOR).exists():
        return keys.init(directory, [name])
    secret = keys.secret_path(directory, ORCHESTRATOR)
    if not secret.exists():
        raise NotFound(
            f"{secret} is not here, so this is not the machine where the cluster's keys are made",
            hint="run this on the orchestrator's machine; `liveshift keys init` makes the keys of a"
            " new cluster there",
        )
    there = keys.secret_path(directory, name).exists()
    return [] if there else keys.add_host(directory, name)


def replace(path: Path, text: str) -> None:
    """Write a file whole or not at all, with the mode and owner that it had. Raises
    LiveshiftError."""
    before = path.stat()
    staged = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with staged.open("w") as file:
            os.fchmod(file.fileno(), before.st_mode & 0o7777)
            os.fchown(file.fileno(), before.st_uid, before.st_gid)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        staged.rename(path)
    except OSError as error:
        raise LiveshiftError(
            f"cannot write {path}: {error.strerror}", hint="nothing was changed in it"
        ) from error
    finally:
        staged.unlink(missing_ok=True)


def _text(config: Path) -> str:
    load(config)  # reports a wrong or missing file as every command does
    return config.read_text(encoding="utf-8-sig")


def _command(*args: str) -> str:
    return shlex.join(args)


def _report(what: str, files: list[str], commands: list[str], output: str) -> None:
    if output == "json":
        render.print_json({"done": what, "files": files, "commands": commands})
        return
    for path in files:
        render.note(path)
    render.note("The commands that remain, in this order:")
    sys.stdout.write("\n".join(commands) + "\n")
