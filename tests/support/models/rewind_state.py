# SPDX-License-Identifier: Apache-2.0
"""Snapshots and rewinds as a small state machine: what a state of it is, and its small changes.

One job of two capsules, one orchestrator, and two to four hosts: each of two has a capsule, and
the third holds the images, or these two hold each other's (:func:`neighbours`). An order and its
answer are one step, so orders to different hosts come in any sequence. An order whose answer is
lost (a fault) stays in ``net``: it may be carried out at any later time, or never, and its answer
counts no more. A host can lose its power, or be cut off from the orchestrator while its capsules
still hear all others; both can end again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from liveshift.runtime.model import ownership
from liveshift.runtime.model.ownership import Ruling
from liveshift.runtime.model.steps import MigrationStep

T = TypeVar("T")

CAPSULES = (0, 1)
MOVED = 1  # the one that may be in a move, from B to D
NAMES = "ABCD"
UP, CUT, DEAD = "up", "cut off", "dead"
SILENCE = "silence"
DONE, REFUSED = "done", "refused"


class Rule(Protocol):
    def __call__(
        self,
        side: ownership.Side,
        host: str,
        epoch: int,
        owner: ownership.Owner,
        step: MigrationStep | None,
        *,
        copy_rewinds: int,
        job_rewinds: int,
    ) -> Ruling: ...


@dataclass(frozen=True)
class Safeguards:
    """Each field: one thing on which snapshots and rewinds rest. Tests switch them off."""

    rule: Rule = ownership.rule
    rule_held: Callable[[int, int, int], Ruling] = ownership.rule_held
    # a snapshot
    all_locked_first: bool = True  # no capsule is dumped before all of them have answered the lock
    dump_only_if_locked: bool = True  # a source that has thawed refuses to dump
    keeps_earlier: bool = True  # the next snapshot does not overwrite the one before
    based: bool = True  # a source leaves out only what is in the snapshot that the holder has whole
    digest: bool = True  # the holder compares its pages with the source's
    same_rewinds: bool = True  # a snapshot fails if the job was rewound while it was taken
    numbers_grow: bool = True  # no number is used again, not after a restart either
    # a snapshot that the hosts of the job hold for each other
    own_stays: bool = True  # the capsule's own host holds a second copy of its image
    same_base: bool = True  # all pages go to both, if they stand at different snapshots
    names_whole: bool = True  # the write names no host whose copy is not whole
    never_weaker: bool = True  # one with two copies of each image stays if the next one has fewer
    # a rewind
    one_heard: bool = True  # one host of the job answers when it is rewound
    halved: bool = True  # nothing is restored before one earlier copy has certainly ended
    images_seen: bool = True  # the holder says that it has all images before the rewind is written
    one_write: bool = True  # one durable write for all capsules
    recorded: bool = True  # a restarted orchestrator goes on with the rewind
    plus: int = ownership.REWIND_EPOCHS  # what a rewind adds to an epoch
    end_first: bool = True  # no sandbox on a host before its earlier copies have ended
    answers_when_removed: bool = True  # a host answers only once these are removed
    ends_by_count: bool = True  # a host ends only copies of an earlier count
    ends_by_itself: bool = True  # a host ends these before it takes part in the new count
    overtakes: bool = True  # its write ends a move, which does nothing more
    wire_id: bool = True  # each count has its own VXLAN id
    never_lower: bool = True  # a host does not go back to an earlier count
    # a suspension
    counted: bool = True  # it counts as a rewind, so that every copy of before it must end
    kept_stays: bool = True  # an order to begin a copy anew removes none that was kept


class Session(NamedTuple):
    """What a source has open for a snapshot; its capsule is locked."""

    number: int
    holders: tuple[str, ...]  # a second one is this host itself
    way: int  # 0: all pages go. Else only those written since that snapshot
    base: int  # the snapshot at which the holders' stores are; 0 if one is empty, or they differ
    dumped: bool = False


class Copy(NamedTuple):
    """A capsule on a host; it runs unless a move or a session holds it."""

    rewinds: int
    epoch: int
    generation: int = 0  # the snapshot from which it was restored
    promised: bool = False  # frozen by a move that has failed since; asks for a ruling
    session: Session | None = None
    past: int = 0  # it may have heard what another did after its image of this snapshot
    sent: tuple[str, int] = ("", 0)  # holder and snapshot that have all that the tracker sent


class Coming(NamedTuple):
    """A sandbox for a capsule, and perhaps its image or a restored tree."""

    of_rewind: bool  # else of a move that has failed
    rewinds: int
    epoch: int
    generation: int = 0
    complete: bool = False
    ready: bool = False  # a restored tree that waits for a ruling


class Image(NamedTuple):
    """A capsule's image at a holder."""

    number: int
    capsule: int
    complete: bool = False
    good: bool = False  # its pages are those of the capsule
    cut: bool = False  # it has nothing of what others did after their images
    kept: bool = False  # its pages were compared with those of its source


