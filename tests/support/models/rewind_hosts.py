# SPDX-License-Identifier: Apache-2.0
"""The hosts' part in the model of snapshots and rewinds: what they do by themselves, what they ask,
and how they end the copies of before a rewind. Their orders: rewind_orders.py."""

from __future__ import annotations

from collections.abc import Iterator

from exploring import Violation
from rewind_state import (
    CAPSULES,
    DEAD,
    UP,
    Change,
    Copy,
    Host,
    Image,
    Safeguards,
    State,
    at,
    change,
    put,
    put_coming,
    put_copy,
    spend,
)

from liveshift.runtime.model.ownership import Owner, Ruling, Side
from liveshift.runtime.model.steps import MigrationStep


class Hosts:
    p: Safeguards

    def keeps(self, s: State, name: str, image: Image) -> bool:
        raise NotImplementedError

    # ---- by itself -----------------------------------------------------------------------------

    def host(self, s: State, name: str, h: Host) -> Iterator[Change]:
        if h.state is DEAD:
            yield f"{name} boots", put(s, name, Host(life=h.life + 1))
            return
        if h.state is not UP:
            yield f"{name} is reached again", put(s, name, h._replace(state=UP))
        for c in h.removing:
            yield f"{name} has removed {c}", self.removed(s, name, h, c)
        for c, copy in enumerate(h.copies):
            if copy is not None and copy.session is not None:
                # It thaws once it is dumped, but not if the job is suspended with this snapshot, or
                # when it has heard nothing for too long. The orchestrator waits until all are
                # dumped; here it need not, as one that hears nothing does not either.
                waits = s.taking is not None and s.taking.number == copy.session.number
                suspends = waits and s.taking is not None and s.taking.suspends
                if (copy.session.dumped and not suspends) or not waits:
                    yield f"{name} thaws {c}", self.thaw(s, name, c, copy)
                elif s.faults.silences:
                    after = self.thaw(spend(s, "silences"), name, c, copy)
                    yield f"{name} thaws {c} by itself", after
        if h.state is UP:
            yield from self.asks(s, name, h)

    def removed(self, s: State, name: str, h: Host, c: int) -> State:
        if h.copies[c] is not None:
            raise Violation(f"{name} removes {c} by its name, and takes the new one")
        h = h._replace(removing=h.removing - {c}, coming=change(h.coming, c, None))
        return put(s, name, h)

    def thaw(self, s: State, name: str, c: int, copy: Copy) -> State:
        session = copy.session
        assert session is not None
        if session.dumped and s.taking is not None and s.taking.number == session.number:
            s = s._replace(ran_on=s.ran_on | {c})
        h = at(s, name)
        s = put(s, name, h._replace(over=max(h.over, session.number)))
        return put_copy(s, name, c, copy._replace(session=None))

    def asks(self, s: State, name: str, h: Host) -> Iterator[Change]:
        """What it learns when it reports or asks."""
        asked = (s.rewinding or s.suspended) and name in {*s.before, *(o.host for o in s.owners)}
        book = tuple((o.host, o.epoch) for o in s.owners)
        moved = not s.rewinds and any(b[1] > k[1] for b, k in zip(book, h.book, strict=True))
        if (h.rewinds < s.rewinds and not asked) or moved:
            yield f"{name} gets the book", self.learn(s, name, s.rewinds, book)
        for c in CAPSULES:
            copy, coming = h.copies[c], h.coming[c]
            move = self.move(s, c)
            if copy is not None and copy.promised:
                yield from self.claim(
                    s, name, c, Side.LEAVING, copy.epoch, copy.rewinds, True, move
                )
            if coming is not None:
                step = None if coming.of_rewind else move
                yield from self.claim(
                    s, name, c, Side.COMING, coming.epoch, coming.rewinds, coming.ready, step
                )
        newest, taking = s.newest.number if s.newest else 0, s.taking.number if s.taking else 0
        ends = {i for i in h.held if self.p.rule_held(i.number, newest, taking) is Ruling.END}
        ends |= {i for i in h.held if not self.keeps(s, name, i)}
        if ends:
            numbers = sorted({i.number for i in ends})
            yield f"{name} drops {numbers}", put(s, name, h._replace(held=h.held - ends))

    def claim(
        self,
        s: State,
        name: str,
        c: int,
        side: Side,
        epoch: int,
        rewinds: int,
        ready: bool,
        step: MigrationStep | None,
    ) -> Iterator[Change]:
        owner = s.owners[c]
        ruling = self.p.rule(
            side,
            name,
            epoch,
            Owner(*owner),
            step,
            copy_rewinds=rewinds,
            job_rewinds=s.rewinds,
        )
        if ruling is Ruling.RUN and ready:
            if rewinds < s.rewinds:
                raise Violation(f"{name} may run {c}, which is of before the rewind")
            message = (name, at(s, name).life, "ruled", c, side, epoch, owner.epoch)
            s = s._replace(owners=change(s.owners, c, owner._replace(granted=True)))
            yield f"{name} may run {c}", s._replace(net=s.net | {message})
        elif ruling is Ruling.END:
            drop = put_copy if side is Side.LEAVING else put_coming
            yield f"{name} ends {c}: {side.value}", drop(s, name, c, None)

    def move(self, s: State, c: int) -> MigrationStep:
        """The step of the move of a capsule, as the orchestrator has it."""
        if s.moving is None:
            return MigrationStep.REWOUND if s.rewinds else MigrationStep.FAILED
        runs = at(s, "D").copies[c] is not None
        return MigrationStep.FINISHING if runs else s.moving

    # ---- what both need ------------------------------------------------------------------------

    def learn(self, s: State, name: str, rewinds: int, book: tuple[tuple[str, int], ...]) -> State:
        """Enter an address book; the copies of an earlier count end before its id is in use."""
        h = at(s, name)
        if rewinds < h.rewinds and self.p.never_lower:
            return s
        if rewinds > h.rewinds and self.p.ends_by_itself:
            h = self.end_earlier(s, h, rewinds)
        newer = tuple(b if b[1] > k[1] else k for b, k in zip(book, h.book, strict=True))
        return put(s, name, h._replace(rewinds=rewinds, book=newer))

    def end_earlier(self, s: State, h: Host, rewinds: int) -> Host:
        for c in CAPSULES:
            copy, coming = h.copies[c], h.coming[c]
            if copy is not None and (copy.rewinds < rewinds or not self.p.ends_by_count):
                if copy.rewinds == s.rewinds:
                    raise Violation(f"a copy of {c} ends that was restored")
                h = h._replace(copies=change(h.copies, c, None), removing=h.removing | {c})
            if coming is not None and coming.rewinds < rewinds:
                h = h._replace(coming=change(h.coming, c, None), removing=h.removing | {c})
        return h

    # ---- faults --------------------------------------------------------------------------------

    def new_agent(self, s: State, name: str) -> State:
        """A new agent thaws what was locked, and keeps images that are complete."""
        h = at(s, name)
        for c, copy in enumerate(h.copies):
            if copy is not None and copy.session is not None:
                s = self.thaw(s, name, c, copy)
        h = at(s, name)
        copies = tuple(c and c._replace(sent=("", 0)) for c in h.copies)
        coming = tuple(
            c._replace(ready=False) if c is not None and c.complete else None for c in h.coming
        )
        held = frozenset(i for i in h.held if i.complete)
        h = h._replace(life=h.life + 1, copies=copies, coming=coming, held=held, over=0)
        return put(s, name, h)
