# SPDX-License-Identifier: Apache-2.0
"""The predicted pause in numbers, what it learns of earlier moves, and how these compare."""

from __future__ import annotations

import journal_rows
import msgspec
import pytest

from liveshift.criu_glue.survey.found import Footprint
from liveshift.runtime.cost import prediction
from liveshift.runtime.cost.prediction import Lessons, Load, learn, predict, seen, stood
from liveshift.runtime.messages import MigrationRow, Phase, Prediction, Rounds, Writing
from liveshift.runtime.model.link_rates import PAUSE_RATE

GB = 10**9
LOOK = 0.01 + 1e9 * 12e-3 / 2**30
SMALL = Footprint(0, 0, 1, 1, 0)


def seconds(found: Prediction) -> dict[str, float | None]:
    return {part.name: part.seconds for part in found.parts}


def size(private: int, shared: int = 0, processes: int = 1, mappings: int = 0) -> Footprint:
    return Footprint(private, shared, processes, processes, mappings)


def test_a_full_dump_in_numbers() -> None:
    load = Load(size(2 * GB, GB // 2, 4, 1000), files=GB // 10, full_dump="kernel 6.1 is too old")
    found = predict(load)
    assert (found.way, found.why) == ("full dump", "kernel 6.1 is too old")
    assert seconds(found) == pytest.approx(
        {
            "quiesce": 0.01,
            "lock": 0.003,
            # 2 GB, and 0.4 GB that is no file
            "dump": 0.02 + 4 * 0.002 + 1000 * 100e-6 + 2.4 / 1.3,
            "files": 0.01 + 0.1 / 0.5,
            "restore": 0.015 + 4 * 0.001 + 1000 * 20e-6 + 2.4 / 3.3,
            "handover": 0.03,
        }
    )
    assert found.seconds == pytest.approx(sum(filter(None, seconds(found).values())))
    assert (found.memory, found.learnt, found.left_out) == (2 * GB, 0, "")


def test_files_without_a_name_go_in_the_image() -> None:
    for why, rate in (("", 0.8e9), ("the kernel is too old", 1.3e9)):
        one, other = (
            seconds(predict(Load(SMALL, full_dump=why, nameless=size), rate=0.8e9))["dump"]
            for size in (0, GB)
        )
        assert one is not None
        assert other == pytest.approx(one + GB / rate)


def test_threads_and_shared_mappings_have_their_price() -> None:
    plain = Footprint(GB, 0, 2, 2, 11_000)
    many = Footprint(GB, 0, 2, 1502, 11_000, 0, 10_000)
    one, other = (seconds(predict(Load(each, full_dump="so"))) for each in (plain, many))
    more = {name: (other[name] or 0) - (one[name] or 0) for name in one}
    assert {name for name, by in more.items() if by > 1e-6} == {"dump", "restore", "handover"}
    assert more["dump"] == pytest.approx(1500 * 0.5e-3 + 10_000 * 120e-6)
    assert more["restore"] == pytest.approx(1500 * 0.4e-3 + 10_000 * 60e-6)
    assert more["handover"] == pytest.approx(1500 * 0.5e-3 + 10_000 * 80e-6)
    (dump,) = (part for part in predict(Load(many, full_dump="so")).parts if part.name == "dump")
    assert dump.detail == "2 processes, 11000 mappings, 1502 threads"


def test_a_pre_copy_leaves_what_is_written_between_the_last_look_and_the_boundary() -> None:
    found = predict(Load(size(8 * GB, processes=2), writing=Writing(0.5e9, GB, 1.0)), rate=2e9)
    assert (found.way, found.why) == ("pre-copy", "")
    look = 0.01 + 8e9 * 12e-3 / 2**30
    delta = 0.5e9 * (look + 0.2 + 0.01) / (1 - 0.25)
    parts = {part.name: part for part in found.parts}
    assert parts["memory"].bytes == pytest.approx(delta, rel=1e-6)
    assert seconds(found) == pytest.approx(
        {
            "quiesce": 0.01,
            "lock": 0.003,
            "dump": 0.02 + 2 * 0.002,
            "memory": look + delta / 2e9,
            "files": 0.01,
            "restore": 0.015 + 2 * 0.001 + 8 / 200 + delta / 11e9,
            "handover": 0.03,
        }
    )
    said = "of 8.00 GB: 500 MB/s written, 2.00 GB/s seen on the way"
    assert parts["memory"].detail == said


def test_cold_memory_is_looked_at_and_put_in_place_but_not_sent() -> None:
    small, large = (
        predict(Load(size(private), writing=Writing(0.05e9, GB, 1.0)), rate=1e9)
        for private in (GB, 16 * GB)
    )
    for name in ("dump", "files", "handover"):
        assert seconds(small)[name] == seconds(large)[name]
    assert (seconds(large)["memory"] or 0) < 0.25
    copied = next(part.bytes or 0 for part in large.parts if part.name == "memory")
    placed = 16 / 200
    assert seconds(large)["restore"] == pytest.approx(0.015 + 0.001 + placed + copied / 11e9)


def test_what_is_written_faster_than_it_is_sent_goes_over_whole() -> None:
    for written in (1e9, 9e9):
        found = predict(Load(size(GB), writing=Writing(written, 2 * GB, 1.0)), rate=1e9)
        assert seconds(found)["memory"] == pytest.approx(1.0 + LOOK)
    nearly = predict(Load(size(GB), writing=Writing(0.999e9, 2 * GB, 1.0)), rate=1e9)
    assert seconds(nearly)["memory"] == pytest.approx(1.0 + LOOK), "never more than there is"


def test_what_is_written_again_and_again_counts_once() -> None:
    for written in (0.2e9, 0.9e9, 5e9):
        found = predict(Load(size(GB), writing=Writing(written, 8 * 10**6, 1.0)), rate=1e9)
        assert found.parts[3].bytes == 8 * 10**6
    slow = predict(Load(size(GB), writing=Writing(0.9e9, GB // 2, 1.0)), rate=0.3e9)
    assert slow.parts[3].bytes == GB, "a round that sends half a GB is longer than that look was"


def test_without_a_look_at_what_it_writes_the_worst_is_assumed() -> None:
    found = predict(Load(size(GB)), rate=1e9)
    (memory,) = [part for part in found.parts if part.name == "memory"]
    assert memory.bytes == GB
    assert memory.seconds == pytest.approx(1.0 + LOOK)
    assert "what it writes is not known" in memory.detail


def test_what_the_last_round_found_takes_the_place_of_what_was_assumed() -> None:
    worst = predict(Load(size(GB)), Lessons(2, {"memory": 0.5}), rate=1e9)
    assert prediction.at_most(worst)
    rounds = Rounds(4, 3 * GB, GB // 10, 0, 1e6, stop_s=0.5, best=2e9)
    found = prediction.sharpened(worst, rounds)
    (memory,) = [part for part in found.parts if part.name == "memory"]
    assert memory.bytes == GB // 10
    assert memory.untaught == pytest.approx(LOOK + 0.05)
    assert memory.seconds == pytest.approx(0.5 * (LOOK + 0.05))
    assert memory.detail == "as the last of 4 rounds found"
    assert found.seconds == pytest.approx(sum(part.seconds or 0.0 for part in found.parts))
    assert found.seconds == pytest.approx(worst.seconds - 0.5 * 0.95 - (1 / 0.7 - 0.1 / 11))
    assert not prediction.at_most(found)


def restore(found: Prediction) -> float:
    return seconds(found)["restore"] or 0.0


def test_a_stop_fills_fresh_memory_and_a_last_round_what_has_pages_already() -> None:
    stopped = predict(Load(size(480 * 10**6)))
    assert 0.4 < restore(stopped) < 1.5, "as seen for 424 to 487 MB"
    assert restore(stopped) == pytest.approx(0.016 + 0.48 / 200 + 0.48 / 0.7)
    rounds = prediction.with_memory(stopped, 10**8, 1e9, "")
    assert restore(rounds) == pytest.approx(0.016 + 0.48 / 200 + 0.1 / 11)
    again = prediction.with_memory(rounds, stopped.memory, PAUSE_RATE, "")
    assert again.seconds == pytest.approx(stopped.seconds)


def moved(before: Prediction, restored: float) -> MigrationRow:
    """A record of a move whose restore took so long."""
    return row(before, [Phase("restore", 0.0, restored, frozen=True)], frozen=restored)


def test_stops_and_rounds_do_not_teach_each_other_how_fast_memory_is_filled() -> None:
    stop = predict(Load(size(GB)))
    rounds = prediction.with_memory(stop, 10**8, 1e9, "")
    own = restore(prediction.with_memory(stop, 0, 1e9, ""))
    by_stops = learn([moved(stop, own + 0.5 * GB / 0.7e9)] * 3, "pre-copy")
    assert by_stops.factors[prediction.FILLING] == pytest.approx(0.5)
    assert "restore" not in by_stops.factors
    by_rounds = learn([moved(rounds, 4 * restore(rounds))] * 3, "pre-copy")
    assert by_rounds.factors["restore"] == pytest.approx(4)
    assert prediction.FILLING not in by_rounds.factors


def test_what_stops_and_rounds_teach_counts_once() -> None:
    before = predict(Load(size(GB)))
    lessons = Lessons(6, {"restore": 4.0, prediction.FILLING: 0.5})
    stop = predict(Load(size(GB)), lessons)
    own = 0.016 + 1 / 200
    assert restore(stop) == pytest.approx(4 * own + 0.5 / 0.7)
    assert stop.filling == 0.5
    (part,) = (part for part in stop.parts if part.name == "restore")
    assert part.untaught == pytest.approx(restore(before))
    rounds = prediction.with_memory(stop, 10**8, 1e9, "")
    assert restore(rounds) == pytest.approx(4 * (own + 0.1 / 11))
    again = prediction.with_memory(rounds, GB, PAUSE_RATE, "")
    assert restore(again) == pytest.approx(restore(stop))
    taught = learn([moved(stop, restore(stop))] * 3, "pre-copy").factors[prediction.FILLING]
    assert taught == pytest.approx(0.5 + 3 * own * 0.7), "the factor is on the untaught model"


def test_nothing_known_sharpens_nothing() -> None:
    worst = predict(Load(size(GB)))
    first = Rounds(1, GB, GB, 0, 1e9, best=1e9)
    assert prediction.sharpened(worst, first) == worst
    dumped = predict(Load(size(GB), full_dump="x"))
    assert prediction.sharpened(dumped, Rounds(3, GB, 1, 0, 1e9, stop_s=0.1)) == dumped
    assert not prediction.at_most(dumped)


def test_nothing_is_invented_of_a_gpu() -> None:
    load = Load(SMALL, device_memory=10 * GB, full_dump="x")
    found = predict(load)
    assert seconds(found)["gpu save"] is None
    assert seconds(found)["gpu restore"] is None
    assert "device memory" in found.left_out
    assert found.seconds < 1
    taught = predict(
        load, Lessons(1, {}, {"gpu save": 1 / (20 * GB), "gpu restore": 1 / (10 * GB)})
    )
    assert (seconds(taught)["gpu save"], seconds(taught)["gpu restore"]) == (0.5, 1.0)
    assert taught.left_out == ""
    assert taught.seconds == pytest.approx(found.seconds + 1.5)


# ---- what a move took, and what that teaches ----------------------------------------------------

PHASES = [
    Phase("prepare", 0.0, 0.3),
    Phase("pre-copy", 0.3, 5.0, 9 * GB),
    Phase("quiesce", 5.3, 0.02),
    Phase("lock", 5.32, 0.01, frozen=True),
    Phase("dump", 5.33, 0.10, frozen=True),
    Phase("memory", 5.38, 0.25, GB, frozen=True),  # 0.05 s of it beside the dump
    Phase("files", 5.63, 0.01, frozen=True),
    Phase("commit", 5.64, 0.02, frozen=True),
    Phase("restore", 5.70, 0.20, frozen=True),
    Phase("unlock", 5.90, 0.03, frozen=True),
    Phase("resume", 5.94, 0.5),
]

ROUNDS = Rounds(3, GB, 0, 0, 1e9)


def row(
    predicted: Prediction | None,
    phases: list[Phase] = PHASES,
    job: str = "gpt",
    precopy: Rounds | None = ROUNDS,
    frozen: float = 0.62,
    state: str = "done",
) -> MigrationRow:
    return msgspec.structs.replace(
        journal_rows.row(1, f"{job}/1", state),
        seconds=7.0,
        frozen_s=frozen,
        image_bytes=GB,
        bytes=GB,
        expected_bytes=GB,
        link_rate=1e9,
        phases=phases,
        precopy=precopy,
        predicted=predicted,
    )


def test_what_the_parts_of_a_move_took() -> None:
    move = row(predict(Load(size(GB))))
    assert stood(move) == pytest.approx(0.64)
    took = seen(move)
    assert took == pytest.approx(
        {
            "quiesce": 0.02,
            "lock": 0.01,
            "dump": 0.10,
            "memory": 0.20,
            "files": 0.01,
            "restore": 0.20,
            "handover": 0.10,
        }
    )
    assert sum(took.values()) == pytest.approx(stood(move))


def test_the_memory_of_a_full_dump_is_the_dumps() -> None:
    phases = [Phase("dump", 0.0, 0.4, GB, True), Phase("ship", 0.4, 0.1, None, True)]
    took = seen(row(predict(Load(size(GB), full_dump="x")), phases, precopy=None, frozen=0.5))
    assert took == pytest.approx({"dump": 0.5, "handover": 0.0})


def test_parts_are_corrected_by_the_median_of_earlier_moves() -> None:
    load = Load(size(GB), full_dump="x")
    before = predict(load)
    untaught = {part.name: part.untaught for part in before.parts}
    rows = []
    for factor in (0.5, 2.0, 40.0):  # one was quite out of the way
        phases = [
            Phase(name, 1000.0 * n, untaught[name] * factor, frozen=name != "quiesce")
            for n, name in enumerate(("quiesce", "lock", "dump", "files", "restore"))
        ]
        frozen = sum(p.seconds for p in phases[1:]) + untaught["handover"] * factor
        rows.append(row(before, phases, precopy=None, frozen=frozen))
    lessons = learn(rows, "full dump")
    assert lessons.moves == 3
    assert predict(load, lessons).seconds == pytest.approx(2 * before.seconds, rel=0.01)
    assert predict(load, lessons).learnt == 3
    assert [part.untaught for part in predict(load, lessons).parts] == list(untaught.values())


def test_device_memory_is_learnt_per_byte() -> None:
    load = Load(SMALL, device_memory=10 * GB, full_dump="x")
    phases = [
        Phase("gpu save", 0.0, 2.0, 10 * GB, True),
        Phase("gpu restore", 2.0, 1.0, None, True),
    ]
    lessons = learn([row(predict(load), phases, precopy=None, frozen=3.0)], "full dump")
    double = predict(Load(SMALL, device_memory=20 * GB, full_dump="x"), lessons)
    assert (seconds(double)["gpu save"], seconds(double)["gpu restore"]) == (4.0, 2.0)


def test_who_teaches_and_who_does_not() -> None:
    full, copied = predict(Load(SMALL, full_dump="x")), predict(Load(SMALL))
    teaches = [row(copied), row(copied, job="other")]
    no_teachers = [
        row(None),
        row(copied, state="failed"),
        row(copied, precopy=None),  # it was to be a pre-copy, and was not
        row(full, precopy=None),
    ]
    assert learn([*teaches, *no_teachers], "pre-copy").moves == 2
    assert learn([*teaches, *no_teachers], "pre-copy", "other").moves == 1, "its own know best"
    assert learn([*teaches, *no_teachers], "pre-copy", "new").moves == 2
    assert learn([row(copied)] * 100, "pre-copy").moves == prediction.LAST
    assert learn([], "pre-copy") == Lessons()


def test_the_rate_is_that_of_the_two_hosts() -> None:
    def between(source: str, destination: str, best: float) -> MigrationRow:
        return msgspec.structs.replace(
            row(None),
            source=source,
            destination=destination,
            precopy=Rounds(3, GB, 0, 0, 1e6, best=best),
        )

    rows = [
        between("h1", "h2", 2e9),
        between("h2", "h1", 4e9),
        between("h2", "h1", 3e9),
        between("h1", "h3", 9e9),
        between("h1", "h2", 0.0),
        row(None, precopy=None),
    ]
    assert prediction.rate_between(rows, "h2", "h1") == 3e9
    assert prediction.rate_between(rows, "h2", "h3") is None
    load = Load(size(GB), writing=Writing(0.1e9, GB, 1.0))
    assert predict(load, rate=3e9).seconds < predict(load).seconds
    assert "2.70 GB/s assumed on the way" in predict(load).parts[3].detail


def test_a_freak_of_a_move_teaches_within_bounds() -> None:
    before = predict(Load(SMALL, full_dump="x"))
    slow = row(before, [Phase("lock", 0.0, 3000.0, frozen=True)], precopy=None, frozen=3000.0)
    factors = learn([slow], "full dump").factors
    assert factors["lock"] == prediction.WRONG_BY
    assert factors["dump"] == pytest.approx(1 / prediction.WRONG_BY)


def test_a_record_keeps_its_prediction_and_older_ones_load_without() -> None:
    kept = row(predict(Load(SMALL)))
    raw = msgspec.msgpack.encode(kept)
    assert msgspec.msgpack.decode(raw, type=MigrationRow) == kept
    old = msgspec.to_builtins(kept)
    del old["precopy"], old["predicted"]
    loaded = msgspec.convert(old, MigrationRow)
    assert (loaded.precopy, loaded.predicted) == (None, None)
