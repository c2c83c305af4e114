# SPDX-License-Identifier: Apache-2.0
"""The timeouts: all are derived from one number, and rules limit them.

During a move a job waits for the moved rank until the timeout of its own process groups. A person
sets that number as ``collective``. Half of it is ``standstill``, the longest downtime: the time
that a move may keep the job frozen before it is undone. The other half is for undoing it. All other
numbers follow from these two, and :data:`RULES` says what each must fit into.

``docs/configuration.md`` explains the timeouts; ``liveshift config validate`` prints a cluster's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from msgspec import Meta

from .values import LONGEST_S, SHORTEST_S, Seconds

TCP_GIVES_UP_S = 924.6
"""The kernel of a rank's peer ends a connection after so many seconds without acknowledgements
(Linux's ip-sysctl: tcp_retries2 = 15), even if the peer's process group would wait longer. Measured
on Linux 6.18: EHOSTUNREACH after 925.6 s behind a lock as network_lock.lock sets it."""

LONGEST_STANDSTILL_S = 600.0
"""A move's downtime is at most this many seconds. That leaves a third of TCP_GIVES_UP_S to undo a
move."""

_STANDSTILL = Meta(ge=SHORTEST_S, le=LONGEST_STANDSTILL_S)

DERIVED: Any = None
"""A marker for a number that was not given; Timeouts replaces it by the derived number."""


@dataclass(frozen=True)
class Derivation:
    """One deadline, and how it is derived from another one (``base``) if it is not given."""

    base: str | None
    text: str
    derive: Callable[[float], float]


DERIVATIONS: Mapping[str, Derivation] = {
    "collective": Derivation(None, "default", lambda _: 600.0),
    "standstill": Derivation(
        "collective",
        f"collective / 2, at most {LONGEST_STANDSTILL_S:g}",
        lambda collective: min(collective / 2, LONGEST_STANDSTILL_S),
    ),
    "freeze": Derivation("standstill", "2/5 of standstill", lambda standstill: 0.4 * standstill),
    "restore": Derivation("standstill", "2/5 of standstill", lambda standstill: 0.4 * standstill),
    "gpu_lock": Derivation(
        "freeze", "freeze / 6, at most 30", lambda freeze: min(30.0, freeze / 6)
    ),
    "quiesce": Derivation(
        "standstill",
        "standstill / 20, from 1 to 30",
        lambda standstill: min(30.0, max(1.0, standstill / 20)),
    ),
    "prepare": Derivation(
        "collective",
        "collective / 10, from 60 to 600",
        lambda collective: min(600.0, max(60.0, collective / 10)),
    ),
    "precopy": Derivation("prepare", "10 × prepare", lambda prepare: 10 * prepare),
    "suspicion": Derivation(
        "collective",
        "collective / 120, from 1 to 10",
        lambda collective: min(10.0, max(1.0, collective / 120)),
    ),
    "heartbeat": Derivation("suspicion", "suspicion / 5", lambda suspicion: suspicion / 5),
    "fault": Derivation(
        "suspicion", "suspicion, at least 5", lambda suspicion: max(5.0, suspicion)
    ),
    "grace": Derivation(None, "default", lambda _: 10.0),
}
"""Each deadline comes after the one that it is derived from. The phases prepare and precopy may be
slow, because the job trains meanwhile; their deadlines only ensure that a move ends. A wait of more
than 10 s for a silent host gains nothing, and below 1 s a busy host would count as lost. A rank
whose peer has died takes a second or two until its command has ended, whatever the network."""


@dataclass(frozen=True)
class Rule:
    """The sum of the terms, each multiplied by its count, must not exceed the bound."""

    terms: Mapping[str, int]
    bound: str
    why: str

    def total(self, values: Mapping[str, float]) -> float:
        return sum(count * values[name] for name, count in self.terms.items())

    def holds(self, values: Mapping[str, float]) -> bool:
        return self.total(values) <= values[self.bound] * (1 + 1e-9)


_IN_TIME = "a wait for a silent host ends by the silence, not by its own deadline"

RULES = (
    Rule({"heartbeat": 3}, "suspicion", "a host whose heartbeat is late once or twice is not lost"),
    Rule({"suspicion": 2}, "prepare", _IN_TIME),
    Rule({"suspicion": 2}, "precopy", _IN_TIME),
    Rule({"suspicion": 2}, "freeze", _IN_TIME),
    Rule({"suspicion": 2}, "restore", _IN_TIME),
    Rule(
        {"gpu_lock": 2}, "freeze", "a process is locked twice, and its image still has to be sent"
    ),
    Rule(
        {"freeze": 1, "restore": 1, "suspicion": 3},
        "standstill",
        "both answers and the commit between them may each be late by one suspicion",
    ),
    Rule(
        {"quiesce": 1, "standstill": 1, "suspicion": 4},
        "collective",
        "ranks wait for the boundary too, and undoing a move takes up to 4 requests, each answered "
        "within one suspicion",
    ),
)


def effective(given: Mapping[str, float], unknown: Collection[str] = ()) -> dict[str, float]:
    """Every number, given or derived. A number that is ``unknown``, or derived from one, is left
    out."""
    values: dict[str, float] = {}
    for name, how in DERIVATIONS.items():
        if name in given:
            values[name] = given[name]
        elif name not in unknown and (how.base is None or how.base in values):
            values[name] = how.derive(values[how.base] if how.base else 0.0)
    return values


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """The deadlines in effect, in seconds. Those that are not given are derived (DERIVATIONS).

    :func:`breaches`, which the cluster file calls, checks whether they fit together.
    ``dataclasses.replace`` would treat every number as given: use :meth:`under` instead.
    """

    collective: Seconds = DERIVED  # the job's own: ranks give up after it
    standstill: Annotated[float, _STANDSTILL] = DERIVED  # a move may freeze the job for so long
    freeze: Seconds = DERIVED  # lock, dump, ship: the job is frozen
    restore: Seconds = DERIVED  # the job is frozen
    gpu_lock: Seconds = DERIVED  # the driver's lock of one CUDA process
    quiesce: Seconds = DERIVED  # one attempt to find a boundary
    prepare: Seconds = DERIVED  # survey, preflight, sandbox: the job trains
    precopy: Seconds = DERIVED  # the pre-copy: the job trains
    suspicion: Seconds = DERIVED  # a host that is silent for so long counts as lost
    heartbeat: Seconds = DERIVED  # between two heartbeats of an agent
    fault: Seconds = DERIVED  # a command that fails so shortly before or after a fault fails of it
    grace: Seconds = DERIVED  # between SIGTERM and SIGKILL; no deadline of a move
    given: dict[str, float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        given = {name: value for name in DERIVATIONS if (value := getattr(self, name)) is not None}
        object.__setattr__(self, "given", given)
        for name, value in effective(given).items():
            object.__setattr__(self, name, value)

    @property
    def values(self) -> dict[str, float]:
        """All deadlines by name."""
        return {name: getattr(self, name) for name in DERIVATIONS}

    def answer(self, deadline: float) -> float:
        """Seconds to wait for the answer of an agent that itself keeps to ``deadline``."""
        return deadline + self.suspicion

    @property
    def unlike_derived(self) -> dict[str, float]:
        """The deadlines that differ from what would be derived from the others."""
        values = self.values
        return {
            name: values[name]
            for name, how in DERIVATIONS.items()
            if values[name] != how.derive(values[how.base] if how.base else 0.0)
        }

    def under(self, collective: float) -> Timeouts:
        """The deadlines for ranks with another timeout; those not given are derived from it.

        Two numbers stay, because agents send heartbeats, and are suspected, alike for every job.
        The phases in which a job trains stay as well.
        """
        same = ("suspicion", "heartbeat", "prepare", "precopy", "grace")
        kept = self.given | {name: self.values[name] for name in same}
        return Timeouts(**(kept | {"collective": collective}))


@dataclass(frozen=True)
class Breach:
    """A given number that breaks a rule.

    ``limit``: the least (or greatest) value that would do; None when no change of this number alone
    is enough. ``collective``: the least ``collective`` that would do as well; None where none
    does. ``derived``: the numbers of the rule if none of them was given.
    """

    name: str
    limit: float | None
    at_least: bool
    collective: float | None
    derived: str
    reason: str

    @property
    def expected(self) -> str:
        """The value that would do, and the rule with all of its numbers."""
        if self.limit is None:
            text = f"{'more' if self.at_least else 'less'}, or left out: then {self.derived}"
        else:
            text = f"{'at least' if self.at_least else 'at most'} {self.limit:g}"
        if self.collective is not None and self.name != "collective":
            text += f" (or timeouts.collective at least {self.collective:g})"
        return f"{text}: {self.reason}"


def breaches(
    given: Mapping[str, float],
    unknown: Collection[str] = (),
    place: Callable[[str], str] = "timeouts.{}".format,
    blame: str | None = None,
) -> list[Breach]:
    """The worst breach for each number that has to change.

    ``place`` returns where a given number is written. A rule with an ``unknown`` number, which
    could not be read, is skipped. The number to change is ``blame``; without it the bound of the
    broken rule, its largest term, or a number from which these are derived.
    """
    values = effective(given, unknown)
    worst: dict[tuple[str, bool], Breach] = {}
    for rule in RULES:
        if {rule.bound, *rule.terms} <= values.keys() and not rule.holds(values):
            found = _breach(rule, given, values, place, blame)
            key = found.name, found.at_least
            if key not in worst or _worse(found, worst[key]):
                worst[key] = found
    return list(worst.values())


def _breach(
    rule: Rule,
    given: Mapping[str, float],
    values: Mapping[str, float],
    place: Callable[[str], str],
    blame: str | None,
) -> Breach:
    def described(name: str) -> str:
        source = place(name) if name in given else DERIVATIONS[name].text
        return f"{name} {values[name]:g} ({source})"

    parts = [(f"{n} × " if n > 1 else "") + described(name) for name, n in rule.terms.items()]
    reason = (
        f"{' + '.join(parts)} = {rule.total(values):g} must fit into {described(rule.bound)}, "
        f"since {rule.why}"
    )
    chosen = [n for n in (*rule.terms, rule.bound) if n in given]
    without = effective({n: value for n, value in given.items() if n not in chosen})
    derived = ", ".join(f"{n} is {without[n]:g}" for n in chosen)
    by_size = sorted(rule.terms, key=lambda name: -rule.terms[name] * values[name])
    # If no number of the rule was given, a number from which they are derived must change.
    candidates = [n for n in (rule.bound, *by_size, *reversed(list(DERIVATIONS))) if n in given]
    patience = _limit(rule, "collective", True, given)
    for name in [blame] if blame else candidates:
        for at_least in (True, False):
            limit = _limit(rule, name, at_least, given)
            if limit is not None:
                return Breach(name, limit, at_least, patience, derived, reason)
    name = blame or candidates[0]
    return Breach(name, None, name not in rule.terms, patience, derived, reason)


def _worse(one: Breach, other: Breach) -> bool:
    if one.limit is None or other.limit is None:
        return one.limit is None
    return one.limit > other.limit if one.at_least else one.limit < other.limit


def _limit(rule: Rule, name: str, at_least: bool, given: Mapping[str, float]) -> float | None:
    """The least (or greatest) value of a number with which the rule holds, the other given numbers
    unchanged; None where there is none. Every rule is monotonic in every number."""

    def holds(value: float) -> bool:
        return rule.holds(effective({**given, name: value}))

    low, high = SHORTEST_S, LONGEST_STANDSTILL_S if name == "standstill" else LONGEST_S
    if not holds(high if at_least else low):
        return None
    for _ in range(60):  # each pass halves the logarithm of the ratio
        middle = math.sqrt(low * high)
        if holds(middle) is at_least:
            high = middle
        else:
            low = middle
    # Three digits, rounded to the side on which the rule holds.
    step = 10.0 ** (math.floor(math.log10(high)) - 2)
    steps = math.ceil(high / step - 1e-6) if at_least else math.floor(low / step + 1e-6)
    return steps * step
