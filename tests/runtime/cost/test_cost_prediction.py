# SPDX-License-Identifier: Apache-2.0
"""What is predicted of a move is what its way was chosen by, and memory counts in it once."""

from __future__ import annotations

import pytest
from migration_stage import FACTS, SURVEY

from liveshift.criu_glue.survey.found import Footprint
from liveshift.runtime.config.cluster import PrecopySettings, Timeouts
from liveshift.runtime.cost import model as cost
from liveshift.runtime.cost.comparison import costed
from liveshift.runtime.cost.prediction import FILLING, Lessons, Load, predict
from liveshift.runtime.messages import Cores, Inspected, Prediction, Reserved, Writing

SIZE = 480 * 10**6
LINK = 2e9
TAUGHT = Lessons(4, {"memory": 1.5, "restore": 3.0, FILLING: 0.5})


def predicted(
    lessons: Lessons, way: str = "auto", writing: Writing | None = None, idle: float = 0.0
) -> Prediction:
    size, cores = Footprint(SIZE, 0, 1, 1, 0), Cores(2.0, idle, 1e-9, "one")
    look = Inspected(SURVEY, FACTS, 5, footprint=size, writing=writing, cores=cores)
    found = predict(Load(size, writing=writing), lessons, LINK)
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
