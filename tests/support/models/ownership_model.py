# SPDX-License-Identifier: Apache-2.0
"""The migration protocol as a small state machine: all that may happen next, and what must hold.

The rules are ownership.rule and ownership.may_pass, the steps those of steps.ALLOWED, themselves;
the rest tells what the orchestrator (model_orchestrator.py) and the hosts (model_hosts.py) do.
What :class:`Protocol` can switch off are the things that make it sound, so that the tests can see
the model bite.

Not in the model: clocks (whatever waits may stop waiting at any time), the job's own end, and
what is done to a copy without a migration (``is_stray``).
"""

from __future__ import annotations

from collections.abc import Iterator

from exploring import Violation
from model_hosts import Hosts
from model_orchestrator import FITS, Orchestrator
from model_state import (
    Budget,
    Change,
    Host,
    Message,
    State,
    put,
    reachable,
    spend,
    unheard,
)

from liveshift.runtime.model.ownership import BEFORE_COMMIT
from liveshift.runtime.model.steps import MigrationStep


class Model(Orchestrator, Hosts):
    trying = ""

    def changes(self, s: State) -> Iterator[Change]:
        """All that may happen next. Raises Violation, with what was tried in ``trying``."""
        for label, after in self._changes(s):
            self.trying = label
            yield label, self.tidy(self.check(s, after))

    def _changes(self, s: State) -> Iterator[Change]:
        self.trying = "what it does by itself"
        yield from self.orchestrator(s)
        for name, host in s.hosts:
            self.trying = f"what {name} does by itself"
            yield from self.agent(s, name, host)
            yield from self.claims(s, name, host)
        for message in s.net:
            self.trying = f"taken: {message}"
            for label, after in self.deliver(s, message):
                yield label, after._replace(net=after.net - {message} | (after.net - s.net))
                if s.budget.doubles:
                    yield "twice: " + label, spend(after, "doubles")
        yield from self.deaths(s)

    def deliver(self, s: State, message: Message) -> Iterator[Change]:
        name, kind, *body = message
        if name != "O":
            host = dict(s.hosts)[name]
            for after in getattr(self, "take_" + kind.lower())(s, name, host, *body):
                yield f"{name} takes {kind} {body}", after
        elif kind == "Claim":
            yield f"ruled: {message[2:6]}", self.ruled(s, message)
        else:
            number, what, value = body
            fits = what in FITS.get(s.wait.what, ())
            if fits and (s.wait.ask == number or not self.p.matched):
                for label, after in self.answered(s, what, value):
                    yield f"{what} {value}: {label}", after
            else:
                yield "late answer", s

    def deaths(self, s: State) -> Iterator[Change]:
        if s.budget.orchestrator and s.step is not None:
            yield "the orchestrator dies", self.restart(spend(s, "orchestrator"))
        for name, host in s.hosts:
            heard = unheard(s, name) if self.p.asked_of_a_life else s
            if s.budget.agents and (host.copy or host.arrivals):
                self.trying = f"the agent of {name} dies"
                yield self.trying, self.new_agent(spend(heard, "agents"), name, host)
            if s.budget.hosts and (host.copy or host.arrivals):
                after = put(spend(heard, "hosts"), name, Host(boot_id=host.boot_id + 1))
                had = host.fresh or any(a.fresh for a in host.arrivals)
                if self.may_run(s, name, host) or (had and not reachable(after)):
                    after = after._replace(forgiven=True)
                yield f"host {name} dies", after

    def may_run(self, s: State, name: str, host: Host) -> bool:
        """Whether it may run there for all that the orchestrator can know: it was told to. A
        promise takes that back, as long as it was not told to run again."""
        rolling_back = s.step is MigrationStep.ROLLING_BACK and not s.released
        waits = host.copy == "promised" and (s.step in BEFORE_COMMIT or rolling_back)
        return s.owner[0] == name and s.owner[2] and not waits

    def tidy(self, s: State) -> State:
        """Without messages that can have no effect any more."""
        if not self.p.matched:
            return s
        hosts, wanted = dict(s.hosts), s.wait.ask
        gone = []
        for x in s.net:
            kind = x[1]
            if kind == "Answer":
                useless = x[2] != wanted
            elif kind == "Settle":
                useless = x[2] not in (wanted, 0)
            elif kind == "Ruled":
                useless = x[4] != hosts[x[0]].boot_id
            elif kind == "Claim":
                useless = not x[8] and x[6] != hosts[x[4]].boot_id
            else:
                continue
            if useless:
                gone.append(x)
        return s._replace(net=s.net.difference(gone)) if gone else s

    # ---- without faults ------------------------------------------------------------------------

    def calm(self, s: State) -> Iterator[State]:
        for start in (s, s._replace(net=frozenset())):
            yield self.tidy(start)._replace(budget=Budget(moves=0))

    def next_in_peace(self, s: State, asked: State | None) -> Change:
        """What happens next when nothing fails: what is in flight first, then a heartbeat, then
        the end of somebody's patience. An empty label: nothing."""
        for message in sorted(s.net, key=str):
            for label, after in self.deliver(s, message):
                after = after._replace(net=after.net - {message} | (after.net - s.net))
                return label, self.tidy(self.check(s, after))
        quiet = s._replace(budget=Budget(moves=0))
        for label, after in self.orchestrator(quiet):
            return label, self.tidy(self.check(s, after))
        for name, host in quiet.hosts:
            for label, after in self.agent(quiet, name, host):
                return label, self.tidy(self.check(s, after))
        if s != asked:  # else nothing has come of the last heartbeat
            for name, host in s.hosts:
                for _, after in self.claims(s, name, host):
                    s = after
            return "agents ask", s
        for label, after in self.unanswered(s) if s.wait.what else ():
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
