# SPDX-License-Identifier: Apache-2.0
"""In which order capsules leave a host that must be empty soon."""

from __future__ import annotations

import pytest
from cluster_files import SMALL
from predictions import PAUSE, predicted

from liveshift.runtime.config.cluster import Severity, parse
from liveshift.runtime.cost.evacuation_plan import plan
from liveshift.runtime.cost.model import at_most
from liveshift.runtime.messages import Prediction


def test_an_empty_host_is_empty_at_once() -> None:
    made = plan({}, 30.0, PAUSE)
    assert (made.order, made.empty_s, made.late) == ((), 0.0, [])


def test_each_leaves_time_for_those_behind_it() -> None:
    made = plan({"big": predicted(4), "small": predicted(1), "middle": predicted(2)}, 30.0, PAUSE)
    assert made.order == ("small", "middle", "big")
    assert not made.together
    assert made.until["big"] == 30.0
    assert made.until["middle"] <= 30.0 - at_most(1.6 + 4)
    assert made.until["small"] <= made.until["middle"] - at_most(1.6 + 2)
    assert made.empty_s == pytest.approx(3 * 1.6 + 7 + 2 * 0.2)


def test_a_way_that_loses_less_and_takes_longer_is_taken_while_there_is_time_for_it() -> None:
    leisurely = {name: predicted(2, idle=0.25e9) for name in "ab"}
    slow = plan(leisurely, 60.0, PAUSE)
    quick = plan(leisurely, 16.0, PAUSE)
    assert not slow.late
    assert not quick.late
    assert quick.empty_s <= 16.0 / 2 < slow.empty_s


def test_all_at_once_where_the_times_beside_the_copies_would_add_up() -> None:
    found = {name: predicted(0.5) for name in "abcd"}
    made = plan(found, 8.0, PAUSE)
    assert made.together
    assert made.empty_s == pytest.approx(1.6 + 4 * 0.5)
    assert not made.late
    least = at_most(1.6 + 4 * 0.5) - at_most(1.6 + 0.5)
    assert all(until == pytest.approx(8.0 - least) for until in made.until.values()), (
        "they share the link"
    )
    assert not plan(found, 7.0, PAUSE).together, "7.7 s is what it may take"


def test_not_all_at_once_where_there_are_not_cores_for_it() -> None:
    """Four dumps on the two cores that both hosts have took twice as long as one after another."""
    found = {name: predicted(0.5, cores=1.0) for name in "abcd"}
    made = plan(found, 15.0, PAUSE)
    assert not made.together
    assert [late.capsule for late in made.late] == ["d"]
    several = plan({name: predicted(0.5, cores=2.0) for name in "abcd"}, 15.0, PAUSE)
    assert several.together
    assert several.empty_s == pytest.approx(4 * (1.6 / 2 + 0.5))


def test_the_most_that_can_be_saved_go_first_and_the_rest_is_said() -> None:
    found = {"a": predicted(10), "b": predicted(1), "c": predicted(2)}
    made = plan(found, 14.0, PAUSE)
    assert made.order == ("b", "c", "a")
    assert [late.capsule for late in made.late] == ["a"]
    assert made.late[0].empty_s == pytest.approx(3 * 1.6 + 13 + 2 * 0.2)
    alone = plan({"a": predicted(10)}, 7.0, PAUSE)
    assert alone.late[0].empty_s == pytest.approx(11.6)
    assert alone.late[0].at_most_s == pytest.approx(2 * 11.6 + 0.5)


def test_a_full_dump_has_but_one_way() -> None:
    full = Prediction("full dump", "off", 3.0, [], 10**9, lost_s=3.0, empty_s=4.5)
    assert plan({"a": full}, 5.0, PAUSE).empty_s == 4.5
    assert [late.capsule for late in plan({"a": full}, 9.4, PAUSE).late] == ["a"]
    assert plan({"a": full}, 9.6, PAUSE).late == []


def test_a_severity_has_the_time_that_the_cluster_file_gives_it() -> None:
    text = SMALL + "[within]\nnotice = 30\n"
    within = parse(text).cluster.within
    assert [within.of(each) for each in ("", *Severity)] == [0.0, 0.0, 0.0, 30.0]
    assert parse(SMALL).cluster.digest != parse(text).cluster.digest
