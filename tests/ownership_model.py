# SPDX-License-Identifier: Apache-2.0
"""The migration protocol as a small state machine: one capsule, an orchestrator, some hosts.

A state holds the journal, what each host has on it, and the messages in flight. Those are a set
without order: any of them may come next, late, or (a fault) twice; one that is never taken is
lost. Whoever waits for an answer may stop waiting at any time (a fault). Daemons and hosts die
(faults); a daemon is back at once, since being down is the same as hearing late. A host comes
back empty.

The rules are ownership.rule and ownership.may_pass, the steps those of steps.ALLOWED, themselves;
the rest tells what migration.py, moves.py and porter.py do. What :class:`Protocol` can switch off
are the things that make it sound, so that the tests can see the model bite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from liveshift.runtime import ownership
from liveshift.runtime.ownership import BEFORE_COMMIT, Owner, Ruling, Side
from liveshift.runtime.steps import ALLOWED, ENDS, Step

ATTEMPTS = 2
SETTLED = ("Settled",)
FITS = {
    "Reserve": ("Reserved", "Refused"), "Freeze": ("Frozen", "StepFailed"),
    "Progress": ("Arrived",), "Restore": ("Restored", "NotFound", "StepFailed"),
    "Settle": SETTLED, "finish": SETTLED, "look": SETTLED, "known": SETTLED,
}  # fmt: skip
"""What may answer what."""


class Violation(AssertionError):
    """An invariant does not hold."""


@dataclass(frozen=True)
class Protocol:
    """Each field: one thing that the protocol rests on."""

    rule: Callable[[Side, str, int, Owner, Step | None], Ruling] = ownership.rule
    may_pass: Callable[[Owner, bool], bool] = ownership.may_pass
    promise_first: bool = True  # the promise before the manifest
    note_first: bool = True  # durable that it is to run, before it runs
    ready_only: bool = True  # RUN is said (and granted) only to a tree that is ready
    commit_with_step: bool = True  # the commit and COMMITTED are one durable write
    look_after_restart: bool = True  # an interrupted FREEZING asks for Progress before anything
    insist: bool = True  # with both sides silent nothing is decided
    closing: bool = True  # a Progress that finds it incomplete: it never will be complete
    nothing_is_gone: bool = True  # a destination without the image says so, not StepFailed
    fresh_attempts: bool = True  # each attempt at a restore has an epoch of its own
    old_attempts_end: bool = True  # a tree whose attempt is over is taken down, the image stays
    one_arrival: bool = True  # no Reserve while another copy of the capsule is here
    return_goes_on: bool = True  # RETURNING survives a restart of the orchestrator
    remember_ends: bool = True  # the rules know how a migration ended, not only that it did
    pass_on_silence: bool = True  # a source that does not take it back is not waited for
    matched: bool = True  # an answer counts for the very ask that it answers


class Arrival(NamedTuple):
    """What a destination has of a migration."""

    m: int
    epoch: int  # as reserved
    life: int  # of the agent that reserved it
    complete: bool = False
    fresh: bool = False  # the newest state of the capsule
    tree: str = ""  # "", ready (waits for a ruling), noted
    attempt: int = 0
    at: int = 0  # the epoch of that attempt
    ask: int = 0
    tried: int = 0  # the highest epoch under which a restore failed or was interrupted


class Host(NamedTuple):
    life: int = 1
    copy: str = ""  # "", runs, frozen (may thaw by itself), promised
    m: int = 0  # the migration that brought it, or that froze it
    epoch: int = 0
    fresh: bool = False
    shipping: bool = False  # frozen, and the agent that froze it lives
    ask: int = 0
    there: int = 0  # the life of the agent that reserved at the destination
    begun: int = 0  # the last migration that this host began to freeze for
    noted: bool = True  # durable that it runs
    arrivals: tuple[Arrival, ...] = ()


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


class State(NamedTuple):
    owner: tuple[str, int, bool]
    step: Step | None
    m: int
    source: str
    destination: str
    wait: tuple[Any, ...]  # what the orchestrator waits for: (what, ask, failed attempts, gone)
    asked: int  # numbers asks
    hosts: tuple[tuple[str, Host], ...]
    net: frozenset[Message]
    budget: Budget
    forgiven: bool = False  # a host that died took the last copy, or may have
    ends: tuple[Step, ...] = ()  # how the migrations before this one ended
    ended: bool = False  # the capsule was declared lost
    pending: bool = False  # committed, the step not yet written


def initial(names: str, budget: Budget) -> State:
    hosts = tuple((n, Host(copy="runs", epoch=1, fresh=True) if n == names[0] else Host())
                  for n in names)  # fmt: skip
    return State((names[0], 1, True), None, 0, "", "", (), 0, hosts, frozenset(), budget)


Change = tuple[str, State]


class Model:
    def __init__(self, protocol: Protocol) -> None:
        self.p = protocol
        self._rules: dict[Any, Ruling] = {}

    # ---- all that may happen next --------------------------------------------------------------

    def changes(self, s: State) -> Iterator[Change]:
        for label, after in self._changes(s):
            yield label, self.tidy(self.check(s, after))

    def _changes(self, s: State) -> Iterator[Change]:
        yield from self.orchestrator(s)
        for name, host in s.hosts:
            yield from self.agent(s, name, host)
            yield from self.claims(s, name, host)
        for message in s.net:
            for label, after in self.deliver(s, message):
                yield label, after._replace(net=after.net - {message} | (after.net - s.net))
                if s.budget.doubles:
                    yield "twice: " + label, spend(after, "doubles")
        yield from self.deaths(s)

    def deaths(self, s: State) -> Iterator[Change]:
        if s.budget.orchestrator and s.step is not None:
            yield "the orchestrator dies", self.restart(spend(s, "orchestrator"))
        for name, host in s.hosts:
            if s.budget.agents and (host.copy or host.arrivals):
                yield f"the agent of {name} dies", self.new_agent(spend(s, "agents"), name, host)
            if s.budget.hosts and (host.copy or host.arrivals):
                after = put(spend(s, "hosts"), name, Host(life=host.life + 1))
                had = host.fresh or any(a.fresh for a in host.arrivals)
                # It may run there: it was told so, or has asked. A promise takes that back.
                waits = s.step in BEFORE_COMMIT and host.copy == "promised"
                owner = s.owner[0] == name and not waits and (
                    s.owner[2]
                    or any(x[1] == "Claim" and x[4] == name and x[8] for x in s.net)
                )  # fmt: skip
                if owner or (had and not reachable(after)):
                    after = after._replace(forgiven=True)
                yield f"host {name} dies", after

    # ---- the orchestrator ----------------------------------------------------------------------

    def orchestrator(self, s: State) -> Iterator[Change]:
        if s.pending:
            yield "the commit's step is recorded", self.committed(s)
            return
        if s.wait and s.wait[0] == "take up":
            yield "the migration is taken up", self.take_up(s)
            return
        if s.step is None:
            if s.budget.moves and s.owner[2] and not s.ended:
                for name, _ in s.hosts:
                    if name != s.owner[0]:
                        yield f"move to {name}", self.begin(spend(s, "moves"), name)
            return
        if s.budget.silences and s.wait:
            for label, after in self.unanswered(s):
                yield label, spend(after, "silences")

    def begin(self, s: State, to: str) -> State:
        s = s._replace(step=Step.PREPARING, m=s.m + 1, source=s.owner[0], destination=to)
        return ask(s, to, "Reserve", s.m, s.owner[1] + 1)

    def unanswered(self, s: State) -> Iterator[Change]:
        """It stops waiting."""
        what, _, failed, gone = s.wait
        label = f"no answer to {what}"
        if what == "Reserve":
            yield label, self.roll_back(s)
        elif what == "Freeze":
            yield label, ask(s, s.destination, "Progress", s.m)
        elif what == "Progress":
            if self.p.insist:
                yield label, ask(s, s.destination, "Progress", s.m)
                yield label + ", the source is asked", ask(s, s.source, "Settle", s.m, what="look")
            else:
                yield label, self.roll_back(s)
        elif what == "look" and s.step is Step.FREEZING:
            yield label, ask(s, s.destination, "Progress", s.m)
        elif what == "Settle":
            yield label, over(to(s, Step.FAILED))
        elif what == "finish":
            yield label, over(to(s, Step.DONE))
        elif what == "Restore":
            if s.owner[2]:
                yield label, self.restore(s, failed, gone)
            else:
                yield label, self.go_back(s, gone)
        elif what == "look":
            yield label, self.restore_again(s, gone)
        elif what == "known":
            yield label, ask(s, s.source, "Settle", s.m, what="known", gone=gone)
            if not s.owner[2] and self.p.pass_on_silence:
                yield (
                    label + ", passed on",
                    self.restore_again(self.passed(s, s.destination, False) or s, gone),
                )

    def answered(self, s: State, kind: str, value: Any) -> Iterator[Change]:
        what, _, failed, gone = s.wait
        if what == "Reserve":
            if kind == "Reserved":
                s = to(to(s, Step.PRECOPYING), Step.FREEZING)
                yield "Freeze", ask(s, s.source, "Freeze", s.m, value, dict(s.hosts)[s.source].life)
            else:
                yield "refused", self.roll_back(s)
        elif what == "Freeze":
            if kind == "Frozen":
                yield "commit", self.commit_move(s)
            else:
                yield "freeze failed", ask(s, s.destination, "Progress", s.m)
        elif what == "Progress":
            yield ("commit", self.commit_move(s)) if value else ("too late", self.roll_back(s))
        elif what == "look" and s.step is Step.FREEZING:
            if value == "nothing":
                yield "nothing there", ask(s, s.destination, "Progress", s.m)
            else:
                after = self.roll_back(s)  # should it die now, that word was its last
                yield "it is alive", after._replace(forgiven=after.forgiven or not reachable(after))
        elif what == "Settle":
            yield "settled", over(to(s, Step.FAILED))
        elif what == "finish":
            yield "finished", over(to(s, Step.DONE))
        elif what == "Restore":
            yield "restore: " + kind, self.restored(s, kind, failed, gone)
        elif what in ("look", "known"):
            yield what + ": " + value, self.looked(s, what, value, gone)

    def restored(self, s: State, kind: str, failed: int, gone: bool) -> State:
        if kind == "Restored":
            s = to(to(s, Step.RESUMING), Step.FINISHING)
            return ask(s, s.source, "Settle", s.m, what="finish")
        if kind == "NotFound":
            return over(to(s, Step.LOST)) if s.owner[2] else self.go_back(s, True)
        failed += 1  # StepFailed: nothing runs there
        if self.p.fresh_attempts:
            after = self.passed(s, s.destination, True)
            assert after is not None
        else:
            after = s._replace(owner=(s.owner[0], s.owner[1], False))
        if failed < ATTEMPTS:
            return self.restore(after, failed, gone)
        return self.go_back(after, gone)

    def looked(self, s: State, what: str, state: str, gone: bool) -> State:
        """The source has said what it has; ``what``: before or after it became the owner."""
        if what == "look" and state == "held":
            after = self.passed(s, s.source, False)
            if after is None:  # it was granted meanwhile
                return self.restore_again(s, gone)
            return ask(after, s.source, "Settle", s.m, what="known", gone=gone)
        if state == "held":
            return ask(s, s.source, "Settle", s.m, what="known", gone=gone)
        if state == "runs" and s.owner[0] == s.source:
            return over(to(s, Step.FAILED))
        if gone or s.owner[2]:
            if s.owner[2] and s.owner[0] == s.destination:
                return self.restore_again(s, gone)  # it may run there: that host is waited for
            return over(to(s, Step.LOST))
        if s.owner[0] == s.source:
            after = self.passed(s, s.destination, False)
            assert after is not None
            s = after
        return self.restore_again(s, gone)

    def commit_move(self, s: State) -> State:
        after = self.passed(s, s.destination, True)
        assert after is not None
        if not self.p.commit_with_step:
            return after._replace(pending=True, wait=())
        return self.committed(after)

    def committed(self, s: State) -> State:
        s = to(to(s._replace(pending=False), Step.COMMITTED), Step.RESTORING)
        return self.restore(s, 0, False)

    def restore(self, s: State, failed: int, gone: bool) -> State:
        return ask(s, s.destination, "Restore", s.m, s.owner[1], failed=failed, gone=gone)

    def restore_again(self, s: State, gone: bool) -> State:
        return self.restore(to(s, Step.RESTORING), 0, gone)

    def go_back(self, s: State, gone: bool) -> State:
        s = to(s, Step.RETURNING)
        return ask(s, s.source, "Settle", s.m, what="look", gone=gone)

    def roll_back(self, s: State) -> State:
        """What has come to the destination is given up here and now."""
        s = put_all(
            to(s, Step.ROLLING_BACK),
            lambda h: h._replace(
                arrivals=tuple(a._replace(fresh=False) if a.m == s.m else a for a in h.arrivals)
            ),
        )
        s = send(s, s.destination, "Settle", 0, s.m)
        return ask(s, s.source, "Settle", s.m)

    def passed(self, s: State, host: str, still: bool) -> State | None:
        owner, epoch, _ = s.owner
        if not self.p.may_pass(Owner(*s.owner), still):
            return None
        return s._replace(owner=(host, epoch + 1, False))

    def restart(self, s: State) -> State:
        """A new orchestrator, with the journal of the one that died; hosts get a while to report."""
        return s._replace(wait=("take up", 0, 0, False), pending=False)

    def take_up(self, s: State) -> State:
        committed = s.owner[0] != s.source
        if s.step is Step.FINISHING:
            return ask(s, s.source, "Settle", s.m, what="finish")
        if s.step is Step.RETURNING and self.p.return_goes_on:
            what = "look" if committed else "known"
            return ask(s, s.source, "Settle", s.m, what=what)
        if not committed:
            if s.step is Step.FREEZING and self.p.look_after_restart:
                return ask(s, s.destination, "Progress", s.m)
            return self.roll_back(s._replace(step=Step.PREPARING))
        return self.restore(s._replace(step=Step.RESTORING), 0, False)

    def ruled(self, s: State, claim: Message) -> State:
        _, _, m, side, host, epoch, life, attempt, ready, settle = claim
        over = m < s.m or s.step is None
        step = s.step if not over else s.ends[m - 1] if self.p.remember_ends else None
        key = (side, host, epoch, s.owner, step)
        ruling = self._rules.get(key)
        if ruling is None:
            ruling = self.p.rule(Side(side), host, epoch, Owner(*s.owner), step)
            self._rules[key] = ruling
        if s.ended:
            ruling = Ruling.END
        if ruling is Ruling.RUN and not ready and self.p.ready_only:
            ruling = Ruling.WAIT
        if ruling is Ruling.RUN and not s.owner[2]:
            now = dict(s.hosts)[host]
            died = now.life != life and not now.copy and not now.arrivals
            # having asked, it died: whether it was heard nobody can know
            s = s._replace(owner=(s.owner[0], s.owner[1], True), forgiven=s.forgiven or died)
        stale = attempt and s.owner[1] > epoch and self.p.old_attempts_end
        if ruling is Ruling.WAIT and not settle and not stale:
            return s  # it asks again
        return send(s, host, "Ruled", m, side, life, attempt, ruling.value, s.owner[1], settle)

    def work(self, s: State) -> Iterator[Change]:
        """What daemons do without being asked or answered, faults aside."""
        quiet = s._replace(budget=Budget(moves=0))
        yield from self.orchestrator(quiet)
        for name, host in quiet.hosts:
            yield from self.agent(quiet, name, host)

    # ---- agents --------------------------------------------------------------------------------

    def new_agent(self, s: State, name: str, host: Host) -> State:
        """An agent that finds what the one before has left."""
        keep = []
        for a in host.arrivals:
            if a.tree == "noted" and self.p.note_first:
                s, host = self.runs(s, name, host._replace(copy="runs", m=a.m, epoch=a.at,
                                                           fresh=a.fresh))  # fmt: skip
            elif a.complete:
                tried = max(a.tried, a.at if a.tree else 0)
                keep.append(a._replace(tree="", ask=0, tried=tried))
        copy = host.copy
        if copy == "runs" and not host.noted:  # taken for one that may not run
            return put(s, name, Host(life=host.life + 1, arrivals=tuple(keep)))
        host = host._replace(life=host.life + 1, shipping=False, ask=0, arrivals=tuple(keep))
        if copy == "frozen":
            s, host = self.runs(s, name, host._replace(copy="runs"))
        return put(s, name, host)

    def runs(self, s: State, name: str, host: Host) -> tuple[State, Host]:
        """A copy starts to run; whatever else there is is old from now on."""
        if not host.fresh:
            raise Violation(f"an old state runs on {name}")
        if (name, True) != (s.owner[0], s.owner[2]):
            raise Violation(f"{name} runs what is {s.owner}")
        s = put_all(s, stale)._replace(net=frozenset(
            x[:4] + (False,) + x[5:] if x[1] == "Manifest" else x for x in s.net))  # fmt: skip
        return s, stale(host)._replace(fresh=True)

    def agent(self, s: State, name: str, h: Host) -> Iterator[Change]:
        if h.copy == "frozen" and h.shipping:
            if s.budget.failures:
                t, host = self.runs(s, name, h._replace(copy="runs", shipping=False))
                t = send(t, "O", "Answer", h.ask, "StepFailed", "")
                yield f"{name}: the dump fails", put(spend(t, "failures"), name, host)
            if self.p.promise_first:
                yield f"{name} promises", put(s, name, h._replace(copy="promised"))
            else:
                yield f"{name} ships", self.ship(s, name, h, "frozen")
                pass
        if h.copy == "frozen" and not h.shipping:  # it shipped first, against the protocol
            yield f"{name} promises", put(s, name, h._replace(copy="promised"))
        if h.copy == "promised" and h.shipping and self.p.promise_first:
            yield f"{name} ships", self.ship(s, name, h, "promised")
        if h.copy == "promised" and h.shipping and s.budget.failures:
            t = send(spend(s, "failures"), "O", "Answer", h.ask, "StepFailed", "")
            yield f"{name} cannot ship", put(t, name, h._replace(shipping=False))
        if not h.noted:
            yield f"{name} notes that it runs", put(s, name, h._replace(noted=True))
        for a in h.arrivals:
            if a.tree == "ready" or a.tree == "noted":
                if s.budget.failures:
                    t = send(spend(s, "failures"), "O", "Answer", a.ask, "StepFailed", "")
                    yield f"{name}: the tree fails", put_arrival(t, name, self.failed(a))
            if a.tree == "noted":
                yield f"{name} lets it run", self.let_run(s, name, h, a)

    def claims(self, s: State, name: str, h: Host) -> Iterator[Change]:
        """What its agent asks at every heartbeat."""
        if h.copy == "promised" and not h.shipping:
            yield f"{name} claims", self.claim(s, name, h.m, "leaving", h.epoch, h.life, 0, True, 0)
        for a in h.arrivals:
            if a.tree == "ready":
                after = self.claim(s, name, a.m, "coming", a.at, h.life, a.attempt, True, 0)
                yield f"{name} claims", after
            elif not a.tree:
                after = self.claim(s, name, a.m, "coming", a.epoch, h.life, 0, False, 0)
                yield f"{name} asks", after

    def ship(self, s: State, name: str, h: Host, copy: str) -> State:
        s = put(s, name, h._replace(shipping=False, copy=copy))
        return send(s, s.destination, "Manifest", h.m, h.there, h.fresh, name, h.life, h.ask)

    def failed(self, a: Arrival) -> Arrival:
        return a._replace(tree="", tried=max(a.tried, a.at), ask=0)

    def claim(self, s: State, name: str, m: int, side: str, epoch: int, life: int, attempt: int,
              ready: bool, settle: int) -> State:  # fmt: skip
        message = ("O", "Claim", m, side, name, epoch, life, attempt, ready, settle)
        return s if message in s.net else s._replace(net=s.net | {message})

    def let_run(self, s: State, name: str, h: Host, a: Arrival) -> State:
        rest = tuple(x for x in h.arrivals if x is not a)
        s, host = self.runs(s, name, h._replace(copy="runs", m=a.m, epoch=a.at, fresh=a.fresh,
                                                arrivals=rest, noted=self.p.note_first))  # fmt: skip
        return send(put(s, name, host), "O", "Answer", a.ask, "Restored", "")

    # ---- messages taken ------------------------------------------------------------------------

    def deliver(self, s: State, message: Message) -> Iterator[Change]:
        name, kind, *body = message
        if name == "O":
            if s.pending:
                return
            if kind == "Claim":
                yield f"ruled: {message[3:6]}", self.ruled(s, message)
                return
            number, what, value = body
            matches = s.wait and what in FITS.get(s.wait[0], ()) and (
                s.wait[1] == number or not self.p.matched)  # fmt: skip
            for label, after in self.answered(s, what, value) if matches else ():
                yield f"{what} {value}: {label}", after
            if not matches:
                yield "late answer", s
            return
        host = dict(s.hosts)[name]
        for after in getattr(self, "take_" + kind.lower())(s, name, host, *body):
            yield f"{name} takes {kind} {body}", after

    def take_reserve(self, s: State, name: str, h: Host, number: int, m: int, epoch: int
                     ) -> Iterator[State]:  # fmt: skip
        mine = next((a for a in h.arrivals if a.m == m), None)
        other = h.copy or (self.p.one_arrival and any(a.m != m for a in h.arrivals))
        if other and mine is None:
            yield send(s, "O", "Answer", number, "Refused", "")
            return
        if mine is None:
            # a room for the capsule: what another migration had there is overwritten
            s = put(s, name, h._replace(arrivals=(Arrival(m, epoch, h.life),)))
        yield send(s, "O", "Answer", number, "Reserved", mine.life if mine else h.life)

    def take_freeze(self, s: State, name: str, h: Host, number: int, m: int, there: int, life: int
                    ) -> Iterator[State]:  # fmt: skip
        if h.begun >= m:  # it was told before
            yield s
            return
        if h.copy != "runs" or h.life != life:
            yield send(s, "O", "Answer", number, "StepFailed", "")
            return
        yield put(s, name, h._replace(copy="frozen", m=m, shipping=True, ask=number, there=there, begun=m,
                                        noted=True))  # fmt: skip

    def take_manifest(self, s: State, name: str, h: Host, m: int, there: int, fresh: bool,
                      source: str, life: int, number: int) -> Iterator[State]:  # fmt: skip
        a = next((a for a in h.arrivals if (a.m, a.life) == (m, there)), None)
        if a is None or a.complete or a.tried:
            yield s
            return
        given_up = s.m != m or s.step is not Step.FREEZING
        s = put_arrival(s, name, a._replace(complete=True, fresh=fresh and not given_up))
        there_still = dict(s.hosts)[source]
        if there_still.life == life:
            s = send(s, "O", "Answer", number, "Frozen", "")
        yield s

    def take_progress(self, s: State, name: str, h: Host, number: int, m: int) -> Iterator[State]:
        a = next((a for a in h.arrivals if a.m == m), None)
        if a is not None and not a.complete and self.p.closing:
            s = put_arrival(s, name, a._replace(tried=1))
        yield send(s, "O", "Answer", number, "Arrived", a is not None and a.complete)

    def take_restore(self, s: State, name: str, h: Host, number: int, m: int, epoch: int
                     ) -> Iterator[State]:  # fmt: skip
        if h.copy == "runs" and (h.m, h.epoch) == (m, epoch):
            yield send(s, "O", "Answer", number, "Restored", "")
            return
        a = next((a for a in h.arrivals if a.m == m), None)
        if a is None or not a.complete:
            how = "NotFound" if self.p.nothing_is_gone else "StepFailed"
            yield send(s, "O", "Answer", number, how, "")
            return
        if a.tree:
            return  # later: it is being worked on
        if self.p.fresh_attempts and epoch <= a.tried:
            yield send(s, "O", "Answer", number, "StepFailed", "")
            return
        yield put_arrival(s, name, a._replace(tree="ready", attempt=a.attempt + 1, at=epoch,
                                              ask=number))  # fmt: skip
        if s.budget.failures:
            t = send(spend(s, "failures"), "O", "Answer", number, "StepFailed", "")
            yield put_arrival(t, name, a._replace(tried=max(a.tried, epoch)))

    def take_settle(self, s: State, name: str, h: Host, number: int, m: int) -> Iterator[State]:
        if h.m == m and h.copy in ("frozen", "promised"):
            if not h.shipping:
                yield self.claim(s, name, m, "leaving", h.epoch, h.life, 0, True, number)
            return
        a = next((a for a in h.arrivals if a.m == m), None)
        if a is not None:
            if not a.tree:
                yield self.claim(s, name, m, "coming", a.epoch, h.life, 0, False, number)
            return
        state = "runs" if h.copy == "runs" else "nothing"
        yield send(s, "O", "Answer", number, "Settled", state) if number else s

    def take_ruled(self, s: State, name: str, h: Host, m: int, side: str, life: int, attempt: int,
                   ruling: str, epoch: int, settle: int) -> Iterator[State]:  # fmt: skip
        if life != h.life and self.p.matched:
            yield s
            return
        state = "held"
        if side == "leaving":
            if h.copy != "promised" or h.m != m or h.shipping:
                yield s
                return
            if ruling == "run":
                s, h = self.runs(s, name, h._replace(copy="runs", epoch=epoch))
                s, state = put(s, name, h), "runs"
            elif ruling == "end":
                s, state = put(s, name, h._replace(copy="", m=0, fresh=False)), "ended"
        else:
            a = next((a for a in h.arrivals if a.m == m), None)
            if (
                a is None
                or (attempt and (a.tree != "ready" or (a.attempt != attempt and self.p.matched)))
                or (not attempt and a.tree)
            ):
                yield s
                return
            if attempt and ruling == "run":
                s = put_arrival(s, name, a._replace(tree="noted"))
            elif attempt and (ruling == "end" or epoch > a.at):
                s = put_arrival(s, name, self.failed(a))
                s = send(s, "O", "Answer", a.ask, "StepFailed", "")
            elif ruling == "end":
                gone = h._replace(arrivals=tuple(x for x in h.arrivals if x is not a))
                s, state = put(s, name, gone), "ended"
        yield send(s, "O", "Answer", settle, "Settled", state) if settle else s

    def tidy(self, s: State) -> State:
        """Without messages that can have no effect any more."""
        if not self.p.matched:
            return s
        hosts, wanted = dict(s.hosts), s.wait[1] if s.wait else -1
        gone = []
        for x in s.net:
            kind = x[1]
            if kind == "Answer":
                useless = x[2] != wanted
            elif kind == "Settle":
                useless = x[2] not in (wanted, 0)
            elif kind == "Ruled":
                useless = x[4] != hosts[x[0]].life
            elif kind == "Claim":
                useless = not x[8] and x[6] != hosts[x[4]].life and self.p.ready_only
            else:
                continue
            if useless:
                gone.append(x)
        return s._replace(net=s.net.difference(gone)) if gone else s

    # ---- without faults ------------------------------------------------------------------------

    def next_in_peace(self, s: State, asked: State | None) -> Change:
        """What happens next when nothing fails: what is in flight first, then a heartbeat, then
        the end of somebody's patience. An empty label: nothing."""
        for message in sorted(s.net, key=str):
            for label, after in self.deliver(s, message):
                after = after._replace(net=after.net - {message} | (after.net - s.net))
                return label, self.tidy(self.check(s, after))
        for label, after in self.work(s):
            return label, self.tidy(self.check(s, after))
        if s != asked:  # else nothing has come of the last heartbeat
            for name, host in s.hosts:
                for _, after in self.claims(s, name, host):
                    s = after
            return "agents ask", s
        for label, after in self.unanswered(s) if s.wait else ():
            return label, self.tidy(self.check(s, after))
        return "", s

    def at_rest(self, s: State) -> str | None:
        """What is wrong with a state in which nothing happens any more."""
        runs = sum(h.copy == "runs" for _, h in s.hosts)
        if s.step is not None:
            return f"it stays {s.step.value}"
        if runs != 1 and not s.forgiven:
            return "nothing runs"
        if any(h.copy not in ("", "runs") or h.arrivals for _, h in s.hosts):
            return "something is left behind"
        return None

    # ---- invariants ----------------------------------------------------------------------------

    def check(self, before: State, s: State) -> State:
        running = [name for name, h in s.hosts if h.copy == "runs"]
        if len(running) > 1:
            raise Violation(f"two copies run: {running}")
        if s.owner[1] < before.owner[1]:
            raise Violation("an epoch went backwards")
        if not reachable(s) and not s.forgiven:
            raise Violation("no image is left")
        return s


