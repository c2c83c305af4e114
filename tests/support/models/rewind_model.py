# SPDX-License-Identifier: Apache-2.0
"""Snapshots, rewinds and suspensions: all that may happen next, and what must hold.

The rules are those of ownership.py themselves. What the orchestrator and the hosts do stands in
rewind_snapshots.py, rewind_orchestrator.py, rewind_hosts.py and rewind_orders.py. What makes it
sound can be switched off (:class:`Safeguards`).

A move of one capsule may be under way (rewind_moves.py), and the images of a suspended job go on to
second hosts (rewind_copies.py). Not in the model: the job's own end, memory that runs out, and the
choice among several holders: one host without a capsule of the job holds all images, or the hosts
of the two capsules hold them for each other.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from exploring import Violation
from rewind_moves import Moves
from rewind_orchestrator import Orchestrator
from rewind_orders import Orders
from rewind_state import (
    CAPSULES,
    DEAD,
    UP,
    Answers,
    Change,
    Faults,
    Host,
    Message,
    Safeguards,
    State,
    at,
    is_kept,
    is_protected,
    named,
    put,
    put_copy,
    running,
    spend,
)


class RewindModel(Orchestrator, Orders, Moves):
    def __init__(self, safeguards: Safeguards) -> None:
        self.p = safeguards
        self.trying = ""
        self.forgave = 0
        """How many states were seen in which the job is lost, as it may be."""

    def take(self, s: State, message: Message) -> Answers:
        name, _, kind, *body = message
        answers: Answers = getattr(self, f"take_{kind}")(s, name, *body)
        return answers

    def changes(self, s: State) -> Iterator[Change]:
        """All that may happen next. Raises Violation, with what was tried in ``trying``."""
        for label, after in self._changes(s):
            self.trying = label
            yield label, self.after(after)

    def _changes(self, s: State) -> Iterator[Change]:
        self.trying = "what the orchestrator does"
        yield from self.orchestrator(s)
        yield from self.moves(s)
        for name, host in named(s):
            self.trying = f"what {name} does by itself"
            yield from self.host(s, name, host)
        yield from self.late(s)
        yield from self.dying(s)

    def late(self, s: State) -> Iterator[Change]:
        for message in s.net:
            name, life, kind, *body = message
            if (at(s, name).state, at(s, name).life) == (UP, life):
                self.trying = f"{name} carries out {kind} {body}"
                for _, after in self.take(s._replace(net=s.net - {message}), message):
                    yield self.trying, after

    def dying(self, s: State) -> Iterator[Change]:
        if s.faults.orchestrator and (s.taking or s.rewinding or s.copying):
            yield "the orchestrator dies", self.new_orchestrator(spend(s, "orchestrator"))
        for name, h in named(s):
            if h.state is DEAD:
                continue
            if s.faults.agents:
                yield f"the agent of {name} dies", self.new_agent(spend(s, "agents"), name)
            if s.faults.cuts and h.state is UP:
                yield f"{name} is cut off", self.cut(spend(s, "cuts"), name, h)
            if s.faults.hosts:
                dead = put(spend(s, "hosts"), name, Host(life=h.life, state=DEAD))
                yield f"host {name} dies", dead._replace(losses=s.losses | {name})

    # ---- what must hold ------------------------------------------------------------------------

    def after(self, s: State) -> State:
        """Let the copies that run send and receive, and check the state."""
        copies = running(s)
        if s.taking is not None:
            for c, name, copy in copies:
                hears = copy.session is None and s.ran_on - {c}
                if hears and copy.past != s.taking.number:
                    s = put_copy(s, name, c, copy._replace(past=s.taking.number))
        sent = {(c, name, at(s, name).rewinds, copy.rewinds) for c, name, copy in copies}
        s = s._replace(frames=s.frames | sent, net=self.living(s))
        self.check_copies(s)
        self.check_frames(s)
        self.check_halves(s)
        if s.suspended and s.rewinds in self.progress(s):
            raise Violation("the job trains while it is suspended")
        return self.check_job(s)

    def living(self, s: State) -> frozenset[Message]:
        return frozenset(m for m in s.net if at(s, m[0]).life == m[1])

    def check_copies(self, s: State) -> None:
        new = [(c, name, copy) for c, name, copy in running(s) if copy.rewinds == s.rewinds]
        for c, name, copy in new:
            if (name, copy.epoch) != s.owners[c][:2]:
                raise Violation(f"{c} runs on {name}, and {s.owners[c]} owns it")
        if s.rewinds and len({copy.generation for _, _, copy in new}) > 1:
            raise Violation("copies of two snapshots run together")

    def check_frames(self, s: State) -> None:
        """No copy hears a frame of another count, however long the frame was on its way."""
        for c, name, copy in running(s):
            h = at(s, name)
            for other, sender, wire_id, rewinds in s.frames:
                if other == c or rewinds == copy.rewinds or h.book[other][0] != sender:
                    continue
                if wire_id == h.rewinds or not self.p.wire_id:
                    raise Violation(f"{c} on {name} hears {other} of before a rewind")

    def progress(self, s: State) -> list[int]:
        """The counts whose copies are all there and hear one another, so that they train."""
        by_count: dict[int, dict[int, str]] = {}
        for c, name, copy in running(s):
            by_count.setdefault(copy.rewinds, {})[c] = name
        return [
            rewinds
            for rewinds, where in by_count.items()
            if len(where) == len(CAPSULES)
            and all(
                at(s, where[a]).book[b][0] == where[b]
                and at(s, where[a]).rewinds == at(s, where[b]).rewinds
                for a, b in itertools.permutations(CAPSULES, 2)
            )
        ]

    def check_halves(self, s: State) -> None:
        if len(self.progress(s)) > 1:
            raise Violation("the job trains twice")

    def check_job(self, s: State) -> State:
        owned = all(
            ((copy := at(s, o.host).copies[c]) is not None and copy.rewinds == s.rewinds)
            or (s.moving and at(s, o.host).coming[c] is not None)
            for c, o in enumerate(s.owners)
        )
        if owned or is_kept(s) or s.forgiven:
            return s
        if len(s.losses) > 1:
            self.forgave += 1
            return s._replace(forgiven=True)
        raise Violation("the job is lost, and at most one host is")

    # ---- without faults ------------------------------------------------------------------------

    def calm(self, s: State) -> list[State]:
        """What must come to rest once faults stop, with what is in flight carried out or lost."""
        quiet = s._replace(faults=Faults(snapshots=0))
        return [quiet, quiet._replace(net=frozenset())]

    def next_in_peace(self, s: State, asked: State | None) -> Change:
        """What happens next when nothing fails. An empty label: nothing."""
        for label, after in self._in_peace(s):
            after = self.after(after)
            if after != s:
                return label, after
        return "", s

    def _in_peace(self, s: State) -> Iterator[Change]:
        for name, h in named(s):
            if h.state is not UP:
                yield next(self.host(s, name, h))
        yield from self.late(s)
        for name, h in named(s):
            yield from self.host(s, name, h)
        yield from self.orchestrator(s)
        yield from self.moves(s)
        if not (is_protected(s) or s.forgiven):
            yield from self.begin(s._replace(faults=Faults(snapshots=1)))

    def at_rest(self, s: State) -> str | None:
        """What is wrong with a state in which nothing happens any more."""
        if s.forgiven:
            return None
        if s.moving:
            return "its move is not over"
        if s.rewinding or s.taking or s.suspended:
            return "it stays in a rewind, in a snapshot or suspended"
        if len(running(s)) != len(CAPSULES) or s.rewinds not in self.progress(s):
            return "it does not train"
        if any(copy.session for _, _, copy in running(s)):
            return "a capsule stays locked"
        if not is_protected(s):
            return "no snapshot protects it"
        assert s.newest is not None
        for h in s.hosts:
            if any(h.coming) or h.removing or any(c and c.promised for c in h.copies):
                return "something of a move or a rewind is left behind"
            if any(i.number != s.newest.number for i in h.held):
                return "an earlier image is left behind"
        return None
