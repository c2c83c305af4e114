# SPDX-License-Identifier: Apache-2.0
"""A move in the model of snapshots and rewinds: of capsule 1 from B to D, from its pre-copy on.

The order to freeze may be carried out late, as any other. A rewind may come at any moment, and ends
the move: whatever is under way then, no copy of it may run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rewind_state import (
    DEAD,
    DONE,
    MOVED,
    REFUSED,
    UP,
    Answers,
    Change,
    Coming,
    Owned,
    Safeguards,
    State,
    at,
    change,
    put_coming,
    put_copy,
)

from liveshift.runtime.model.ownership import Owner, may_pass
from liveshift.runtime.model.steps import MigrationStep

SOURCE, DESTINATION = "B", "D"


class Moves:
    p: Safeguards

    def order(self, s: State, name: str, kind: str, *body: Any) -> Iterator[tuple[str, State]]:
        raise NotImplementedError

    # ---- the orchestrator ----------------------------------------------------------------------

    def moves(self, s: State) -> Iterator[Change]:
        if s.moving in (MigrationStep.PRECOPYING, MigrationStep.FREEZING):
            yield from self.freeze(s)
        if s.moving is MigrationStep.FREEZING:
            yield from self.look(s)
        elif s.moving is MigrationStep.PRECOPYING and not self.both_up(s):
            yield "the move is rolled back", s._replace(moving=None)
        elif s.moving is MigrationStep.RESTORING:
            yield from self.restores(s)
        elif s.moving is MigrationStep.RETURNING and at(s, SOURCE).state is UP:
            copy = at(s, SOURCE).copies[MOVED]
            if copy is None:
                yield "1 is lost", s._replace(moving=None, gone=True)
            elif not copy.promised:
                yield "1 has returned", s._replace(moving=None)

    def both_up(self, s: State) -> bool:
        return at(s, SOURCE).state is at(s, DESTINATION).state is UP

    def coming(self, s: State) -> Coming | None:
        """What D has of the move."""
        coming = at(s, DESTINATION).coming[MOVED]
        return None if coming is None or coming.of_rewind else coming

    def freeze(self, s: State) -> Iterator[Change]:
        if self.both_up(s):
            s = s._replace(moving=MigrationStep.FREEZING)
            for answer, after in self.order(s, SOURCE, "freeze"):
                yield f"freeze 1: {answer}", after

    def look(self, s: State) -> Iterator[Change]:
        """Whether the image is complete; if not, it stays so. A silent D does not say it."""
        there, coming = at(s, DESTINATION), self.coming(s)
        if coming is not None and coming.complete and there.state is UP:
            yield "commit 1 to D", self.pass_to(s, DESTINATION, MigrationStep.RESTORING)
        elif there.state is not UP and coming is not None:
            return
        else:
            closed = s if coming is None else put_coming(s, DESTINATION, MOVED, None)
            yield "the move is rolled back", closed._replace(moving=None)

    def restores(self, s: State) -> Iterator[Change]:
        there, here, owner = at(s, DESTINATION), at(s, SOURCE), s.owners[MOVED]
        if there.copies[MOVED] is not None:
            if here.copies[MOVED] is None:
                yield "the move is done", s._replace(moving=None)
        elif self.coming(s) is not None and there.state is UP:
            for answer, after in self.order(s, DESTINATION, "restore"):
                yield f"restore 1 on D: {answer}", after
        elif self.coming(s) is None and there.state is not DEAD and owner.granted:
            yield "1 is lost", s._replace(moving=None, gone=True)
        elif self.coming(s) is None and not owner.granted and here.state is UP:
            copy = here.copies[MOVED]
            if copy is not None and copy.promised:
                yield "1 returns to B", self.pass_to(s, SOURCE, MigrationStep.RETURNING)
            else:
                yield "1 is lost", s._replace(moving=None, gone=True)

    def pass_to(self, s: State, name: str, step: MigrationStep) -> State:
        owner = s.owners[MOVED]
        assert may_pass(Owner(*owner), still=True)
        owners = change(s.owners, MOVED, Owned(name, owner.epoch + 1, False))
        return s._replace(owners=owners, moving=step)

    # ---- the hosts -----------------------------------------------------------------------------

    def take_freeze(self, s: State, name: str) -> Answers:
        """The source freezes its capsule, promises, and sends the last part of the image; or its
        agent is interrupted in between. What it has of the move ends with its copy."""
        copy, coming = at(s, name).copies[MOVED], self.coming(s)
        if copy is None or copy.promised or copy.rewinds or coming is None:
            return [(REFUSED, s)]
        promised = put_copy(s, name, MOVED, copy._replace(promised=True))
        whole = put_coming(promised, DESTINATION, MOVED, coming._replace(complete=True))
        return [(DONE, whole), ("promised", promised)]

    def take_restore(self, s: State, name: str) -> Answers:
        """A tree is restored up to where it would run."""
        coming = self.coming(s)
        if coming is None or not coming.complete:
            return [(REFUSED, s)]
        ready = coming._replace(ready=True)
        return [(DONE, put_coming(s, name, MOVED, ready))]
