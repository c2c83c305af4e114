# SPDX-License-Identifier: Apache-2.0
"""The migration protocol as a small state machine: what a state of it is, and its small changes.

One capsule, an orchestrator, some hosts. A state holds the journal, what each host has on it, and
the messages in flight. Those are a set without order: any of them may come next, late, or (a
fault) twice; one that is never taken is lost. Whoever waits for an answer may stop waiting at any
time (a fault). Daemons and hosts die (faults); a daemon is back at once, since being down is the
same as hearing late. A host comes back empty.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from exploring import Violation

from liveshift.runtime.model import ownership
from liveshift.runtime.model.ownership import Owner, Ruling, Side
from liveshift.runtime.model.steps import ALLOWED, ENDS, MigrationStep


@dataclass(frozen=True)
class Protocol:
    """Each field: one thing that the protocol rests on; the tests switch them off, one by one."""

    rule: Callable[[Side, str, int, Owner, MigrationStep | None], Ruling] = ownership.rule
    may_pass: Callable[[Owner, bool], bool] = ownership.may_pass
    # of agents
    promise_first: bool = True  # the promise before the manifest
    note_first: bool = True  # durable that it is to run, before it runs
    failed_epochs_end: bool = True  # nothing is restored anew under an epoch that failed here
    nothing_is_gone: bool = True  # a destination without the image says so, not StepFailed
    one_arrival: bool = True  # no Reserve while another copy of the capsule is here
    closing: bool = True  # a Progress that finds it incomplete: it never will be complete
    # of both
    matched: bool = True  # an answer counts for the very ask that it answers
    asked_of_a_life: bool = True  # what an earlier life was asked a later one does not hear
    # of the orchestrator
    granted_is_kept: bool = True  # a restart does not forget that the owner was told to run
    # a commit whose step was not written when the orchestrator died is seen after these
    committed_from: frozenset[MigrationStep] = ownership.BEFORE_COMMIT | {
        MigrationStep.ROLLING_BACK
    }
    look_after_restart: bool = True  # an interrupted FREEZING asks for Progress before anything
    released_may_run: bool = True  # a source that was told to run keeps the capsule
    perhaps_released: bool = True  # after a restart while it was rolled back: it may have been
    insist: bool = True  # with both sides silent nothing is decided
    lost_for_sure: bool = True  # a host that does not answer has not said that it has nothing
    granted_is_waited_for: bool = True  # nothing at the source: where it may run, it is not lost
    return_goes_on: bool = True  # RETURNING survives a restart of the orchestrator


class Arrival(NamedTuple):
    """What a destination has of a migration."""

    m: int
    epoch: int  # as reserved
    boot_id: int  # of the agent that reserved it
    complete: bool = False
    closed: bool = False  # takes nothing more
    fresh: bool = False  # the newest state of the capsule
    tree: str = ""  # "", ready (waits for a ruling), noted
    attempt: int = 0
    at: int = 0  # the epoch of that attempt
    ask: int = 0
    tried: int = 0  # the highest epoch under which a restore failed, in this life of the agent


class Host(NamedTuple):
    boot_id: int = 1
    copy: str = ""  # "", runs, frozen (may thaw by itself), promised
    m: int = 0  # the migration that brought it, or that froze it
    epoch: int = 0
    fresh: bool = False
    shipping: bool = False  # frozen, and the agent that froze it lives
    ask: int = 0
    to: str = ""  # where it is shipped
    there: int = 0  # the life of the agent that reserved at the destination
    begun: int = 0  # the last migration that this host began to freeze for
    noted: bool = True  # durable that it runs
    arrivals: tuple[Arrival, ...] = ()

    def arrival(self, m: int) -> Arrival | None:
        return next((a for a in self.arrivals if a.m == m), None)


class Budget(NamedTuple):
    """Faults that may yet happen."""

    orchestrator: int = 0
    agents: int = 0
    hosts: int = 0
    doubles: int = 0
    silences: int = 0
    failures: int = 0  # of a dump or a restore
    moves: int = 1


Message = tuple[Any, ...]
Change = tuple[str, "State"]


class Wait(NamedTuple):
    """What the orchestrator waits for."""

    what: str = ""
    ask: int = 0
    failed: int = 0  # attempts to restore
    gone: bool = False  # the host asked before has no copy


class State(NamedTuple):
    owner: tuple[str, int, bool]
    step: MigrationStep | None
    m: int
    source: str
    destination: str
    wait: Wait
    asked: int  # numbers asks
    hosts: tuple[tuple[str, Host], ...]
    net: frozenset[Message]
    budget: Budget
    forgiven: bool = False  # a host that died took the last copy, or may have
    ends: tuple[MigrationStep, ...] = ()  # how the migrations before this one ended
    ended: bool = False  # the capsule was declared lost
    released: bool = False  # the source was told to run
    maybe: bool = False  # rolled back: the image may be complete
    tried: frozenset[str] = frozenset()  # hosts that could not restore it
    surveyed: bool = False  # this orchestrator has seen the survey, so it could pass it on


def initial(names: str, budget: Budget) -> State:
    hosts = tuple(
        (n, Host(copy="runs", epoch=1, fresh=True) if n == names[0] else Host()) for n in names
    )
    return State((names[0], 1, True), None, 0, "", "", Wait(), 0, hosts, frozenset(), budget)


# ---- small steps -----------------------------------------------------------------------------


def reachable(s: State) -> bool:
    """Whether the capsule's newest state is somewhere: it runs, or is held, or is an image."""
    return any(
        (h.copy and h.fresh) or any(a.complete and a.fresh for a in h.arrivals) for _, h in s.hosts
    )