class Host(NamedTuple):
    life: int = 1  # of its agent; orders to an earlier one are lost
    state: str = UP
    rewinds: int = 0  # the highest count that it knows: the VXLAN id of its device
    book: tuple[tuple[str, int], ...] = (("", 0), ("", 0))
    copies: tuple[Copy | None, ...] = (None, None)
    coming: tuple[Coming | None, ...] = (None, None)
    removing: frozenset[int] = frozenset()  # by the capsule's name, in the background
    held: frozenset[Image] = frozenset()
    over: int = 0  # the last snapshot whose session is over here


class Owned(NamedTuple):
    host: str
    epoch: int
    granted: bool


Holders = tuple[tuple[str, ...], ...]
"""Of each capsule: the host that holds its image, and perhaps its own host."""


class Generation(NamedTuple):
    number: int
    rewinds: int
    holders: Holders


class Taking(NamedTuple):
    """The snapshot that the orchestrator takes, and what has been answered."""

    number: int
    rewinds: int
    owners: tuple[Owned, ...]
    holders: Holders
    bases: tuple[int, ...] = (0, 0)
    held: int = 0  # so many of the orders to hold have been answered
    checked: int = 0  # and so many of those to compare digests
    without: frozenset[int] = frozenset()  # capsules whose own hosts have no copy
    locked: frozenset[int] = frozenset()
    dumped: frozenset[int] = frozenset()
    suspends: bool = False  # no source thaws after its dump, and the job is suspended with it


class Copying(NamedTuple):
    """The image of a suspended job that goes from its only holder to a second one."""

    number: int
    capsule: int
    first: str
    second: str
    sent: bool = False  # it has come as a whole


class Faults(NamedTuple):
    """How many may yet happen. ``snapshots`` and ``suspensions`` are no faults, but as rare."""

    orchestrator: int = 0
    agents: int = 0
    hosts: int = 0
    cuts: int = 0
    silences: int = 0
    doubles: int = 0
    failures: int = 0  # of a restore
    chunks: int = 0  # acknowledged, and lost
    copies: int = 0  # one that the capsule's own host gives up
    snapshots: int = 1
    suspensions: int = 0


class Cluster(NamedTuple):
    """What the hosts have room for. It does not change."""

    room: str = NAMES  # these hosts have memory for images
    neighbours: bool = False  # the job's own hosts hold its images where no other host can
    slots: int = 2  # of each host: so many capsules


Message = tuple[Any, ...]  # host, life, kind, …
Change = tuple[str, "State"]
Answers = list[tuple[str, "State"]]


class State(NamedTuple):
    # in the journal
    rewinds: int
    owners: tuple[Owned, ...]
    rewinding: bool
    before: frozenset[str]  # hosts on which all last ran, until one of them has ended its copy
    newest: Generation | None
    number: int  # of the last snapshot that was begun
    generation: int  # to which the job is rewound
    # in the orchestrator's memory
    taking: Taking | None
    ended: frozenset[str]  # hosts that have ended their earlier copies
    done: tuple[str, ...]  # of each capsule: "", reserved
    # the world
    hosts: tuple[Host, ...]
    net: frozenset[Message]
    faults: Faults
    ran_on: frozenset[int] = frozenset()  # capsules that run again after their image of `taking`
    frames: frozenset[tuple[int, str, int, int]] = frozenset()  # capsule, host, VXLAN id, rewinds
    losses: frozenset[str] = frozenset()  # hosts lost since the newest snapshot
    forgiven: bool = False  # more than one of them: the job may be lost
    suspended: bool = False  # in the journal: no host may run a capsule
    gone: bool = False  # a move has ended as no host has its capsule
    copying: Copying | None = None  # in the orchestrator's memory
    moving: MigrationStep | None = None  # of capsule 1 from B to D; a rewind ends it
    cluster: Cluster = Cluster()


def initial(faults: Faults, left: str = "", hosts: int = 3) -> State:
    """A job that runs and has one snapshot, on A and B; C holds it.

    ``left``: what a failed move of capsule 1 has left: "source" (the frozen tree on B, which may go
    on once it asks) or "destination" (a complete image on C, under the next epoch).
    """
    book = (("A", 1), ("B", 1))
    one = Copy(0, 1, sent=("C", 1))
    first = (
        Host(book=book, copies=(one, None)),
        Host(book=book, copies=(None, one._replace(promised=left == "source"))),
        Host(
            book=book,
            coming=(None, Coming(False, 0, 2, complete=True) if left == "destination" else None),
            held=frozenset(Image(1, c, True, True, True, True) for c in CAPSULES),
        ),
    )
    return State(
        rewinds=0,
        owners=(Owned("A", 1, True), Owned("B", 1, True)),
        rewinding=False,
        before=frozenset(),
        newest=Generation(1, 0, (("C",), ("C",))),
        number=1,
        generation=0,
        taking=None,
        ended=frozenset(),
        done=("", ""),
        hosts=(*first, *[Host(book=book)] * (hosts - len(first)))[:hosts],
        net=frozenset(),
        faults=faults,
    )


