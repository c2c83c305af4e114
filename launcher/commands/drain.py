# SPDX-License-Identifier: Apache-2.0
"""``liveshift drain``: taints a host and waits until it is empty."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...errors import LiveshiftError, Refused
from ...runtime.model.steps import MigrationStep
from ..show import deadline, render
from .options import AsTableOrJson, Host, OpenClient, TableOrJson, duration, with_client

if TYPE_CHECKING:
    from ...runtime.messages import Evacuating, Event, HostRow, MigrationRow, Status
    from ..client.client import Client

LOOK_S = 0.2
STUCK_LOOKS = 5  # looks in a row at which nothing moves and everything left was refused

EXAMPLES = """\
[bold]Examples[/]

liveshift drain h1

liveshift drain h1 --dry-run --within 30s

liveshift drain h1 --within 30s   [dim]# a spot instance's notice[/]

liveshift drain h1 --timeout 10m --reason "kernel update" && ssh h1 reboot
"""


@with_client
def drain(
    open_client: OpenClient,
    host: Host,
    timeout: Annotated[
        str,
        typer.Option(
            "--timeout",
            metavar="TIME",
            help="Give up waiting after this long, with exit code 124; 0s waits for ever.",
        ),
    ] = "0s",
    reason: Annotated[
        str, typer.Option("--reason", "-r", metavar="TEXT", help="Why; shown wherever it matters.")
    ] = "drain",
    within: deadline.Within = "0s",
    severity: deadline.AsSeverity = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print where everything would go; do nothing.")
    ] = False,
    output: AsTableOrJson = TableOrJson.TABLE,
) -> int:
    """Move everything off a host and wait until it is empty.

    It first says after what time that will be, as far as that can be predicted.

    Exit code 5 when something on it cannot move, with --dry-run too; 124 at the timeout, and when
    the host was not empty --within its time (with --dry-run: when it may not be). The host stays
    tainted either way: `liveshift uncordon` takes the taint back.
    """
    from ...runtime.messages import SetTaint

    seconds, as_json = duration(timeout), output is TableOrJson.JSON
    with open_client() as client:
        if dry_run:
            return _plan(client, host, reason, as_json, duration(within), severity or "")
        watched = Draining(client, host, quiet=as_json)
        began, soon = time.monotonic(), duration(within)
        if not soon and severity is None:  # a plan by a deadline is made with the taint
            watched.expected = deadline.expected(client, host)
        watched.plan = deadline.set_taint(client, SetTaint(host, reason, soon, severity or ""))
        if watched.plan is not None:
            soon, watched.expected = watched.plan.within, watched.plan
        if watched.expected is not None and not as_json:
            for line in deadline.lines(watched.expected):
                render.note(line)
        until = time.monotonic() + seconds if seconds else float("inf")
        try:
            if watched.wait(until):
                if not as_json:
                    render.out().print(f"{host} is empty and tainted", soft_wrap=True)
                    watched.warn_of_images()
                took = time.monotonic() - began
                watched.see_costs()
                if not soon or took <= soon:
                    return 0
                render.note(f"{host} was empty after {took:.1f} s, not within {soon:g} s")
                return deadline.TIMED_OUT
        except KeyboardInterrupt:
            watched.interrupted()
            raise
        finally:
            if as_json:
                render.print_json(watched.as_data())
    render.failure(
        f"{host} is not empty after {timeout}: {', '.join(watched.left)} still there",
        f"moves go on: `liveshift status`; `liveshift uncordon {host}` ends the drain",
    )
    return deadline.TIMED_OUT


def _plan(
    client: Client, host: str, reason: str, as_json: bool, within: float, severity: str
) -> int:
    """With a deadline it also says whether all will be gone in time."""
    from ..show import drain_plan

    plan = drain_plan.make_plan(client, host, reason)
    if within or severity:
        found = deadline.plan(client, host, within, severity)
        plan.deadline = found if found.within else None
    if as_json:
        render.print_json(plan.as_data())
    else:
        plan.print()
    plan.raise_if_refused()
    late = plan.deadline is not None and deadline.late(plan.deadline)
    return deadline.TIMED_OUT if late else 0


@dataclass
class Draining:
    """Watches a host become empty. It is made before the taint, so that it misses no move."""

    client: Client
    host: str
    quiet: bool = False  # print no line for a move that has ended
    plan: Evacuating | None = None  # None: the host has no deadline
    expected: Evacuating | None = None  # the same, also without a deadline; None: it is not known
    left: list[str] = field(default_factory=list)
    holds: list[str] = field(default_factory=list)
    """The suspended jobs whose only images are in the host's memory."""
    ended: list[MigrationRow] = field(default_factory=list)
    _event: int = 0
    _moving: list[str] = field(default_factory=list)
    _reported: set[str] = field(default_factory=set)
    _refusals: dict[str, tuple[str, str | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        from ..show import moves

        for event in self._notices():
            if event.migration and moves.over(event.migration):
                self._reported.add(event.migration.name)

    def warn_of_images(self) -> None:
        for job in self.holds:
            render.note(
                f"{self.host} has an image of {job}, which is suspended, and no other host has it:"
                f" `liveshift resume {job}` before you switch {self.host} off",
                style="yellow",
            )

    def wait(self, until: float) -> bool:
        """Wait until the host is empty; False if it is not by ``until`` (monotonic seconds).

        Prints a line for every move that ends. Raises Refused if what is left cannot move.
        """
        from ...runtime.messages import GetStatus, Status
        from ..show import moves, retry

        stuck = 0
        with moves.bars() as bars:
            while True:
                status = retry.request(self.client, Status, GetStatus())
                self.left = self._row(status).capsules
                self.holds = [
                    job.name
                    for job in status.jobs
                    if job.state == "suspended" and job.protection is not None
                    if self.host in job.protection.alone
                ]
                moving = [row for row in status.moving if self._leaves(row)]
                self._moving = [row.name for row in moving]
                bars.update(moves.get_migration(self.client, row.name) for row in moving)
                self._report_ended()
                if not self.left:
                    return True
                under_way = {row.capsule for row in moving}
                held = all(name in self._refusals for name in self.left)
                stuck = stuck + 1 if held and not under_way else 0
                if stuck >= STUCK_LOOKS:
                    raise self._refused()
                if time.monotonic() >= until:
                    return False
                time.sleep(LOOK_S)

    def see_costs(self) -> None:
        """Wait some seconds until the cost of the moves to their jobs is known, and print it."""
        from ..show import moves

        self.ended = moves.with_costs(self.client, self.ended)
        for row in self.ended:
            if row.state == MigrationStep.DONE.value and not self.quiet:
                render.note(f"{row.capsule}: {moves.cost(row)}")

    def as_data(self) -> dict[str, Any]:
        """Return for ``-o json`` what has moved, what is left and why."""
        reasons = {
            name: {"error": why, "hint": hint}
            for name, (why, hint) in self._refusals.items()
            if name in self.left
        }
        return {
            "host": self.host,
            "empty": not self.left,
            "left": self.left,
            "holds": self.holds,
            "moves": self.ended,
            "refused": reasons,
            "empty_s": None if self.expected is None else self.expected.empty_s,
            "deadline": render.plain(self.plan),
        }

    def interrupted(self) -> None:
        """Print what goes on without this command, and what ends it."""
        under_way = self._moving
        follow = f"`liveshift events {under_way[0]}`" if under_way else "`liveshift status`"
        render.note(
            f"the drain of {self.host} goes on without this command: {follow} shows it;"
            f" `liveshift untaint {self.host}` lets no further move begin"
        )
        if under_way:
            names = " and ".join(f"`liveshift cancel {name}`" for name in under_way)
            render.note(f"{', '.join(under_way)} will end as it would; {names} ends it now")

    def _row(self, status: Status) -> HostRow:
        for row in status.hosts:
            if row.name == self.host:
                return row
        raise LiveshiftError(f"{self.host} has left the cluster {status.cluster}")

    def _notices(self) -> list[Event]:
        from ...runtime.messages import Events, GetEvents
        from ..show.retry import request

        events = request(self.client, Events, GetEvents("", self._event)).events
        self._event = max((event.number for event in events), default=self._event)
        return events

    def _report_ended(self) -> None:
        """Print how moves off this host ended, and note why the capsules that are left stayed."""
        for event in self._notices():
            row = event.migration
            if row is None:
                if event.kind == "not moved":  # the move did not even begin
                    self._refusals[event.subject] = event.text, None
            elif self._leaves(row):
                self._on_move(row)

    def _leaves(self, row: MigrationRow) -> bool:
        """Whether a migration leads off this host. A swap of GPUs does not."""
        return row.kind == "move" and row.source == self.host

    def _on_move(self, row: MigrationRow) -> None:
        from ..show import moves

        if not moves.over(row):
            self._refusals.pop(row.capsule, None)
        elif row.name not in self._reported:
            self._reported.add(row.name)
            self.ended.append(row)
            if self.quiet:
                if row.error:
                    self._refusals[row.capsule] = row.error, row.hint
            elif row.state == MigrationStep.JOB_ENDED.value:  # nothing was refused: its job ended
                render.note(moves.outcome(row))
            elif row.error:
                self._refusals[row.capsule] = row.error, row.hint
                render.note(moves.outcome(row))
            else:
                render.out().print(moves.outcome(row), soft_wrap=True)

    def _refused(self) -> Refused:
        reasons = dict.fromkeys(self._refusals[name][0] for name in self.left)
        hints = dict.fromkeys(h for name in self.left if (h := self._refusals[name][1]))
        stays = f"{self.host} stays tainted; `liveshift uncordon {self.host}` takes that back"
        return Refused(
            f"{', '.join(self.left)} cannot leave {self.host}: {'; '.join(reasons)}",
            hint="; ".join([*hints, stays]),
        )
