# SPDX-License-Identifier: Apache-2.0
"""``liveshift lab``: its place on the command line (launcher/lab/ does the work)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...errors import LiveshiftError, NotFound
from ..client.context import LAB_VARIABLE
from ..show import render
from .options import AsTableOrJson, TableOrJson, lab_host_names, lab_names

if TYPE_CHECKING:
    from ..lab import Lab, Link

DEFAULT = "lab"

UP_EXAMPLES = """\
[bold]Examples[/]

liveshift lab up --hosts 3

liveshift lab up big --hosts 5 --slots 2 --spare h4=dedicated --memory h4=2GB

liveshift lab up hasty --timeouts heartbeat=0.3,suspicion=1.5
"""
LINK_EXAMPLES = """\
[bold]Examples[/]

liveshift lab link h1 --rate 200mbit --loss 1

liveshift lab link h1 --cut   [dim]# and --mend[/]

liveshift lab link h1 --to ctl --cut   [dim]# from the orchestrator only[/]

liveshift lab link h1 --rate none --loss 0   [dim]# as new[/]
"""

app = typer.Typer(no_args_is_help=True)

Which = Annotated[
    str | None,
    typer.Option(
        "--lab",
        metavar="NAME",
        help="Which lab; else [dim]$LIVESHIFT_LAB[/], or the one there is.",
        autocompletion=lab_names,
        show_default=False,
    ),
]
LabHostName = Annotated[
    str, typer.Argument(metavar="HOST", help="h0, h1 …", autocompletion=lab_host_names)
]
Several = list[str] | None


def _several(name: str, metavar: str, text: str) -> Any:
    return typer.Option(name, metavar=metavar, help=f"{text}; repeatable.")


def _table(name: str, text: str) -> Any:
    return _several(name, "KEY=VALUE,…", text)


@app.command(epilog=UP_EXAMPLES)
def up(
    name: Annotated[
        str, typer.Argument(metavar="[NAME]", help="Name of the lab, at most 8 characters.")
    ] = DEFAULT,
    hosts: Annotated[
        int, typer.Option("--hosts", "-n", metavar="N", help="Hosts: h0, h1 …; 1 to 32.")
    ] = 3,
    slots: Annotated[
        int, typer.Option("--slots", min=1, max=64, metavar="N", help="Capsules per host.")
    ] = 1,
    spare: Annotated[
        Several, _several("--spare", "HOST=KIND,…", "floating, dedicated (only receives) or none")
    ] = None,
    memory: Annotated[
        Several, _several("--memory", "HOST=SIZE,…", "Limit for incoming capsules, such as 2GB")
    ] = None,
    local: Annotated[
        Several, _several("--local", "DIR", "Each host has this directory for itself")
    ] = None,
    shared: Annotated[
        Several,
        _several(
            "--shared", "DIR", "All hosts see this directory below /tmp or another private place"
        ),
    ] = None,
    timeouts: Annotated[
        Several,
        _several(
            "--timeouts",
            "KEY=SECONDS,…",
            "Of the cluster file's table timeouts, such as suspicion=1.5",
        ),
    ] = None,
    network: Annotated[
        Several, _table("--network", "Of its table network, such as outside=relay,relay=h0")
    ] = None,
    gpu: Annotated[
        Several, _table("--gpu", "Of the cluster file's table gpu, such as fast_path=off")
    ] = None,
    wire: Annotated[Several, _table("--wire", "Of its table wire, such as streams=8")] = None,
    precopy: Annotated[
        Several, _table("--precopy", "Of its table precopy, such as enabled=false")
    ] = None,
    snapshots: Annotated[
        Several, _table("--snapshots", "Of its table snapshots, such as every=30s")
    ] = None,
    logs: Annotated[Several, _table("--logs", "Of its table logs, such as max=1MB")] = None,
) -> None:
    """Make a cluster of virtual hosts on this machine, with an agent in each. Needs root.

    Each host has its own address, hostname, /tmp, /dev/shm and state directory; the rest of the
    machine's files is shared storage. A lab that no longer runs is made again.
    """
    from .. import lab

    made = lab.up(
        name,
        hosts,
        slots=slots,
        spare=_by_key("--spare", spare, "h0=none"),
        memory=_by_key("--memory", memory, "h0=2GB"),
        local=local or (),
        shared=shared or (),
        timeouts=_by_key("--timeouts", timeouts, "suspicion=1.5"),
        tables={
            "network": _by_key("--network", network, "outside=relay"),
            "gpu": _by_key("--gpu", gpu, "fast_path=off"),
            "wire": _by_key("--wire", wire, "streams=8"),
            "precopy": _by_key("--precopy", precopy, "enabled=false"),
            "snapshots": _by_key("--snapshots", snapshots, "every=30s"),
            "logs": _by_key("--logs", logs, "max=1MB"),
        },
        console=render.err(),
    )
    render.out().print(f"lab {made.name} is up: {' '.join(made.hosts)}", soft_wrap=True)
    if len(lab.names()) > 1 and os.environ.get(LAB_VARIABLE) != name:
        render.note(f"hint: there are other labs; `export {LAB_VARIABLE}={name}` chooses this one")


@app.command()
def down(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            help="Which lab; else [dim]$LIVESHIFT_LAB[/], or the one there is.",
            autocompletion=lab_names,
            show_default=False,
        ),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All labs there are.")] = False,
) -> None:
    """End a lab with everything that runs in it, and leave nothing behind."""
    from .. import lab

    for each in lab.names() if every else [_lab_to_end(name)]:
        lab.down(each)
        render.out().print(f"lab {each} is gone", soft_wrap=True)


@app.command("list")
def list_(output: AsTableOrJson = TableOrJson.TABLE) -> None:
    """Show the labs on this machine."""
    from .. import lab

    found = [_row(name) for name in lab.names()]
    if output is TableOrJson.JSON:
        render.print_json(found)
        return
    if not found:
        render.note("no labs; `liveshift lab up --hosts 3` makes one")
        return
    table = render.table("lab", "state", "hosts", "directory")
    for row in found:
        table.add_row(row["name"], row["state"], " ".join(row["hosts"]), row["directory"])
    render.show(table)


@app.command(epilog=LINK_EXAMPLES)
def link(
    host: LabHostName,
    rate: Annotated[
        str | None,
        typer.Option(
            "--rate", metavar="RATE", help="Such as 200mbit, or none.", show_default=False
        ),
    ] = None,
    loss: Annotated[
        float | None,
        typer.Option(
            "--loss", metavar="PERCENT", help="Packets lost, 0 to 100.", show_default=False
        ),
    ] = None,
    delay: Annotated[
        str | None,
        typer.Option(
            "--delay", metavar="TIME", help="One way, such as 5ms, or none.", show_default=False
        ),
    ] = None,
    cut: Annotated[
        bool | None,
        typer.Option("--cut/--mend", help="Take the cable out, put it in.", show_default=False),
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="HOST",
            help="With --cut or --mend: only what goes to and comes from this host, or ctl.",
            autocompletion=lab_host_names,
            show_default=False,
        ),
    ] = None,
    lab_name: Which = None,
) -> None:
    """Make a host's link slower, lossy, longer or cut; without options, show how it is."""
    from .. import lab

    which = _find(lab_name)
    if to is not None:
        if cut is None or (rate, loss, delay) != (None, None, None):
            raise typer.BadParameter("--to goes with --cut or --mend, and with nothing else")
        (lab.separate if cut else lab.rejoin)(which, host, to)
    elif (rate, loss, delay, cut) != (None, None, None, None):
        lab.link(which, host, rate=rate, loss=loss, delay=delay, cut=cut)
    now, apart = which.machine(host).link, lab.cut_off_from(which, host)
    render.out().print(f"{host}: {_described(now, apart)}", soft_wrap=True)