# ---- small steps -----------------------------------------------------------------------------


def stale(h: Host) -> Host:
    return h._replace(fresh=False, arrivals=tuple(a._replace(fresh=False) for a in h.arrivals))


def reachable(s: State) -> bool:
    """Whether the capsule's newest state is somewhere: it runs, or is held, or is an image."""
    return any(h.copy and h.fresh or any(a.complete and a.fresh for a in h.arrivals)
               for _, h in s.hosts)  # fmt: skip


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


def ask(s: State, host: str, kind: str, *body: Any, what: str = "", failed: int = 0,
        gone: bool = False) -> State:  # fmt: skip
    """Ask a host, and wait for the answer."""
    number = s.asked + 1
    s = s._replace(asked=number, wait=(what or kind, number, failed, gone))
    return send(s, host, kind, number, *body)


def to(s: State, step: Step) -> State:
    assert s.step is not None
    assert step in ALLOWED[s.step], f"{s.step} may not become {step}"
    return s._replace(step=step)


def over(s: State) -> State:
    assert s.step in ENDS
    ended = s.ended or s.step is Step.LOST
    return s._replace(step=None, wait=(), ended=ended, ends=(*s.ends, s.step))


def spend(s: State, fault: str) -> State:
    return s._replace(budget=s.budget._replace(**{fault: getattr(s.budget, fault) - 1}))
