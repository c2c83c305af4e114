# SPDX-License-Identifier: Apache-2.0
"""The orchestrator's part in the model of snapshots and rewinds.

What it has in memory (``taking``, ``ended``, ``done``) is lost when it dies; the rest is in the
journal. Steps of docs/design are in the order in which the methods stand here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from exploring import Violation
from rewind_state import (
    CAPSULES,
    CUT,
    DONE,
    MOVED,
    REFUSED,
    SILENCE,
    UP,
    Answers,
    Change,
    Copy,
    Generation,
    Host,
    Message,
    Owned,
    Safeguards,
    State,
    Taking,
    at,
    change,
    has_all,
    named,
    put,
    spend,
)

from liveshift.runtime.model.ownership import Owner, last_whole, may_pass, may_restore


class Orchestrator:
    p: Safeguards

    def take(self, s: State, message: Message) -> Answers:
        raise NotImplementedError

    def order(self, s: State, name: str, kind: str, *body: Any) -> Iterator[tuple[str, State]]:
        """All that may come of an order to a host that is up."""
        message = (name, at(s, name).life, kind, *body)
        for answer, after in self.take(s, message):
            yield answer, after
            if s.faults.doubles:
                yield answer, spend(after, "doubles")._replace(net=after.net | {message})
        if s.faults.silences:
            yield SILENCE, spend(s, "silences")._replace(net=s.net | {message})

    def orchestrator(self, s: State) -> Iterator[Change]:
        yield from self.snapshot(s, s.taking) if s.taking else self.begin(s)
        if s.rewinding:
            yield from self.order_ends(s)
            for c in CAPSULES:
                yield from self.restore(s, c)
            yield from self.finish(s)
        if s.suspended:
            yield from self.order_ends(s)
            yield from self.resume(s)
        else:
            yield from self.rewind(s)

    def is_up(self, s: State, name: str) -> bool:
        return at(s, name).state is UP

    # ---- a snapshot ----------------------------------------------------------------------------

    def begin(self, s: State) -> Iterator[Change]:
        job = {o.host for o in s.owners}
        ready = all(o.granted and self.is_up(s, o.host) for o in s.owners)
        free = [n for n, _ in named(s) if n not in job and self.is_up(s, n)]
        if s.rewinding or s.moving or not ready or not free:
            return
        if s.faults.snapshots:
            yield from self.hold(spend(s, "snapshots"), free, suspends=False)
        if s.faults.suspensions:
            yield from self.hold(spend(s, "suspensions"), free, suspends=True)

    def hold(self, s: State, free: list[str], *, suspends: bool) -> Iterator[Change]:
        holder = s.newest.holder if s.newest and s.newest.holder in free else free[0]
        last = s.number if self.p.numbers_grow else s.newest.number if s.newest else 0
        number = last + 1
        s = s._replace(number=number, ran_on=frozenset())
        taking = Taking(number, s.rewinds, s.owners, holder, 0, suspends=suspends)
        for answer, after in self.order(s._replace(taking=taking), holder, "hold", number):
            numbers = (n for n in range(number - 1, 0, -1) if has_all(after, holder, n))
            known = taking._replace(base=next(numbers, 0))  # the holder says what it has
            done = after._replace(taking=known) if answer == DONE else self.give_up(after)
            why = ", to suspend the job" if suspends else ""
            yield f"s{number}{why}: {holder} holds: {answer}", done

    def give_up(self, s: State) -> State:
        return s._replace(taking=None, ran_on=frozenset())

    def snapshot(self, s: State, taking: Taking) -> Iterator[Change]:
        number, holder, base, name = taking.number, taking.holder, taking.base, f"s{taking.number}"
        if not all(self.is_up(s, n) for n in (holder, *(o.host for o in taking.owners))):
            yield f"{name}: given up, a host is silent", self.give_up(s)
            return
        for c, owner in enumerate(taking.owners):
            if c not in taking.locked:
                for answer, after in self.order(s, owner.host, "lock", c, number, holder, base):
                    locked = taking._replace(locked=taking.locked | {c})
                    yield f"{name}: lock {c}: {answer}", self.went(after, answer, locked)
            elif c not in taking.dumped and (
                len(taking.locked) == len(CAPSULES) or not self.p.all_locked_first
            ):
                for answer, after in self.order(s, owner.host, "dump", c, number, holder, base):
                    dumped = taking._replace(dumped=taking.dumped | {c})
                    yield f"{name}: dump {c}: {answer}", self.went(after, answer, dumped)
        if len(taking.dumped) == len(CAPSULES):
            for answer, after in self.order(s, holder, "check", number):
                done = self.complete(after, taking) if answer == DONE else self.give_up(after)
                yield f"{name}: complete? {answer}", done

    def went(self, s: State, answer: str, taking: Taking) -> State:
        return s._replace(taking=taking) if answer == DONE else self.give_up(s)

    def complete(self, s: State, taking: Taking) -> State:
        if self.p.same_rewinds and (s.rewinds, s.owners) != (taking.rewinds, taking.owners):
            return self.give_up(s)
        images = [i for i in at(s, taking.holder).held if i.number == taking.number]
        if not all(i.good for i in images):
            raise Violation("a snapshot with wrong pages is complete")
        if not all(i.cut for i in images):
            raise Violation("a snapshot is no consistent cut")
        newest = Generation(taking.number, taking.rewinds, taking.holder)
        lost = frozenset(o.host for c, o in enumerate(s.owners) if not at(s, o.host).copies[c])
        done = self.give_up(s)._replace(newest=newest, losses=lost)
        return self.suspend(done) if taking.suspends else done

    # ---- a suspension --------------------------------------------------------------------------

    def suspend(self, s: State) -> State:
        """The same write suspends the job: no host may run a capsule of it. Then only the images
        are left of it, so a job is protected no more than with a host lost."""
        owners = tuple(Owned(o.host, o.epoch + self.p.plus, False) for o in s.owners)
        return s._replace(
            suspended=True,
            rewinds=s.rewinds + self.p.counted,
            owners=owners,
            before=last_whole([Owner(*owner) for owner in s.owners], s.before),
            ended=frozenset(),
            done=("", ""),
            losses=s.losses | {"the job is suspended"},
        )

    def resume(self, s: State) -> Iterator[Change]:
        """A rewind in which no capsule is in place; a person may want it at any time."""
        assert s.newest is not None
        holder, number = s.newest.holder, s.newest.number
        if not self.is_up(s, holder) or not has_all(s, holder, number):
            return
        plan = tuple(Owned(holder, o.epoch + self.p.plus, False) for o in s.owners)
        after = s._replace(
            suspended=False,
            rewinds=s.rewinds + 1,
            owners=plan,
            rewinding=True,
            before=last_whole([Owner(*owner) for owner in s.owners], s.before),
            generation=number,
            ended=frozenset(),
            done=("", ""),
        )
        yield f"resume {after.rewinds} from s{number}", after

    # ---- a rewind ------------------------------------------------------------------------------

    def lacks(self, s: State, c: int) -> bool:
        """Whether a host has reported without a capsule that it was let run, or a move with none
        left."""
        if s.gone and c == MOVED:
            return True
        name, h, owner = s.owners[c].host, at(s, s.owners[c].host), s.owners[c]
        there = h.copies[c] is not None or h.coming[c] is not None
        ruled = any(m[:4] == (name, h.life, "ruled", c) for m in s.net)
        return self.is_up(s, name) and owner.granted and not there and not ruled

    def rewind(self, s: State) -> Iterator[Change]:
        """The one write that takes all capsules back (T1)."""
        hosts = [o.host for o in s.owners]
        lost = [c for c in CAPSULES if not self.is_up(s, hosts[c]) or self.lacks(s, c)]
        heard = any(self.is_up(s, name) for name in hosts)
        if not lost or s.newest is None or (self.p.one_heard and not heard):
            return
        holder = s.newest.holder
        if not self.is_up(s, holder) or (
            self.p.images_seen and not has_all(s, holder, s.newest.number)
        ):
            return
        if not has_all(s, holder, s.newest.number):
            raise Violation("a rewind to images that are gone")
        plan = tuple(
            Owned(holder if c in lost else o.host, o.epoch + self.p.plus, False)
            for c, o in enumerate(s.owners)
        )
        before = last_whole([Owner(*owner) for owner in s.owners], s.before)
        after = s._replace(
            rewinds=s.rewinds + 1,
            owners=plan,
            rewinding=True,
            before=before,
            generation=s.newest.number,
            ended=frozenset(),
            done=("", ""),
            losses=s.losses | {hosts[c] for c in lost},
            moving=None if self.p.overtakes else s.moving,
            gone=False,
        )
        label = f"rewind {after.rewinds} to s{s.newest.number}: {[o.host for o in plan]}"
        yield label, after
        if not self.p.one_write and s.faults.orchestrator:
            torn = s._replace(owners=(plan[0], s.owners[1]))
            yield f"{label}, torn", self.new_orchestrator(spend(torn, "orchestrator"))

    def book(self, s: State) -> tuple[tuple[str, int], ...]:
        return tuple((o.host, o.epoch) for o in s.owners)

    def order_ends(self, s: State) -> Iterator[Change]:
        for name in sorted({*s.before, *(o.host for o in s.owners)} - s.ended):
            if self.is_up(s, name):
                for answer, after in self.order(s, name, "end", s.rewinds, self.book(s)):
                    if answer == DONE:
                        ended = s.ended | {name}
                        before = frozenset() if may_restore(s.before, ended) else s.before
                        after = after._replace(ended=ended, before=before)
                    yield f"{name} ends what is earlier: {answer}", after

    def restore(self, s: State, c: int) -> Iterator[Change]:
        owner = s.owners[c]
        name, copy = owner.host, at(s, owner.host).copies[c]
        coming = at(s, name).coming[c]
        if not self.is_up(s, name) or (copy is not None and copy.rewinds == s.rewinds):
            return
        if coming is not None and coming.ready and coming.epoch == owner.epoch:
            return  # the order to restore is not answered before the tree runs
        if (self.p.end_first and name not in s.ended) or (self.p.halved and s.before):
            return
        if not owner.granted and s.done[c] == "":
            book = self.book(s)
            for answer, after in self.order(s, name, "reserve", c, owner.epoch, s.rewinds, book):
                if answer == DONE:
                    after = after._replace(done=change(after.done, c, "reserved"))
                elif answer != REFUSED:
                    after = self.again(after, c)
                yield f"reserve {c} on {name}: {answer}", after
        else:
            holder = s.newest.holder if s.newest else ""
            if not self.is_up(s, holder):
                return
            image = s.generation, holder
            for answer, after in self.order(s, name, "bring", c, owner.epoch, *image):
                if answer not in (DONE, "gone"):
                    after = self.again(after, c, still=answer == "failed")
                yield f"restore {c} on {name}: {answer}", after
                if answer == "failed":
                    yield from self.elsewhere(after, c)

    def again(self, s: State, c: int, still: bool = False) -> State:
        """Try again under a further epoch, unless a copy may run already."""
        owner = s.owners[c]
        if not may_pass(Owner(*owner), still):
            return s
        further = Owned(owner.host, owner.epoch + 1, False)
        return s._replace(owners=change(s.owners, c, further), done=change(s.done, c, ""))

    def elsewhere(self, s: State, c: int) -> Iterator[Change]:
        """Another spare, if there is one; all hosts get the book again."""
        taken = {o.host for o in s.owners}
        for name, _ in named(s):
            if name not in taken and self.is_up(s, name):
                owner = s.owners[c]._replace(host=name)
                after = s._replace(owners=change(s.owners, c, owner), ended=frozenset())
                yield f"{c} goes to {name} instead", after

    def finish(self, s: State) -> Iterator[Change]:
        if self.p.end_first and not {o.host for o in s.owners} <= s.ended:
            return  # a host that has another capsule may not know yet where this one is
        for c, owner in enumerate(s.owners):
            copy = at(s, owner.host).copies[c]
            if not (owner.granted and self.is_up(s, owner.host) and self.is_new(s, owner, copy)):
                return
        yield "rewound", s._replace(rewinding=False, ended=frozenset(), done=("", ""))

    def is_new(self, s: State, owner: Owned, copy: Copy | None) -> bool:
        return copy is not None and (copy.rewinds, copy.epoch) == (s.rewinds, owner.epoch)

    # ---- faults --------------------------------------------------------------------------------

    def new_orchestrator(self, s: State) -> State:
        return self.give_up(s)._replace(
            ended=frozenset(), done=("", ""), rewinding=s.rewinding and self.p.recorded
        )

    def cut(self, s: State, name: str, h: Host) -> State:
        return put(s, name, h._replace(state=CUT))
