# SPDX-License-Identifier: Apache-2.0
"""The orchestrator's part in the model: what migration.py, moves.py and the journal do.

Names are those of ``Move`` where there is one: ``goes_on`` and ``roll_back``, ``restore``,
``return_``. What waits for an answer (:class:`Wait`): the kind of message asked, or for Settle,
which is asked of the source for four reasons: *Settle* (rolling back), *look* (returning, before
the source owns it again), *known* (afterwards) and *finish*; *spare*: the Reserve of a host that
the image may be passed on to.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from exploring import Violation
from model_state import (
    Change,
    Message,
    Protocol,
    State,
    Wait,
    ask,
    over,
    send,
    spend,
    to,
)

from liveshift.runtime.model.ownership import Owner, Ruling, Side
from liveshift.runtime.model.steps import MigrationStep

ATTEMPTS = 2
SILENCE = "silence"
SETTLED = ("Settled",)
RESERVED = ("Reserved", "Refused")
FITS = {
    "Reserve": RESERVED,
    "spare": RESERVED,
    "Freeze": ("Frozen", "StepFailed"),
    "Forward": ("Frozen", "NotFound"),
    "Progress": ("Arrived",),
    "RestoreCapsule": ("Restored", "NotFound", "StepFailed"),
    "Settle": SETTLED,
    "finish": SETTLED,
    "look": SETTLED,
    "known": SETTLED,
}
"""What may answer what."""


class Orchestrator:
    def __init__(self, protocol: Protocol) -> None:
        self.p = protocol
        self._rules: dict[Any, Ruling] = {}

    def orchestrator(self, s: State) -> Iterator[Change]:
        """What it does by itself."""
        if s.wait.what == "take up":
            yield "the migration is taken up", self.take_up(s)
        elif s.step is None:
            if s.budget.moves and s.owner[2] and not s.ended:
                for name, _ in s.hosts:
                    if name != s.owner[0]:
                        yield f"move to {name}", self.begin(spend(s, "moves"), name)
        elif s.budget.silences:
            yield from self.unanswered(spend(s, "silences"))

    def begin(self, s: State, to: str) -> State:
        s = s._replace(
            step=MigrationStep.PREPARING,
            m=s.m + 1,
            source=s.owner[0],
            destination=to,
            surveyed=True,
        )
        return ask(s, to, "Reserve", s.m, s.owner[1] + 1, s.source)

    def unanswered(self, s: State) -> Iterator[Change]:
        """It stops waiting."""
        for label, after in self.answered(s, SILENCE, "unknown"):
            yield f"no answer to {s.wait.what}: {label}", after

    # ---- what follows from an answer -----------------------------------------------------------

    def answered(self, s: State, kind: str, value: Any) -> Iterator[Change]:
        what, _, failed, gone = s.wait
        if what == "Reserve":
            if kind == "Reserved":
                s = to(
                    to(to(s, MigrationStep.PRECOPYING), MigrationStep.QUIESCING),
                    MigrationStep.FREEZING,
                )
                yield (
                    "freeze",
                    ask(
                        s,
                        s.source,
                        "Freeze",
                        s.m,
                        s.destination,
                        value,
                        dict(s.hosts)[s.source].boot_id,
                    ),
                )
            else:
                yield "roll back", self.roll_back(s)
        elif what == "Freeze":
            if kind == "Frozen":
                yield from self.commit_move(s)
            else:
                yield "is it complete?", self.goes_on(s._replace(maybe=True))
        elif what == "Progress":
            yield from self.looked_for_image(s, kind, value)
        elif what == "Settle":
            if s.maybe and value in ("unknown", "nothing"):
                yield "is it complete?", self.goes_on(s, gone=value == "nothing")
            else:
                yield "rolled back", self.rolled_back(s, value)
        elif what == "finish":
            yield "done", over(s, MigrationStep.DONE)
        elif what == "RestoreCapsule":
            yield from self.restored(s, kind, failed)
        elif what == "spare":
            if kind == "Reserved":
                yield "forward", ask(s, s.destination, "Forward", s.m, self.spare(s), value)
            else:
                yield "return", self.return_(to(s, MigrationStep.RETURNING), False)
        elif what == "Forward":
            yield from self.forwarded(s, kind)
        elif what == "look":
            yield from self.looked(s, value, gone)
        elif what == "known":
            yield from self.known(s, value, gone)

    def committing(self, s: State, host: str, still: bool) -> tuple[State, list[Change]]:
        """Pass it on, and what may come of that if the orchestrator dies at once. Where ``still``
        is not said it may be that nothing changes: the write is refused."""
        if not self.p.may_pass(Owner(*s.owner), still):
            if still:
                raise Violation("a frozen capsule cannot move")
            return s, []
        after = s._replace(owner=(host, s.owner[1] + 1, False))
        if not s.budget.orchestrator:
            return after, []
        return after, [("committed, and it dies", self.restart(spend(after, "orchestrator")))]

    # ---- up to the commit ----------------------------------------------------------------------

    def commit_move(self, s: State) -> Iterator[Change]:
        s, dies = self.committing(s, s.destination, True)
        yield from dies
        s = to(s, MigrationStep.COMMITTED)
        yield "commit", self.restore(s._replace(maybe=False, released=False))

    def goes_on(self, s: State, gone: bool = False) -> State:
        """``gone``: its source has said that it has nothing."""
        return ask(s, s.destination, "Progress", s.m, gone=gone)

    def looked_for_image(self, s: State, kind: str, complete: Any) -> Iterator[Change]:
        heard = kind != SILENCE
        if heard and complete and not (s.released and self.p.released_may_run):
            yield from self.commit_move(s)
        elif s.step is MigrationStep.FREEZING:
            yield (
                "roll back",
                self.roll_back(s._replace(maybe=s.maybe and not (heard and not complete))),
            )
        elif (heard and not complete) or (s.wait.gone and (heard or not self.p.lost_for_sure)):
            yield "rolled back", self.rolled_back(s, "nothing" if s.wait.gone else "unknown")
        elif self.p.insist:  # nothing is decided
            yield "again", ask(s, s.source, "Settle", s.m)
        else:
            yield "rolled back", self.rolled_back(s, "unknown")

    def roll_back(self, s: State) -> State:
        s = to(s, MigrationStep.ROLLING_BACK)
        return ask(s, s.source, "Settle", s.m)

    def rolled_back(self, s: State, state: str) -> State:
        s = over(s, MigrationStep.LOST if state == "nothing" else MigrationStep.FAILED)
        return send(s, s.destination, "Settle", 0, s.m)

    # ---- after the commit ----------------------------------------------------------------------

    def restore(self, s: State, failed: int = 0) -> State:
        s = to(s, MigrationStep.RESTORING)
        return ask(s, s.destination, "RestoreCapsule", s.m, s.owner[1], failed=failed)

    def restored(self, s: State, kind: str, failed: int) -> Iterator[Change]:
        if kind == "Restored":
            s = to(to(s, MigrationStep.RESUMING), MigrationStep.FINISHING)
            yield "finish", ask(s, s.source, "Settle", s.m, what="finish")
        elif kind == SILENCE:
            if s.owner[2]:
                yield "again", self.restore(s, max(1, failed))
            else:
                yield "return", self.return_(to(s, MigrationStep.RETURNING), False)
        elif kind == "NotFound":
            if s.owner[2]:
                yield "lost", over(s, MigrationStep.LOST)
            else:
                yield "return", self.return_(to(s, MigrationStep.RETURNING), True)
        else:
            s, dies = self.committing(s, s.destination, True)
            yield from dies
            if failed + 1 < ATTEMPTS:
                yield "again", self.restore(s, failed + 1)
                return
            passing = s._replace(tried=s.tried | {s.destination})
            if s.surveyed and self.spare(passing):
                yield (
                    "to a spare",
                    ask(
                        passing,
                        self.spare(passing),
                        "Reserve",
                        s.m,
                        s.owner[1] + 1,
                        s.destination,
                        what="spare",
                    ),
                )
            yield "return", self.return_(to(s, MigrationStep.RETURNING), False)

    def spare(self, s: State) -> str:
        return next((n for n, _ in s.hosts if n != s.source and n not in s.tried), "")

    def forwarded(self, s: State, kind: str) -> Iterator[Change]:
        if kind == "Frozen":
            after, dies = self.committing(s, self.spare(s), False)
            yield from dies
            if after is not s:
                yield "commit", self.restore(after._replace(destination=self.spare(s)))
                return
        yield "return", self.return_(to(s, MigrationStep.RETURNING), False)

    def return_(self, s: State, gone: bool) -> State:
        what = "known" if s.owner[0] == s.source else "look"
        return ask(s, s.source, "Settle", s.m, what=what, gone=gone)

    def looked(self, s: State, state: str, gone: bool) -> Iterator[Change]:
        """The source has said what it has, before it was to become the owner."""
        if state == "held":
            after, dies = self.committing(s, s.source, False)
            yield from dies
            if after is s:  # it was granted meanwhile
                yield "again at the destination", self.restore(s)
            else:
                yield "pass back", self.return_(after, gone)
        elif state == "unknown" or not (gone or (s.owner[2] and not self.p.granted_is_waited_for)):
            yield "again at the destination", self.restore(s)
        else:
            yield "lost", over(s, MigrationStep.LOST)

    def known(self, s: State, state: str, gone: bool) -> Iterator[Change]:
        """The source, which owns it, has said what it has."""
        if state in ("runs", "ended"):
            yield "returned", over(s, MigrationStep.FAILED)
        elif state == "held" or (
            state == "unknown" and (s.owner[2] or (gone and self.p.lost_for_sure))
        ):
            yield "again", self.return_(s, gone)
        elif gone or s.owner[2]:
            yield "lost", over(s, MigrationStep.LOST)
        else:
            s, dies = self.committing(s, s.destination, False)
            yield from dies
            yield "passed on", self.restore(s)

    # ---- a restart -----------------------------------------------------------------------------

    def restart(self, s: State) -> State:
        """A new orchestrator, with the journal of the one that died. Hosts may report first."""
        host, epoch, granted = s.owner
        step, destination = s.step, s.destination
        if host not in (s.source, destination):
            destination = host
        if host == destination and step in self.p.committed_from:
            step = MigrationStep.COMMITTED
        released = step is MigrationStep.ROLLING_BACK and self.p.perhaps_released
        if released and not dict(s.hosts)[s.source].copy:  # it may have run, and died since
            s = s._replace(forgiven=True)
        return s._replace(
            owner=(host, epoch, granted and self.p.granted_is_kept),
            step=step,
            destination=destination,
            released=released,
            tried=frozenset(),
            surveyed=False,
            wait=Wait("take up"),
        )

    def take_up(self, s: State) -> State:
        if s.step in (MigrationStep.RESUMING, MigrationStep.FINISHING):
            return ask(to(s, MigrationStep.FINISHING), s.source, "Settle", s.m, what="finish")
        if s.step is MigrationStep.RETURNING and self.p.return_goes_on:
            return self.return_(s, False)
        if s.owner[0] != s.source:
            return self.restore(s._replace(step=MigrationStep.RESTORING))
        if s.step is MigrationStep.FREEZING and self.p.look_after_restart:
            return self.goes_on(s._replace(maybe=True))
        maybe = s.step is MigrationStep.ROLLING_BACK
        return self.roll_back(s._replace(maybe=maybe, step=MigrationStep.ROLLING_BACK))

    # ---- what agents ask -----------------------------------------------------------------------

    def ruled(self, s: State, claim: Message) -> State:
        _, _, m, side, host, epoch, boot_id, attempt, ready, settle = claim
        has_ended = m < s.m or s.step is None
        step = s.step if not has_ended else s.ends[m - 1]
        key = (side, host, epoch, s.owner, step)
        ruling = self._rules.get(key)
        if ruling is None:
            ruling = self.p.rule(Side(side), host, epoch, Owner(*s.owner), step)
            self._rules[key] = ruling
        if s.ended:
            ruling = Ruling.END
        if ruling is Ruling.RUN and not ready:
            ruling = Ruling.WAIT
        if ruling is Ruling.RUN:
            if s.owner[0] != host:
                raise Violation(f"{host} is to run what is {s.owner}")
            now = dict(s.hosts)[host]
            died = now.boot_id != boot_id and not now.copy and not now.arrivals
            # Having asked, it died: whether it was heard nobody can know.
            s = s._replace(owner=(*s.owner[:2], True), forgiven=s.forgiven or died)
            if side == "leaving" and m == s.m and s.step is not None:
                s = s._replace(released=True)
        late = attempt and s.owner[1] > epoch
        if ruling is Ruling.WAIT and not settle and not late:
            return s  # it asks again
        return send(s, host, "Ruled", m, side, boot_id, attempt, ruling.value, s.owner[1], settle)
