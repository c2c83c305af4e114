# SPDX-License-Identifier: Apache-2.0
"""The short form of ``make load``: the real orchestrator, 10 and 50 simulated hosts, 50 migrations
at once; and what it costs does not grow faster than the hosts do."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from load.agent import Pace
from load.figures import Run
from load.scenario import run

from liveshift.runtime.config.cluster import Timeouts

pytestmark = pytest.mark.timeout(120)

HOSTS = (10, 50)
MOVES = 50
PACE = Pace(inspect=0.02, reserve=0.02, precopy=0.05, freeze=0.5, restore=0.2, resume=0.02)


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    """Nothing here needs root: the hosts are simulated, all sockets are loopback's. They wait
    nearly all the time, for heartbeats, so that both are run at once."""
    with ThreadPoolExecutor(len(HOSTS)) as pool:
        return list(pool.map(lambda hosts: run(hosts, MOVES, rest_s=3.0, pace=PACE), HOSTS))


def test_all_migrations_are_done_and_every_capsule_runs_once(runs: list[Run]) -> None:
    for each in runs:
        assert each.wrong == []
        assert (each.moves.asked, each.moves.done) == (MOVES, MOVES)
        assert each.moves.at_once == MOVES, "they were not under way together"
        assert each.moves.claims >= 2 * MOVES, "both sides ask for each"
        assert each.capsules == 10 * each.hosts


def test_an_orchestrator_killed_amid_migrations_goes_on(runs: list[Run]) -> None:
    """``wrong`` has said that every capsule runs once, where the new orchestrator says."""
    for each in runs:
        assert each.restart.asked == MOVES
        assert 0 < each.restart.moved < MOVES, "some go on, some are rolled back"


def test_no_host_comes_near_to_looking_lost(runs: list[Run]) -> None:
    for each in runs:
        for seen in (each.rest, each.moves):
            assert seen.heartbeat.count > 0
            assert seen.heartbeat.p99 < Timeouts().suspicion
            assert seen.silences == 0


def test_cost_does_not_grow_faster_than_the_number_of_hosts(runs: list[Run]) -> None:
    """CPU seconds, which others' work on this machine changes little; with room for noise."""
    few, many = runs
    grown = many.hosts / few.hosts
    assert many.moves.cpu_each < 0.05, f"{many.moves.cpu_each:.3f} CPU s for a migration"
    assert many.rest.cores < 0.25
    assert many.restart.cpu < 2 * grown * max(few.restart.cpu, 0.1)
    assert many.rest.resident < 2 * few.rest.resident
    assert many.rest.descriptors - few.rest.descriptors <= 2 * (many.hosts - few.hosts)