def stale(h: Host) -> Host:
    return h._replace(fresh=False, arrivals=tuple(a._replace(fresh=False) for a in h.arrivals))


def put(s: State, name: str, host: Host) -> State:
    return s._replace(hosts=tuple((n, host if n == name else h) for n, h in s.hosts))


def put_all(s: State, change: Callable[[Host], Host]) -> State:
    return s._replace(hosts=tuple((n, change(h)) for n, h in s.hosts))


def put_arrival(s: State, name: str, arrival: Arrival) -> State:
    host = dict(s.hosts)[name]
    arrivals = tuple(arrival if a.m == arrival.m else a for a in host.arrivals)
    return put(s, name, host._replace(arrivals=arrivals))


def send(s: State, *message: Any) -> State:
    return s._replace(net=s.net | {message})


def ask(
    s: State, host: str, kind: str, *body: Any, what: str = "", failed: int = 0, gone: bool = False
) -> State:
    """Ask a host, and wait for the answer."""
    number = s.asked + 1
    s = s._replace(asked=number, wait=Wait(what or kind, number, failed, gone))
    return send(s, host, kind, number, *body)


def to(s: State, step: MigrationStep) -> State:
    assert s.step is not None
    assert step is s.step or step in ALLOWED[s.step], f"{s.step} may not become {step}"
    return s._replace(step=step)


def over(s: State, how: MigrationStep) -> State:
    """The migration has ended: what came of its image is given up."""
    s = to(s, how)
    assert how in ENDS
    if how is MigrationStep.LOST and reachable(s) and not s.forgiven:
        raise Violation("declared lost with a copy at hand")
    if how is not MigrationStep.DONE:
        s = put_all(
            s,
            lambda h: h._replace(
                arrivals=tuple(a._replace(fresh=False) if a.m == s.m else a for a in h.arrivals)
            ),
        )
        s = s._replace(net=stale_manifests(s.net))
    return s._replace(
        step=None,
        wait=Wait(),
        ended=s.ended or how is MigrationStep.LOST,
        ends=(*s.ends, how),
        released=False,
        maybe=False,
        tried=frozenset(),
        surveyed=False,
    )


def unheard(s: State, name: str) -> State:
    """What a host was asked before it died."""
    asks = [x for x in s.net if x[0] == name and x[1] != "Manifest"]
    return s._replace(net=s.net.difference(asks))


def stale_manifests(net: frozenset[Message]) -> frozenset[Message]:
    return frozenset((*x[:4], False, *x[5:]) if x[1] == "Manifest" else x for x in net)


def spend(s: State, fault: str) -> State:
    return s._replace(budget=s.budget._replace(**{fault: getattr(s.budget, fault) - 1}))
