# SPDX-License-Identifier: Apache-2.0
"""Makes a lab: its directory, network, hosts and daemons. If a part fails, nothing is left."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypedDict, Unpack

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ...criu_glue.capsule.mounts import mount_table
from ...errors import NotFound, NotPermitted, Refused, WrongUsage
from ...runtime.config.cluster import Cluster, dump
from ...runtime.control import keys
from . import daemons, plan, sandboxes, wiring
from .clearing import clear
from .record import Lab, LabHost, claim, load, refuse_inside, root


class Wanted(TypedDict, total=False):
    """What a lab should have beside its hosts.

    These go into the cluster file: ``slots`` for every host; ``spare`` and ``memory`` by host;
    ``timeouts`` (seconds) and ``tables`` by their keys there. ``local``: directories that every
    host has for itself. ``shared``: directories below a private place (/tmp …) that all hosts must
    see. They always see the program's directories and the current one.
    """

    slots: int
    spare: Mapping[str, str]
    memory: Mapping[str, str]
    local: Sequence[str]
    shared: Sequence[str]
    timeouts: Mapping[str, str]
    tables: plan.Tables


def up(name: str, hosts: int, *, console: Console | None = None, **wanted: Unpack[Wanted]) -> Lab:
    """Make a lab and return it once every agent is up.

    A lab of that name that no longer runs is replaced. If ``console`` is a terminal, it shows the
    progress. Raises WrongUsage, Refused if the lab runs, NotPermitted without root, LiveshiftError
    if something fails. After any exception, a Ctrl-C too, nothing is left.
    """
    plan.host_names(hosts)
    with _bar(console, 2 * hosts + 2) as say, fresh(name, hosts, **wanted) as lab:
        say("switch", 0)
        wiring.make_switch(lab)
        for done, machine in enumerate(lab.machines, 1):
            say(f"host {machine.name}", done)
            boot(lab, machine)
            daemons.start(lab, machine)  # it starts while the next host is made
            lab.save()
        daemons.wait_ready(lab, seen=lambda n: say("agents reporting", hosts + 2 + n))
        lab.state = "up"
        lab.save()
    return lab


def boot(lab: Lab, machine: LabHost) -> None:
    """Make a host's network and start the host, without its daemon."""
    wiring.plug_in(lab, machine)
    sandboxes.start(lab, machine)
    lab.save()


@contextmanager
def fresh(
    name: str,
    hosts: int,
    *,
    slots: int = 1,
    spare: Mapping[str, str] | None = None,
    memory: Mapping[str, str] | None = None,
    local: Sequence[str] = (),
    shared: Sequence[str] = (),
    timeouts: Mapping[str, str] | None = None,
    tables: plan.Tables | None = None,
) -> Iterator[Lab]:
    """Make a lab that is only a directory (lab.json, cluster file, keys), and hold its lock.

    If the block raises, everything of the lab is removed again.
    """
    directory = root() / plan.checked_name(name)
    local = plan.local_directories(local)
    gpu = (tables or {}).get("gpu", {})
    libraries = [path for key, path in gpu.items() if key == "libraries" and path]
    wanted = [*plan.needed_directories(), *map(_directory, [*shared, *libraries]), str(directory)]
    back = plan.brought_back(wanted, local)
    mounted = plan.machine_mounts(mount_table("self").values(), local)
    cluster = plan.cluster(
        name,
        hosts,
        directory,
        slots=slots,
        spare=spare,
        memory=memory,
        shared=[*back, *mounted],
        timeouts=timeouts,
        tables=tables,
    )
    if os.geteuid() != 0:
        raise NotPermitted(
            "a lab is made of namespaces, which needs root", hint=f"sudo liveshift lab up {name}"
        )
    refuse_inside()
    _make_directory(name, directory)
    with claim(directory):
        try:
            lab = Lab(
                name=name,
                directory=directory,
                hosts={h.name: _host(name, h.name, h.address) for h in cluster.hosts},
                control=_host(name, plan.CONTROL, plan.CONTROL_ADDRESS),
                shared=back,
                local=local,
            )
            lab.save()
            _write_files(lab, cluster)
            yield lab
        except BaseException:
            clear(name, directory)
            raise


def _make_directory(name: str, directory: Path) -> None:
    """Make the lab's directory, in place of a lab that no longer runs. Raises Refused if it
    runs."""
    if not directory.parent.exists():
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.parent.chmod(0o755)
    if directory.exists():
        with claim(directory):
            if _runs(name):
                raise Refused(
                    f'lab "{name}" is there already',
                    hint=f"`liveshift lab down {name}` removes it; another name makes another lab",
                )
            clear(name, directory)
    elif wiring.namespaces(name):
        clear(name, directory)
    directory.mkdir()
    directory.chmod(0o755)


def _runs(name: str) -> bool:
    try:
        lab = load(name)
    except NotFound:
        return False
    return lab.state == "up" and lab.running  # else `lab up` was killed, or the machine went down


def _host(lab: str, name: str, address: str) -> LabHost:
    return LabHost(name=name, address=address, netns=plan.netns(lab, name))


def _write_files(lab: Lab, cluster: Cluster) -> None:
    keys.init(cluster.paths.keys, [host.name for host in cluster.hosts])
    for path, text in (
        (lab.config, f"# Made by `liveshift lab up` for lab {lab.name}.\n{dump(cluster)}"),
        (lab.directory / "hosts", plan.hosts_file(len(cluster.hosts))),
    ):
        path.write_text(text)
        path.chmod(0o644)
    (lab.directory / "log").mkdir()
    for machine in lab.machines:
        (lab.directory / machine.name).mkdir()
    for path in (lab.directory / "log", *(lab.directory / m.name for m in lab.machines)):
        path.chmod(0o755)


def _directory(path: str) -> str:
    if not os.path.isdir(path):
        raise WrongUsage(f"{path} cannot be shared: there is no such directory")
    return path


@contextmanager
def _bar(console: Console | None, total: int) -> Iterator[Callable[[str, int], None]]:
    """Show a progress bar on a terminal. Yields say(what is going on, steps done), which sets
    it."""
    columns = (TextColumn("lab: {task.description}"), BarColumn(), TimeElapsedColumn())
    hidden = console is None or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        task = progress.add_task("preparing", total=total)

        def say(what: str, done: int) -> None:
            progress.update(task, description=what, completed=done)

        yield say
