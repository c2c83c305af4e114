# SPDX-License-Identifier: Apache-2.0
"""The downtime of a move: predicted before the move, and measured afterwards.

A model of few terms gives each part of a downtime from what must be moved (:class:`Load`). Its
constants are this project's measurements on one machine (docs/measurements.md). Other machines are
faster or slower, so each part is multiplied by a factor from earlier moves of the cluster: the
median of measured over untaught. Moves of the same job are used where there are any.

If memory is copied while the job trains, the memory that the job writes meanwhile goes during the
freeze. In a round that sends D bytes at r bytes a second, a job that writes w bytes a second writes
D·w/r bytes. It also writes between two rounds, while the tracker looks and the ranks come to their
boundary (c seconds). So rounds shrink towards D = w·c / (1 - w/r), where w < r. Pages that are
written again count once, so D is at most what the job wrote in a look that lasted as long as such a
round.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from ... import units
from ...criu_glue.survey.found import Along, Footprint
from ..messages import Inspected, MigrationRow, Part, Prediction, Rounds, Writing
from ..model.link_rates import PAUSE_RATE
from ..model.steps import MigrationStep

PRECOPY, FULL_DUMP = "pre-copy", "full dump"

QUIESCE_S = 0.01
"""The ranks are at the boundary, with their communicators taken down, after this many seconds."""
LOCK_S = 0.003
DUMP_S, DUMP_TASK_S, DUMP_MAPPING_S = 0.02, 0.002, 100e-6
RESTORE_S, RESTORE_TASK_S, RESTORE_MAPPING_S = 0.015, 0.001, 20e-6
"""A restore takes this many seconds for CRIU's own start, for each process, and for each
mapping."""
DUMP_THREAD_S, RESTORE_THREAD_S, RELEASE_THREAD_S = 0.5e-3, 0.4e-3, 0.5e-3
"""Each thread after a process's first takes this many seconds: to dump it, to make it, and to check
and release it."""
DUMP_SHARED_S, RESTORE_SHARED_S, CHECK_SHARED_S = 120e-6, 60e-6, 80e-6
"""Each mapping of nameless shared memory, whose image has files of its own, takes this many seconds
more: to dump it, to restore it, and to check it."""
FILES_S, LIST_S = 0.01, 10e-6
"""To list the directories again takes FILES_S seconds, and LIST_S for each entry in them."""
HANDOVER_S = 0.03
"""Promise, commit, checks of the image, grant, and opening the network and the gates take this many
seconds."""
LOOK_S, LOOK_BYTE_S = 0.01, 12e-3 / 2**30
"""A tracker's last look takes LOOK_S seconds without sending, and LOOK_BYTE_S per byte in small
pages."""
BETWEEN_ROUNDS_S = 0.2
"""Once rounds do not get smaller any more, the source waits this many seconds between two of them
(precopy.BETWEEN_ROUNDS_S)."""
STREAM, SHM, EAGER = 1.3e9, 0.5e9, 3.3e9
"""These go at so many bytes per second: CRIU's images onto the wire; /dev/shm; memory that CRIU
reads back."""
PLACE, REFILL, FIRST_FILL = 200e9, 11e9, 0.7e9
"""The destination puts memory in its place at so many bytes per second. Pages that went ahead are
placed by moving page tables. A page that comes again during the pause is copied over its older
content. If nothing went ahead, the kernel hands out every page for the first time: filling 424 to
487 MB took 0.4 to 1.5 s, and fresh memory 1.5 to 2.3 s per GiB (docs/measurements.md, "Where fresh
memory is slow"). Memory that was freed just before is up to ten times as fast. So earlier moves
correct this rate separately (``Lessons.factors[FILLING]``)."""

AHEAD, AHEAD_FILE_S = 0.3e9, 0.3e-3
"""Files are packed and unpacked at AHEAD bytes per second and AHEAD_FILE_S per file while the job
trains (measured on two cores)."""

WRONG_BY = 30.0
"""Earlier moves correct no part by more than this factor, up or down."""
LAST = 20
"""At most this many earlier moves count, the newest ones."""

PART_OF = {
    "quiesce": "quiesce",
    "lock": "lock",
    "dump": "dump",
    "memory": "memory",
    "ship": "memory",
    "files": "files",
    "gpu save": "gpu save",
    "gpu memory": "gpu save",
    "restore": "restore",
    "gpu restore": "gpu restore",
}
"""Phase → the part of the downtime that it counts for. All other time counts as handover."""
HANDOVER = "handover"
FILLING = "filling"
"""This names no part, but the share of restore that depends on FIRST_FILL. It has its own factor,
because moves that fill fresh memory teach nothing about moves that do not."""


@dataclass(frozen=True)
class Load:
    """What must be moved, in bytes.

    ``files``: those of /dev/shm. ``entries``: files in the other directories that go along.
    ``changing``: bytes of files there that were just written, and of single open files that go
    along. ``nameless``: files without a name, which are in the image. ``writing``: None if there
    was no look at what the capsule writes. ``full_dump``: why its memory cannot be copied while
    it trains, else empty.
    """

    footprint: Footprint
    files: int = 0
    device_memory: int = 0
    writing: Writing | None = None
    full_dump: str = ""
    entries: int = 0
    changing: int = 0
    nameless: int = 0

    @property
    def way(self) -> str:
        return FULL_DUMP if self.full_dump else PRECOPY

    @classmethod
    def of(cls, look: Inspected, full_dump: str = "") -> Load:
        """The load of a move, from the survey of its source."""
        survey, tasks = look.survey, len(look.survey.pids)
        return cls(
            look.footprint or Footprint(survey.resident, survey.shared_memory, tasks, tasks, 0),
            survey.shared_memory,
            look.gpu.total if look.gpu else 0,
            look.writing,
            full_dump,
            sum(each.files for each in survey.along),
            sum(each.recent for each in survey.along) + survey.single_size,
            survey.nameless,
        )


@dataclass(frozen=True)
class Lessons:
    """What earlier moves teach about each part of a downtime.

    ``moves``: the number of these moves. ``factors``: part → the factor on the model's seconds.
    ``per_byte``: part → seconds per byte of device memory, for which there is no model.
    """

    moves: int = 0
    factors: Mapping[str, float] = field(default_factory=dict)
    per_byte: Mapping[str, float] = field(default_factory=dict)


def predict(load: Load, lessons: Lessons | None = None, rate: float | None = None) -> Prediction:
    """Predict the downtime of a move.

    ``rate``: bytes per second at which memory went to that host before; None if none has gone.
    """
    lessons, link = lessons or Lessons(), rate or PAUSE_RATE
    size, full = load.footprint, bool(load.full_dump)
    tasks = f"{_count(size.processes, 'process', 'processes')}, {size.mappings} mappings"
    mapped = max(0, size.shared - load.files) + load.nameless
    threads, objects = max(0, size.threads - size.processes), size.shared_mappings
    dump = DUMP_S + DUMP_TASK_S * size.processes + DUMP_MAPPING_S * size.mappings
    dump += DUMP_THREAD_S * threads + DUMP_SHARED_S * objects
    restore = RESTORE_S + RESTORE_TASK_S * size.processes + RESTORE_MAPPING_S * size.mappings
    restore += RESTORE_THREAD_S * threads + RESTORE_SHARED_S * objects
    handover = HANDOVER_S + RELEASE_THREAD_S * threads + CHECK_SHARED_S * objects
    if threads:
        tasks += f", {_count(size.threads, 'thread', 'threads')}"
    parts = [_part(lessons, "quiesce", QUIESCE_S), _part(lessons, "lock", LOCK_S)]
    filling, by = 0.0, lessons.factors.get(FILLING, 1.0)
    if full:
        put = size.private + mapped
        parts.append(_part(lessons, "dump", dump + put / STREAM, put, tasks))
        restore += put / EAGER
    else:
        delta, how = _delta(load, link)
        how += f", {units.size(link)}/s {'seen' if rate else 'assumed'} on the way"
        parts.append(_part(lessons, "dump", dump + mapped / min(link, STREAM), mapped, tasks))
        last = _look_s(size.private) + delta / link
        parts.append(_part(lessons, "memory", last, delta, how))
        put = size.private
        restore += put / PLACE + _refill_s(delta, put)
        filling = _first_fill_s(delta, put)
    listed = "changes, and /dev/shm"
    if load.entries:
        listed += f"; {_count(load.entries, 'entry', 'entries')} to list again"
    again = FILES_S + LIST_S * load.entries + load.files / SHM + load.changing / AHEAD
    parts.append(_part(lessons, "files", again, load.files + load.changing, listed))
    if load.device_memory:
        parts.append(_device(lessons, "gpu save", load.device_memory))
    restoring = _part(lessons, "restore", restore, put, tasks)
    parts.append(_with_filling(restoring, filling, by))
    if load.device_memory:
        parts.append(_device(lessons, "gpu restore", load.device_memory))
    parts.append(_part(lessons, HANDOVER, handover, None, "commit, checks, grant, network"))
    unknown = any(part.seconds is None for part in parts)
    return Prediction(
        load.way,
        load.full_dump,
        sum(part.seconds or 0.0 for part in parts),
        parts,
        size.private,
        lessons.moves,
        "device memory, for which there is no earlier move in this cluster" if unknown else "",
        filling=by,
    )


def seconds_ahead(along: Iterable[Along]) -> float:
    """Seconds that these directories take before memory begins to go ahead."""
    return sum(each.size / AHEAD + each.files * AHEAD_FILE_S for each in along)


def besides_memory(prediction: Prediction) -> float:
    """Seconds of a downtime that do not depend on how much was written lately."""
    others = sum(part.seconds or 0.0 for part in prediction.parts if part.name != "memory")
    return others + (_look_s(prediction.memory) if prediction.way == PRECOPY else 0.0)


def without_memory(prediction: Prediction) -> float:
    """Seconds of a downtime that do not depend on how much memory is left for it."""
    return besides_memory(with_memory(prediction, 0, PAUSE_RATE, ""))


def _look_s(private: int) -> float:
    """Seconds of a tracker's last look at ``private`` bytes."""
    return LOOK_S + LOOK_BYTE_S * private


def _delta(load: Load, rate: float) -> tuple[int, str]:
    """Bytes of memory that are left for the freeze, and the reason in words."""
    private, written = load.footprint.private, load.writing
    if written is None:
        return private, "all of it, as what it writes is not known"
    left = float(private)
    if written.rate < rate:
        between = _look_s(private) + BETWEEN_ROUNDS_S + QUIESCE_S
        left = min(left, written.rate * between / (1 - written.rate / rate))
    if written.set <= rate * written.seconds:  # a round with all of this is shorter than the look
        left = min(left, written.set)
    return int(left), f"of {units.size(private)}: {units.size(written.rate)}/s written"


def at_most(prediction: Prediction) -> bool:
    """Whether the prediction counts all memory, because nothing better is known."""
    return any(p.name == "memory" and p.bytes == prediction.memory for p in prediction.parts)


def sharpened(prediction: Prediction, rounds: Rounds) -> Prediction:
    """The prediction with the results of the pre-copy's last round instead of assumptions."""
    if prediction.way != PRECOPY or rounds.stop_s is None or not rounds.round:
        return prediction
    detail = f"as the last of {_count(rounds.round, 'round', 'rounds')} found"
    sharp = with_memory(prediction, rounds.dirty, rounds.best or PAUSE_RATE, detail)
    lost = sharp.slower_s + sharp.seconds if sharp.how else sharp.lost_s
    return msgspec.structs.replace(sharp, lost_s=lost)


def with_memory(prediction: Prediction, left: int, rate: float, detail: str) -> Prediction:
    """The prediction with ``left`` bytes of memory in the freeze, at ``rate`` bytes/s."""
    assumed = next(part.bytes or 0 for part in prediction.parts if part.name == "memory")
    parts = list(prediction.parts)
    for n, part in enumerate(parts):
        if part.name == "memory":
            last = _look_s(prediction.memory) + left / rate
            parts[n] = Part(part.name, last * _factor(part), left, detail, last)
        elif part.name == "restore":
            parts[n] = _refilled(part, prediction, assumed, left)
    total = sum(part.seconds or 0.0 for part in parts)
    return msgspec.structs.replace(prediction, parts=parts, seconds=total)


def _refilled(restore: Part, prediction: Prediction, assumed: int, left: int) -> Part:
    """The part restore if ``left`` bytes go in the freeze instead of ``assumed`` bytes."""
    size, by = prediction.memory, prediction.filling
    own = _with_filling(restore, -_first_fill_s(assumed, size), by)
    changed = own.untaught + _refill_s(left, size) - _refill_s(assumed, size)
    own = Part(own.name, changed * _factor(own), own.bytes, own.detail, changed)
    return _with_filling(own, _first_fill_s(left, size), by)


def _with_filling(restore: Part, seconds: float, by: float) -> Part:
    """The part restore with ``seconds`` more for fresh memory, corrected by the factor ``by``."""
    taught = (restore.seconds or 0.0) + seconds * by
    return msgspec.structs.replace(restore, seconds=taught, untaught=restore.untaught + seconds)


def _first_fill_s(left: int, private: int) -> float:
    """Seconds, uncorrected, to fill fresh memory. Memory is fresh only if all of it is left for the
    freeze: then it has no pages yet."""
    return left / FIRST_FILL if left >= private else 0.0


def _refill_s(left: int, private: int) -> float:
    """Seconds, uncorrected, to copy memory over pages whose older content went ahead."""
    return left / REFILL if left < private else 0.0


def _factor(part: Part) -> float:
    """The factor by which earlier moves have corrected a part."""
    return part.seconds / part.untaught if part.seconds and part.untaught else 1.0


def rate_between(rows: Iterable[MigrationRow], one: str, other: str) -> float | None:
    """Bytes per second at which memory went between two hosts, in either direction: the median of
    the best rates of earlier moves; None without any."""
    best = [
        row.precopy.best
        for row in rows
        if row.precopy and row.precopy.best and {row.source, row.destination} == {one, other}
    ]
    from statistics import median  # not for every status, which shows predictions that were made

    return median(best) if best else None


def learn(rows: Iterable[MigrationRow], way: str, job: str = "") -> Lessons:
    """Learn from earlier moves, newest first, that went the same way and had a prediction. If some
    of them are of the same job, only those count."""
    from statistics import median

    fitting = [row for row in rows if _teaches(row, way)]
    own = [row for row in fitting if row.capsule.partition("/")[0] == job]
    chosen = (own or fitting)[:LAST]
    factors: defaultdict[str, list[float]] = defaultdict(list)
    per_byte: defaultdict[str, list[float]] = defaultdict(list)
    for row in chosen:
        assert row.predicted is not None
        took, filling = seen(row), _filling_of(row.predicted)
        for part in row.predicted.parts:
            if part.name == "restore" and filling:
                beside = part.untaught - filling
                factors[FILLING].append(max(0.0, took.get(part.name, 0.0) - beside) / filling)
            elif part.untaught:
                factors[part.name].append(took.get(part.name, 0.0) / part.untaught)
            elif part.bytes and part.name in took:
                per_byte[part.name].append(took[part.name] / part.bytes)
    return Lessons(
        len(chosen),
        {name: min(WRONG_BY, max(1 / WRONG_BY, median(of))) for name, of in factors.items()},
        {name: median(of) for name, of in per_byte.items()},
    )


def _filling_of(predicted: Prediction) -> float:
    """The uncorrected seconds for fresh memory in a prediction; 0 where it expected none."""
    fresh = predicted.way == PRECOPY and at_most(predicted)
    return _first_fill_s(predicted.memory, predicted.memory) if fresh else 0.0


def _teaches(row: MigrationRow, way: str) -> bool:
    if row.state != MigrationStep.DONE.value or row.predicted is None or row.predicted.way != way:
        return False
    return way == FULL_DUMP or row.precopy is not None  # else it became a full dump


def stood(row: MigrationRow) -> float:
    """Seconds that a move held the job up: quiesce and freeze."""
    return sum(p.seconds for p in row.phases if p.name == "quiesce") + row.frozen_s


def seen(row: MigrationRow) -> dict[str, float]:
    """The seconds that each part of a downtime took; their sum is :func:`stood`.

    Where two phases ran at the same time, that time counts for the one that began first.
    """
    full = row.predicted is not None and row.predicted.way == FULL_DUMP
    took: defaultdict[str, float] = defaultdict(float)
    until = float("-inf")
    for phase in sorted(row.phases, key=lambda phase: phase.start):
        part = PART_OF.get(phase.name)
        if part is None or not (phase.frozen or part == "quiesce"):
            continue
        if full and part == "memory":
            part = "dump"  # CRIU itself sent the memory
        end = phase.start + phase.seconds
        took[part] += max(0.0, end - max(phase.start, until))
        until = max(until, end)
    took[HANDOVER] = max(0.0, stood(row) - sum(took.values()))
    return dict(took)


def _part(
    lessons: Lessons, name: str, untaught: float, size: int | None = None, detail: str = ""
) -> Part:
    return Part(name, untaught * lessons.factors.get(name, 1.0), size or None, detail, untaught)


def _device(lessons: Lessons, name: str, size: int) -> Part:
    """A part for device memory. Its seconds are unknown until an earlier move has shown them."""
    each = lessons.per_byte.get(name)
    return Part(name, None if each is None else each * size, size)


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"