@app.command("exec", context_settings={"allow_interspersed_args": False})
def exec_(
    host: LabHostName,
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[--] [COMMAND [ARG]...]", help="A shell without it.", show_default=False
        ),
    ] = None,
    lab_name: Which = None,
) -> int:
    """Run a command, or a shell, on a lab host; its exit code is kept."""
    from .. import lab

    args = command or []
    if args[:1] == ["--"]:  # typer leaves it there, after the host
        args = args[1:]
    return lab.run_in(_find(lab_name), host, args or [os.environ.get("SHELL") or "/bin/sh"])


def _find(name: str | None) -> Lab:
    from .. import lab

    return lab.find(name or os.environ.get(LAB_VARIABLE) or None)


def _lab_to_end(name: str | None) -> str:
    """Return a lab by name, or the only one there is. One that is half made counts too. Raises
    NotFound or WrongUsage."""
    from .. import lab

    name = name or os.environ.get(LAB_VARIABLE) or None
    there = lab.names()
    if name is None and len(there) == 1:
        return there[0]
    if name is None:
        return lab.find(None).name  # raises, and says what is wrong
    if name not in there and not lab.leftovers(name):
        raise NotFound(
            f'no lab "{name}" on this machine',
            hint=f"there are: {', '.join(there)}" if there else "there are none",
        )
    return name


def _row(name: str) -> dict[str, Any]:
    from .. import lab

    try:
        found = lab.find(name)
    except LiveshiftError:
        return {"name": name, "state": "broken", "hosts": [], "directory": ""}
    return {
        "name": name,
        "state": "running" if found.running else "down",
        "hosts": list(found.hosts),
        "directory": str(found.directory),
    }


def _by_key(option: str, given: list[str] | None, example: str) -> dict[str, str]:
    """Return ``suspicion=1.5,heartbeat=0.3`` as a mapping; raises BadParameter."""
    found: dict[str, str] = {}
    for text in (part for each in given or () for part in each.split(",")):
        key, equals, value = text.partition("=")
        if not (key and equals and value):
            raise typer.BadParameter(f'{option} "{text}": write it as {example}')
        found[key.strip()] = value
    return found


def _described(link: Link, apart: list[str]) -> str:
    parts = ["cut"] if link.cut else []
    parts += [f"cut off from {' '.join(apart)}"] if apart else []
    parts += [f"{link.rate / 1e6:g} Mbit/s"] if link.rate else []
    parts += [f"{link.loss:g} % lost"] if link.loss else []
    parts += [f"{link.delay:g} ms each way"] if link.delay else []
    return ", ".join(parts) or "as it comes: neither slowed nor lossy"
