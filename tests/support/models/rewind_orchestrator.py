# SPDX-License-Identifier: Apache-2.0
"""The orchestrator's part in the model of snapshots and rewinds.

What it has in memory (``taking``, ``ended``, ``done``) is lost when it dies; the rest is in the
journal. Steps of docs/design are in the order in which the methods stand here.
"""

from __future__ import annotations

from collections.abc import Iterator

from exploring import Violation
from rewind_copies import Copies
from rewind_state import (
    CAPSULES,
    CUT,
    DONE,
    MOVED,
    REFUSED,
    Change,
    Copy,
    Host,
    Owned,
    State,
    at,
    change,
    has,
    named,
    put,
    spend,
)

from liveshift.runtime.model.ownership import Owner, last_whole, may_pass, may_restore


class Orchestrator(Copies):
    def orchestrator(self, s: State) -> Iterator[Change]:
        yield from self.snapshot(s, s.taking) if s.taking else self.begin(s)
        if s.rewinding:
            yield from self.order_ends(s)
            for c in CAPSULES:
                yield from self.restore(s, c)
            yield from self.finish(s)
        if s.suspended:
            yield from self.order_ends(s)
            yield from self.copies(s)
            yield from self.resume(s)
        else:
            yield from self.rewind(s)

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
        if not all(self.givers(s, c) for c in CAPSULES):
            return
        for hosts in self.plans(s, [*CAPSULES]):
            after = s._replace(
                suspended=False,
                copying=None,
                rewinds=s.rewinds + 1,
                owners=self.planned(s, hosts),
                rewinding=True,
                before=last_whole([Owner(*owner) for owner in s.owners], s.before),
                generation=s.newest.number,
                ended=frozenset(),
                done=("", ""),
            )
            yield f"resume {after.rewinds} from s{s.newest.number}: {hosts}", after

    # ---- where capsules go, and whence their images come ---------------------------------------

    def givers(self, s: State, c: int) -> list[str]:
        """The holders that are up and have the image of a capsule, first its own host."""
        assert s.newest is not None
        up = [n for n in s.newest.holders[c] if self.is_up(s, n)]
        found = [n for n in up if has(s, n, s.newest.number, c)]
        return sorted(found, key=lambda n: n != s.owners[c].host)

    def plans(self, s: State, lost: list[int]) -> list[list[str]]:
        """All hosts to which capsules may go: the lost ones to a holder of their images that has a
        free slot, though it may have come back without them; else to any host with one."""
        assert s.newest is not None
        plans = [[""] * len(CAPSULES)]
        for c in sorted(CAPSULES, key=lambda c: c in lost):
            longer: list[list[str]] = []
            for plan in plans:
                free = [n for n, _ in named(s) if plan.count(n) < s.cluster.slots]
                free = [n for n in free if self.is_up(s, n)]
                there = [n for n in s.newest.holders[c] if n in free] or free
                to = there if c in lost else [s.owners[c].host]
                longer += [[*plan[:c], name, *plan[c + 1 :]] for name in to]
            plans = longer
        return plans

    def planned(self, s: State, hosts: list[str]) -> tuple[Owned, ...]:
        return tuple(
            Owned(name, o.epoch + self.p.plus, False)
            for name, o in zip(hosts, s.owners, strict=True)
        )

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
        if not all(any(self.is_up(s, n) for n in names) for names in s.newest.holders):
            return
        if not all(self.givers(s, c) for c in CAPSULES):
            if self.p.images_seen:
                return
            raise Violation("a rewind to images that are gone")
        for names in self.plans(s, lost):
            yield from self.rewind_to(s, lost, self.planned(s, names))

    def rewind_to(self, s: State, lost: list[int], plan: tuple[Owned, ...]) -> Iterator[Change]:
        assert s.newest is not None
        before = last_whole([Owner(*owner) for owner in s.owners], s.before)
        after = s._replace(
            rewinds=s.rewinds + 1,
            owners=plan,
            rewinding=True,
            before=before,
            generation=s.newest.number,
            ended=frozenset(),
            done=("", ""),
            losses=s.losses | {s.owners[c].host for c in lost},
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
            holders = s.newest.holders[c] if s.newest else ()
            up = [*self.givers(s, c), *(n for n in holders if self.is_up(s, n))]
            if not up:
                return
            image = s.generation, up[0]
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
            ended=frozenset(),
            done=("", ""),
            rewinding=s.rewinding and self.p.recorded,
            copying=None,
        )

    def cut(self, s: State, name: str, h: Host) -> State:
        return put(s, name, h._replace(state=CUT))
