# SPDX-License-Identifier: Apache-2.0
"""What the soak calls a leak, tried on samples that are made up."""

from __future__ import annotations

import pytest
from soak.growth import JUDGED_S, PEAK, left_over, slope, suspicious, too_large, usage
from soak.watch import Daemon, Sample

HOUR = 3600.0
MB = 1e6


def samples(
    memory_per_hour: float = 0.0, files_per_hour: float = 0.0, busy: int = 4
) -> list[Sample]:
    """An hour of one daemon. In all but one of ``busy`` samples it works: it needs 40 MB more for
    that, and holds 250 MB of images."""
    return [
        Sample(
            when,
            0,
            {
                "h0": Daemon(
                    pid=7,
                    resident=int(90 * MB + 290 * MB * (n % busy > 0)),
                    descriptors=int(35 + files_per_hour * when / HOUR),
                    threads=12,
                    cpu=when / 10,
                    private=int(60 * MB + memory_per_hour * when / HOUR + 40 * MB * (n % busy > 0)),
                )
            },
            {},
        )
        for n, when in enumerate(15.0 * n for n in range(240))
    ]


def test_the_slope_of_a_line() -> None:
    assert slope([0, 1, 2, 3], [5, 7, 9, 11]) == pytest.approx(2)
    assert slope([], []) == slope([1], [5]) == 0


@pytest.mark.parametrize("busy", [4, 19])
def test_memory_that_comes_and_goes_is_no_leak(busy: int) -> None:
    seen = usage(samples(busy=busy))
    per_hour = seen["h0"].memory.per_hour
    assert per_hour is not None
    assert abs(per_hour) < MB
    assert seen["h0"].memory.most == pytest.approx(100 * MB)
    assert seen["h0"].cpu_per_minute == pytest.approx(6)
    assert suspicious(seen, HOUR) == []


@pytest.mark.parametrize("busy", [4, 19])
def test_memory_that_only_grows_is_one(busy: int) -> None:
    seen = usage(samples(memory_per_hour=60 * MB, busy=busy))
    assert seen["h0"].memory.per_hour == pytest.approx(60 * MB, rel=0.05)
    (said,) = suspicious(seen, HOUR)
    assert said.startswith("h0: memory grows by 6")
    assert suspicious(seen, JUDGED_S / 2) == [], "too short to say"


def test_a_daemon_that_takes_too_much_for_its_jobs() -> None:
    def sample(private: float) -> Sample:
        return Sample(0.0, 0, {"h0": Daemon(7, int(900 * MB), 35, 12, 0.0, int(private))}, {})

    assert too_large([sample(120 * MB), sample(250 * MB)], 100) == []
    assert too_large([sample(120 * MB), sample(460 * MB), sample(90 * MB)], 100) == [
        "h0: 460 MB with 100 small jobs on the hosts, more than 315 MB"
    ]
    assert too_large([sample(120 * MB), sample(460 * MB)], 100, PEAK) == []
    (said,) = too_large([sample(120 * MB), sample(750 * MB), sample(90 * MB)], 100, PEAK)
    assert said.startswith("h0: 750 MB with 100 small jobs")


def test_descriptors_that_are_not_closed() -> None:
    (said,) = suspicious(usage(samples(files_per_hour=200)), HOUR)
    assert said.startswith("h0: descriptors grow by ")


def test_another_daemon_than_at_the_beginning() -> None:
    taken = samples()
    last = taken[-1].daemons["h0"]
    taken[-1] = Sample(HOUR, 0, {"h0": Daemon(8, last.resident, 35, 12, last.cpu)}, {})
    assert suspicious(usage(taken), HOUR) == ["h0: its daemon is another than at the beginning"]


def test_what_is_left_on_hosts() -> None:
    before = {"links": 16, "state, bytes": 5000, "journal, bytes": 10}
    assert left_over(before, {"links": 15, "state, bytes": 9000, "journal, bytes": 10**9}) == []
    assert left_over(before, before | {"links": 17}) == [
        "links: 16 before the moves, 17 after them"
    ]
    assert left_over(before, before | {"state, bytes": 10**8})