def waiting(faults: Faults) -> State:
    """The same job in a move of capsule 1 to D: it was let run there, and B has it frozen yet."""
    s = initial(faults, "source", hosts=4)
    book = (("A", 1), ("D", 2))
    s = s._replace(
        owners=(s.owners[0], Owned("D", 2, True)),
        hosts=tuple(host._replace(book=book) for host in s.hosts),
        moving=MigrationStep.RESTORING,
    )
    return put_coming(s, "D", 1, Coming(False, 0, 2, complete=True, ready=True))


def precopying(faults: Faults) -> State:
    """The same job in a move of capsule 1 to D, which has a sandbox: the job trains."""
    s = initial(faults, hosts=4)._replace(moving=MigrationStep.PRECOPYING)
    return put_coming(s, "D", 1, Coming(False, 0, 2))


def asleep(faults: Faults) -> State:
    """The same job, suspended: no copy of it is left, and C has the images."""
    s = initial(faults)
    owners = tuple(Owned(o.host, o.epoch + ownership.REWIND_EPOCHS, False) for o in s.owners)
    book = tuple((o.host, o.epoch) for o in owners)
    hosts = tuple(h._replace(rewinds=1, book=book, copies=(None, None)) for h in s.hosts)
    return s._replace(
        rewinds=1,
        owners=owners,
        suspended=True,
        ended=frozenset("AB"),
        losses=frozenset({"the job is suspended"}),
        hosts=hosts,
    )


def neighbours(faults: Faults, hosts: int, cluster: Cluster | None = None) -> State:
    """The same job, whose hosts hold its images for each other: A and B each have both. A third
    host has room for capsules only, unless ``cluster`` says something else."""
    s = initial(faults, hosts=hosts)
    for name, c, other in (("A", 0, "B"), ("B", 1, "A")):
        copy = at(s, name).copies[c]
        assert copy is not None
        s = put_copy(s, name, c, copy._replace(sent=(other, 1)))
        images = frozenset(Image(1, c, True, True, True, True) for c in CAPSULES)
        s = put(s, name, at(s, name)._replace(held=images))
    if hosts > 2:
        s = put(s, "C", at(s, "C")._replace(held=frozenset()))
    newest = Generation(1, 0, (("B", "A"), ("A", "B")))
    return s._replace(newest=newest, cluster=cluster or Cluster("AB", neighbours=True))


# ---- small steps -----------------------------------------------------------------------------


def named(s: State) -> list[tuple[str, Host]]:
    return list(zip(NAMES, s.hosts, strict=False))


def at(s: State, name: str) -> Host:
    return s.hosts[NAMES.index(name)]


def put(s: State, name: str, host: Host) -> State:
    here = NAMES.index(name)
    return s._replace(hosts=(*s.hosts[:here], host, *s.hosts[here + 1 :]))


def change(all_: tuple[T, ...], capsule: int, to: T) -> tuple[T, ...]:
    return (*all_[:capsule], to, *all_[capsule + 1 :])


def put_copy(s: State, name: str, capsule: int, copy: Copy | None) -> State:
    host = at(s, name)
    return put(s, name, host._replace(copies=change(host.copies, capsule, copy)))


def put_coming(s: State, name: str, capsule: int, coming: Coming | None) -> State:
    host = at(s, name)
    return put(s, name, host._replace(coming=change(host.coming, capsule, coming)))


def spend(s: State, fault: str) -> State:
    return s._replace(faults=s.faults._replace(**{fault: getattr(s.faults, fault) - 1}))


def has(s: State, holder: str, number: int, *capsules: int) -> bool:
    """Whether a host has kept the complete images of these capsules, wrong pages or not."""
    found = {i.capsule for i in at(s, holder).held if i.number == number and i.kept}
    return at(s, holder).state is not DEAD and found >= {*capsules}


def is_kept(s: State, without: str = "") -> bool:
    """Whether there is an image of each capsule on a host that lives, and is not ``without``."""
    return s.newest is not None and all(
        any(has(s, name, s.newest.number, c) for name in holders if name != without)
        for c, holders in enumerate(s.newest.holders)
    )


def is_protected(s: State) -> bool:
    """Whether the death of any one host leaves all capsules, or an image of each."""
    dangerous = [name for name, h in named(s) if any(h.copies) or any(h.coming)]
    return is_kept(s) and all(is_kept(s, name) for name in dangerous)


def running(s: State) -> list[tuple[int, str, Copy]]:
    """The copies whose tasks may run, if only behind a lock."""
    return [
        (c, name, copy)
        for name, host in named(s)
        for c, copy in enumerate(host.copies)
        if copy is not None and not copy.promised
    ]
