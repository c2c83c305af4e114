# SPDX-License-Identifier: Apache-2.0
"""How the images of a suspended job go on to second hosts, in the model of snapshots and rewinds.

The orchestrator copies one image at a time. What it knows of that is lost when it dies.
"""

from __future__ import annotations

from collections.abc import Iterator

from exploring import Violation
from rewind_snapshots import Snapshots
from rewind_state import (
    CAPSULES,
    DONE,
    Change,
    Copying,
    Image,
    State,
    at,
    change,
    has,
    named,
)


class Copies(Snapshots):
    def copies(self, s: State) -> Iterator[Change]:
        """An image that only one host can give goes to another one, once no copy of the job is
        left on a host that is up."""
        if s.copying is not None:
            yield from self.copy(s, s.copying)
            return
        assert s.newest is not None
        left = {name for name in {*(o.host for o in s.owners)} - s.ended if self.is_up(s, name)}
        alone = [c for c in CAPSULES if len(self.giving(s, c)) == 1]
        if s.before or left or not alone:
            return
        (first,) = self.giving(s, alone[0])
        able = [n for n, _ in named(s) if n != first and n in s.cluster.room and self.is_up(s, n)]
        if able:
            copying = Copying(s.newest.number, alone[0], first, able[0])
            yield from self.hold_anew(s._replace(copying=copying), copying)

    def giving(self, s: State, c: int) -> list[str]:
        assert s.newest is not None
        return [
            name
            for name in s.newest.holders[c]
            if self.is_up(s, name) and has(s, name, s.newest.number, c)
        ]

    def hold_anew(self, s: State, copying: Copying) -> Iterator[Change]:
        number, c, first, second, _ = copying
        for answer, after in self.order(s, second, "hold_anew", number, c):
            done = after if answer == DONE else after._replace(copying=None)
            yield f"{second} gets image {c} from {first}: {answer}", done

    def copy(self, s: State, copying: Copying) -> Iterator[Change]:
        number, c, first, second, sent = copying
        if not (self.is_up(s, first) and self.is_up(s, second)):
            yield f"{second} does not get image {c}", s._replace(copying=None)
        elif not sent:
            for answer, after in self.order(s, first, "forward", number, c, second):
                known = copying._replace(sent=True) if answer == DONE else None
                yield (
                    f"{first} sends image {c} to {second}: {answer}",
                    after._replace(copying=known),
                )
        else:
            for answer, after in self.order(s, second, "check", number, (c,)):
                after = after._replace(copying=None)
                if answer == DONE:
                    after = self.record(after, number, c, (first, second))
                yield f"{second} has image {c}? {answer}", after

    def record(self, s: State, number: int, c: int, holders: tuple[str, ...]) -> State:
        assert s.newest is not None
        found = [i for i in at(s, holders[1]).held if (i.number, i.capsule) == (number, c)]
        if not all(image.good for image in found):
            raise Violation("a copy with wrong pages counts")
        s = s._replace(newest=s.newest._replace(holders=change(s.newest.holders, c, holders)))
        if all(len(self.giving(s, each)) > 1 for each in CAPSULES):
            s = s._replace(losses=frozenset())  # any one host may die now
        return s

    def keeps(self, s: State, name: str, image: Image) -> bool:
        """Whether a host of a suspended job may keep an image of its newest snapshot."""
        if not s.suspended or s.newest is None or image.number != s.newest.number:
            return True
        gets = s.copying is not None and (s.copying.second, s.copying.capsule) == (
            name,
            image.capsule,
        )
        return gets or name in s.newest.holders[image.capsule]
