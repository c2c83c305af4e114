# SPDX-License-Identifier: Apache-2.0
"""How the orchestrator takes a snapshot, in the model of snapshots and rewinds.

Hosts without a capsule of the job hold the images. Where there is none, the job's hosts do: each
image lies on another host of the job and on the capsule's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from exploring import Violation
from rewind_state import (
    CAPSULES,
    DONE,
    SILENCE,
    UP,
    Answers,
    Change,
    Generation,
    Holders,
    Message,
    Safeguards,
    State,
    Taking,
    at,
    change,
    has,
    named,
    spend,
)


def places(taking: Taking) -> list[tuple[str, tuple[int, ...], bool]]:
    """The orders to hold images, and to check them: a host, which capsules, and whether that host
    runs this capsule."""
    if len({*taking.holders}) == 1 and len(taking.holders[0]) == 1:
        return [(taking.holders[0][0], CAPSULES, False)]
    return [
        (name, (c,), own > 0)
        for c, holders in enumerate(taking.holders)
        for own, name in enumerate(holders)
    ]


class Snapshots:
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

    def suspend(self, s: State) -> State:
        raise NotImplementedError

    def is_up(self, s: State, name: str) -> bool:
        return at(s, name).state is UP

    def begin(self, s: State) -> Iterator[Change]:
        ready = all(o.granted and self.is_up(s, o.host) for o in s.owners)
        if s.rewinding or s.moving or not ready:
            return
        for fault, suspends in (("snapshots", False), ("suspensions", True)):
            holders = self.holders(s, suspends)
            if getattr(s.faults, fault) and holders:
                last = s.number if self.p.numbers_grow else s.newest.number if s.newest else 0
                taking = Taking(last + 1, s.rewinds, s.owners, holders, suspends=suspends)
                after = spend(s, fault)._replace(number=last + 1, ran_on=frozenset())
                yield from self.hold(after._replace(taking=taking), taking)

    def holders(self, s: State, suspends: bool) -> Holders:
        """Hosts that run no capsule of the job; else another host of the job for each capsule, and
        its own, but not if that is to be free. None if there are no such hosts."""
        able = [n for n, _ in named(s) if n in s.cluster.room and self.is_up(s, n)]
        job = {o.host for o in s.owners}
        outside = [n for n in able if n not in job]
        if not (outside or s.cluster.neighbours):
            return ()
        holders: list[tuple[str, ...]] = []
        for c, owner in enumerate(s.owners):
            others = outside or [n for n in able if n != owner.host]
            if not others:
                return ()
            before = s.newest.holders[c][0] if s.newest else ""
            holder = before if before in others else others[0]
            two = not outside and owner.host in able and self.p.own_stays and not suspends
            holders.append((holder, owner.host) if two else (holder,))
        return tuple(holders)

    def hold(self, s: State, taking: Taking) -> Iterator[Change]:
        """The next order to hold images. The holder says in its answer what it has."""
        number = taking.number
        holder, capsules, own = places(taking)[taking.held]
        for answer, after in self.order(s, holder, "hold", number, capsules):
            known = taking._replace(held=taking.held + 1)
            numbers = (n for n in range(number - 1, 0, -1) if has(after, holder, n, *capsules))
            base = next(numbers, 0)
            for c in capsules:
                if own and answer != DONE:
                    known = known._replace(without=known.without | {c})
                elif not own:
                    known = known._replace(bases=change(known.bases, c, base))
                elif base != known.bases[c] and self.p.same_base:
                    known = known._replace(bases=change(known.bases, c, 0))
            done = after._replace(taking=known) if answer == DONE or own else self.give_up(after)
            why = ", to suspend the job" if taking.suspends else ""
            which = "" if len(capsules) == len(CAPSULES) else f" {capsules[0]}"
            yield f"s{number}{why}: {holder} holds{which}: {answer}", done

    def give_up(self, s: State) -> State:
        return s._replace(taking=None, ran_on=frozenset())

    def snapshot(self, s: State, taking: Taking) -> Iterator[Change]:
        number, name = taking.number, f"s{taking.number}"
        hosts = {*(o.host for o in taking.owners), *(n for n, *_ in places(taking))}
        if not all(self.is_up(s, n) for n in hosts):
            yield f"{name}: given up, a host is silent", self.give_up(s)
            if len(taking.dumped) < len(CAPSULES):
                return
        if taking.held < len(places(taking)):
            yield from self.hold(s, taking)
            return
        for c, owner in enumerate(taking.owners):
            body = c, number, self.whole(taking, c), taking.bases[c]
            if c not in taking.locked:
                for answer, after in self.order(s, owner.host, "lock", *body):
                    locked = taking._replace(locked=taking.locked | {c})
                    yield f"{name}: lock {c}: {answer}", self.went(after, answer, locked)
            elif c not in taking.dumped and (
                len(taking.locked) == len(CAPSULES) or not self.p.all_locked_first
            ):
                for answer, after in self.order(s, owner.host, "dump", *body):
                    dumped = taking._replace(dumped=taking.dumped | {c})
                    yield f"{name}: dump {c}: {answer}", self.went(after, answer, dumped)
        if len(taking.dumped) == len(CAPSULES):
            yield from self.check(s, taking)

    def whole(self, taking: Taking, c: int) -> tuple[str, ...]:
        """The hosts that may have the whole image of a capsule."""
        return taking.holders[c][:1] if c in taking.without else taking.holders[c]

    def check(self, s: State, taking: Taking) -> Iterator[Change]:
        """The next holder compares its pages; the last answer completes the snapshot. It does not
        wait for a host's copy of its own capsule."""
        todo = places(taking)
        holder, capsules, own = todo[taking.checked]
        label = f"s{taking.number}: {holder} has {' and '.join(map(str, capsules))}?"
        silent = [(SILENCE, s)] if own else []
        asked = self.order(s, holder, "check", taking.number, capsules)
        for answer, after in asked if self.is_up(s, holder) else silent:
            known = taking._replace(checked=taking.checked + 1)
            if answer != DONE and not own:
                yield f"{label} {answer}", self.give_up(after)
                continue
            if answer != DONE and self.p.names_whole:
                known = known._replace(without=known.without | {*capsules})
            if known.checked < len(todo):
                yield f"{label} {answer}", after._replace(taking=known)
            else:
                yield f"{label} {answer}, complete", self.complete(after, known)

    def went(self, s: State, answer: str, taking: Taking) -> State:
        return s._replace(taking=taking) if answer == DONE else self.give_up(s)

    def complete(self, s: State, taking: Taking) -> State:
        if self.p.same_rewinds and (s.rewinds, s.owners) != (taking.rewinds, taking.owners):
            return self.give_up(s)
        if taking.without and self.p.never_weaker and self.is_strong(s):
            return self.give_up(s)
        holders = tuple(self.whole(taking, c) for c in CAPSULES)
        images = [
            image
            for c in CAPSULES
            for name in holders[c]
            for image in at(s, name).held
            if (image.number, image.capsule) == (taking.number, c)
        ]
        if not all(i.good for i in images):
            raise Violation("a snapshot with wrong pages is complete")
        if not all(i.cut for i in images):
            raise Violation("a snapshot is no consistent cut")
        newest = Generation(taking.number, taking.rewinds, holders)
        lost = frozenset(o.host for c, o in enumerate(s.owners) if not at(s, o.host).copies[c])
        lost |= {"there is one copy only"} if taking.without else set()
        done = self.give_up(s)._replace(newest=newest, losses=lost)
        return self.suspend(done) if taking.suspends else done

    def is_strong(self, s: State) -> bool:
        """Whether no single death takes a capsule and the last copy of an image, as far as the
        newest snapshot says. Which hosts live by now does not matter."""
        job = {owner.host for owner in s.owners}
        held = s.newest.holders if s.newest else ()
        return bool(held) and all(len(h) > 1 or h[0] not in job for h in held)
