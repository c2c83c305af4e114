# SPDX-License-Identifier: Apache-2.0
"""What is predicted of a move is what its way was chosen by, and memory counts in it once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from migration_stage import FACTS, SURVEY

from liveshift.criu_glue.survey.found import Along, Footprint, Survey
from liveshift.runtime.config.cluster import PrecopySettings, Timeouts
from liveshift.runtime.cost import model as cost
from liveshift.runtime.cost.comparison import costed
from liveshift.runtime.cost.prediction import FILLING, Lessons, Load, predict
from liveshift.runtime.messages import Cores, Inspected, Prediction, Reserved, Writing

SIZE = 480 * 10**6
LINK = 2e9
TAUGHT = Lessons(4, {"memory": 1.5, "restore": 3.0, FILLING: 0.5})


def predicted(
    lessons: Lessons,
    way: str = "auto",
    writing: Writing | None = None,
    idle: float = 0.0,
    *,
    survey: Survey = SURVEY,
    full_dump: str = "",
) -> Prediction:
    size, cores = Footprint(SIZE, 0, 1, 1, 0), Cores(2.0, idle, 1e-9, "one")
    look = Inspected(survey, FACTS, 5, footprint=size, writing=writing, cores=cores)
    found = predict(Load(size, writing=writing, full_dump=full_dump), lessons, LINK)
    return costed(
        found,
        look,
        Reserved([], "", cores=cores),
        LINK,
        lessons,
        cost.Learnt(),
        PrecopySettings(),
        Timeouts(),
        way,
    )


@pytest.mark.parametrize("writing", [None, Writing(50e6, 50 * 10**6, 1.0)])
@pytest.mark.parametrize("way", ["stop", "round", "rounds"])
@pytest.mark.parametrize("lessons", [Lessons(), TAUGHT])
def test_the_pause_is_the_one_that_the_way_was_weighed_by(
    lessons: Lessons, way: str, writing: Writing | None
) -> None:
    found = predicted(lessons, way, writing)
    weighed = next(each for each in found.weighed if each.way == way)
    assert found.how == way
    assert found.seconds == pytest.approx(weighed.pause_s, abs=0.05)
    assert found.lost_s == pytest.approx(weighed.lost_s, abs=0.05)


def test_a_first_stop_is_expected_to_take_as_long_as_fresh_memory_does() -> None:
    found = predicted(Lessons(), "stop")
    filled = SIZE / 0.7e9
    assert found.seconds > SIZE / LINK + filled
    assert found.seconds < SIZE / LINK + filled + 0.3, "no byte is counted twice"
    written = predicted(Lessons(), "stop", Writing(50e6, 50 * 10**6, 1.0))
    assert written.seconds == pytest.approx(found.seconds, abs=0.001), "all of it goes in any case"


def test_a_first_move_is_not_stopped_where_idle_cores_can_copy() -> None:
    writing = Writing(5e6, 5 * 10**6, 1.0)
    found = predicted(Lessons(), writing=writing, idle=2.0)
    assert found.how in ("round", "rounds")
    stop = next(each for each in found.weighed if each.way == "stop")
    assert found.lost_s < stop.lost_s / 2


@pytest.mark.parametrize("full_dump", ["", "the kernel is too old"])
def test_the_files_that_go_along_count_until_the_host_is_empty(full_dump: str) -> None:
    """20 GB in /tmp take a minute; a host that must be empty in 30 s is not empty by then."""
    many = replace(SURVEY, along=(Along("/tmp", 1000, 20 * 10**9, 0),))
    without = predicted(Lessons(), full_dump=full_dump)
    found = predicted(Lessons(), survey=many, full_dump=full_dump)
    assert found.empty_s is not None
    assert without.empty_s is not None
    assert found.empty_s - without.empty_s == pytest.approx(20 / 0.3 + 0.3)
    assert found.lost_s == without.lost_s, "the job trains meanwhile"
