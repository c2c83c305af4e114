# SPDX-License-Identifier: Apache-2.0
"""The hosts' part in the model: what source_handlers.py, destination_handlers.py and rulings.py do
with outgoing_migration.py, incoming_migration.py and restore_attempt.py.

An agent does some things by itself (``agent``), asks about what it holds (``claims``), and takes
messages (``take_*``). A generator that yields nothing: not now, the message waits.
"""

from __future__ import annotations

from collections.abc import Iterator

from exploring import Violation
from model_state import (
    Arrival,
    Change,
    Host,
    Protocol,
    State,
    put,
    put_all,
    put_arrival,
    send,
    spend,
    stale,
    stale_manifests,
)


class Hosts:
    p: Protocol

    def new_agent(self, s: State, name: str, host: Host) -> State:
        """An agent that finds what the one before has left."""
        keep = []
        for a in host.arrivals:
            if a.tree == "noted" and self.p.note_first:
                s, host = self.runs(
                    s, name, host._replace(copy="runs", m=a.m, epoch=a.at, fresh=a.fresh)
                )
            elif a.complete:
                keep.append(a._replace(tree="", ask=0, tried=0))
        copy = host.copy
        if copy == "runs" and not host.noted:  # taken for one that may not run
            return put(s, name, Host(boot_id=host.boot_id + 1, arrivals=tuple(keep)))
        host = host._replace(boot_id=host.boot_id + 1, shipping=False, ask=0, arrivals=tuple(keep))
        if copy == "frozen":
            s, host = self.runs(s, name, host._replace(copy="runs"))
        return put(s, name, host)

    def runs(self, s: State, name: str, host: Host) -> tuple[State, Host]:
        """A copy starts to run; whatever else there is is old from now on."""
        if not host.fresh:
            raise Violation(f"an old state runs on {name}")
        if (name, True) != (s.owner[0], s.owner[2]):
            raise Violation(f"{name} runs what is {s.owner}")
        s = put_all(s, stale)._replace(net=stale_manifests(s.net))
        return s, stale(host)._replace(fresh=True)

    # ---- by itself -----------------------------------------------------------------------------

    def agent(self, s: State, name: str, h: Host) -> Iterator[Change]:
        if h.copy == "frozen" and h.shipping:
            if s.budget.failures:
                t, host = self.runs(s, name, h._replace(copy="runs", shipping=False))
                t = send(t, "O", "Answer", h.ask, "StepFailed", "")
                yield f"{name}: the dump fails", put(spend(t, "failures"), name, host)
            if self.p.promise_first:
                yield f"{name} promises", put(s, name, h._replace(copy="promised"))
            else:
                yield f"{name} ships", self.ship(s, name, h)
        if h.copy == "frozen" and not h.shipping:  # it shipped first, against the protocol
            yield f"{name} promises", put(s, name, h._replace(copy="promised"))
        if h.copy == "promised" and h.shipping:
            yield f"{name} ships", self.ship(s, name, h)
            if s.budget.failures:
                t = send(spend(s, "failures"), "O", "Answer", h.ask, "StepFailed", "")
                yield f"{name} cannot ship", put(t, name, h._replace(shipping=False))
        if not h.noted:
            yield f"{name} notes that it runs", put(s, name, h._replace(noted=True))
        for a in h.arrivals:
            if a.tree in ("ready", "noted") and s.budget.failures:
                t = send(spend(s, "failures"), "O", "Answer", a.ask, "StepFailed", "")
                yield f"{name}: the tree fails", put_arrival(t, name, self.over(a))
            if a.tree == "noted":
                yield f"{name} lets it run", self.let_run(s, name, h, a)

    def ship(self, s: State, name: str, h: Host) -> State:
        s = put(s, name, h._replace(shipping=False))
        return send(s, h.to, "Manifest", h.m, h.there, h.fresh, name, h.boot_id, h.ask)

    def over(self, a: Arrival) -> Arrival:
        """Its attempt to restore has ended, or there was none."""
        tried = max(a.tried, a.at) if a.tree and self.p.failed_epochs_end else a.tried
        return a._replace(tree="", tried=tried, ask=0)

    def let_run(self, s: State, name: str, h: Host, a: Arrival) -> State:
        rest = tuple(x for x in h.arrivals if x is not a)
        h = h._replace(copy="runs", m=a.m, epoch=a.at, fresh=a.fresh, arrivals=rest)
        s, host = self.runs(s, name, h._replace(noted=self.p.note_first))
        return send(put(s, name, host), "O", "Answer", a.ask, "Restored", "")

    # ---- what it asks --------------------------------------------------------------------------

    def claims(self, s: State, name: str, h: Host) -> Iterator[Change]:
        """What its agent asks at every heartbeat."""
        if h.copy == "promised" and not h.shipping:
            yield (
                f"{name} claims",
                self.claim(s, name, h.m, "leaving", h.epoch, h.boot_id, 0, True, 0),
            )
        for a in h.arrivals:
            if a.tree == "ready":
                after = self.claim(s, name, a.m, "coming", a.at, h.boot_id, a.attempt, True, 0)
                yield f"{name} claims", after
            elif not a.tree:
                after = self.claim(s, name, a.m, "coming", a.epoch, h.boot_id, 0, False, 0)
                yield f"{name} asks", after

    def claim(
        self,
        s: State,
        name: str,
        m: int,
        side: str,
        epoch: int,
        boot_id: int,
        attempt: int,
        ready: bool,
        settle: int,
    ) -> State:
        message = ("O", "Claim", m, side, name, epoch, boot_id, attempt, ready, settle)
        return s if message in s.net else s._replace(net=s.net | {message})

    # ---- what it takes -------------------------------------------------------------------------

    def take_reserve(
        self, s: State, name: str, h: Host, number: int, m: int, epoch: int, source: str
    ) -> Iterator[State]:
        mine = h.arrival(m)
        other = h.copy or (self.p.one_arrival and h.arrivals)
        if other and mine is None:
            yield send(s, "O", "Answer", number, "Refused", "")
            return
        if mine is None:
            # A sandbox for the capsule: what another migration had there is overwritten.
            s = put(s, name, h._replace(arrivals=(Arrival(m, epoch, h.boot_id),)))
        yield send(s, "O", "Answer", number, "Reserved", mine.boot_id if mine else h.boot_id)

    def take_freeze(
        self, s: State, name: str, h: Host, number: int, m: int, to: str, there: int, boot_id: int
    ) -> Iterator[State]:
        if h.begun >= m:  # it was told before, or that it is over
            yield s
            return
        if h.copy != "runs" or h.boot_id != boot_id:
            yield send(s, "O", "Answer", number, "StepFailed", "")
            return
        yield put(
            s,
            name,
            h._replace(
                copy="frozen",
                m=m,
                shipping=True,
                ask=number,
                to=to,
                there=there,
                begun=m,
                noted=True,
            ),
        )

    def take_manifest(
        self,
        s: State,
        name: str,
        h: Host,
        m: int,
        there: int,
        fresh: bool,
        source: str,
        boot_id: int,
        number: int,
    ) -> Iterator[State]:
        a = h.arrival(m)
        if a is None or a.boot_id != there or a.complete or a.closed:
            yield s
            return
        s = put_arrival(s, name, a._replace(complete=True, fresh=fresh))
        if dict(s.hosts)[source].boot_id == boot_id:
            s = send(s, "O", "Answer", number, "Frozen", "")
        yield s

    def take_progress(self, s: State, name: str, h: Host, number: int, m: int) -> Iterator[State]:
        a = h.arrival(m)
        if a is not None and not a.complete and self.p.closing:
            s = put_arrival(s, name, a._replace(closed=True))
        yield send(s, "O", "Answer", number, "Arrived", a is not None and a.complete)

    def take_forward(
        self, s: State, name: str, h: Host, number: int, m: int, to: str, there: int
    ) -> Iterator[State]:
        a = h.arrival(m)
        if a is None or not a.complete:
            yield send(s, "O", "Answer", number, "NotFound", "")
        else:
            yield send(s, to, "Manifest", m, there, a.fresh, name, h.boot_id, number)

    def take_restorecapsule(
        self, s: State, name: str, h: Host, number: int, m: int, epoch: int
    ) -> Iterator[State]:
        a = h.arrival(m)
        if h.copy and h.epoch == epoch and a is None:
            yield send(s, "O", "Answer", number, "Restored", "")
        elif a is None:
            how = "NotFound" if self.p.nothing_is_gone else "StepFailed"
            yield send(s, "O", "Answer", number, how, "")
        elif not a.complete:
            s = put_arrival(s, name, a._replace(closed=True))
            yield send(s, "O", "Answer", number, "StepFailed", "")
        elif a.tree:
            return  # it is being worked on
        elif epoch <= a.tried:
            yield send(s, "O", "Answer", number, "StepFailed", "")
        else:
            ready = a._replace(tree="ready", attempt=a.attempt + 1, at=epoch, ask=number)
            yield put_arrival(s, name, ready)
            if s.budget.failures:
                t = send(spend(s, "failures"), "O", "Answer", number, "StepFailed", "")
                yield put_arrival(t, name, self.over(ready))

    def take_settle(self, s: State, name: str, h: Host, number: int, m: int) -> Iterator[State]:
        if h.m == m and h.copy in ("frozen", "promised"):
            if not h.shipping:
                yield self.claim(s, name, m, "leaving", h.epoch, h.boot_id, 0, True, number)
            return
        a = h.arrival(m)
        if a is not None:
            if not a.tree:
                yield self.claim(s, name, m, "coming", a.epoch, h.boot_id, 0, False, number)
            return
        if h.copy == "runs":  # what was prepared here for that migration is dropped
            s = put(s, name, h._replace(begun=max(h.begun, m)))
        state = "runs" if h.copy else "nothing"
        yield send(s, "O", "Answer", number, "Settled", state) if number else s

    def take_ruled(
        self,
        s: State,
        name: str,
        h: Host,
        m: int,
        side: str,
        boot_id: int,
        attempt: int,
        ruling: str,
        epoch: int,
        settle: int,
    ) -> Iterator[State]:
        if boot_id != h.boot_id and self.p.matched:
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
            a = h.arrival(m)
            if not a or (a.tree and not attempt):
                yield s
                return
            if attempt and (a.tree != "ready" or (a.attempt != attempt and self.p.matched)):
                yield s
                return
            if attempt and ruling == "run":
                s = put_arrival(s, name, a._replace(tree="noted"))
            elif attempt and (ruling == "end" or epoch > a.at):
                s = put_arrival(s, name, self.over(a))
                s = send(s, "O", "Answer", a.ask, "StepFailed", "")
            elif ruling == "end":
                gone = h._replace(arrivals=tuple(x for x in h.arrivals if x is not a))
                s, state = put(s, name, gone), "ended"
        yield send(s, "O", "Answer", settle, "Settled", state) if settle else s
