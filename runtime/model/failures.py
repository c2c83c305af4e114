# SPDX-License-Identifier: Apache-2.0
"""How often hosts fail: what is assumed of any cluster, and what was seen of this one.

Failures of hosts come at random, at a constant rate. What is assumed counts as one failure in as
many hours of hosts as the study below has counted for one. What was seen is added: with N losses in
H hours of hosts the rate is

    (1 + N) / (assumed hours + H)

This is the mean of the rate's Gamma distribution, by Bayes' rule (A. Gelman et al., "Bayesian Data
Analysis", 3rd ed., 2.6). With nothing seen it is the assumed rate. One loss in the first hour does
not change it beyond measure, and thousands of hours outweigh the assumption.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...units import figures

GPU_MTTF_S = 7.9 * 3600 * 1024
"""Mean seconds until one GPU's failure ends a job: 7.9 hours for jobs of 1,024 GPUs (A. Kokolis et
al., "Revisiting reliability in large-scale machine learning research clusters", HPCA 2025)."""

GPUS_PER_HOST = 8
"""The machines of that study have so many. It counts failures of whole machines, too. So a host of
a job without GPUs is taken to fail as often as one of these machines."""

ASSUMED_HOURS = GPU_MTTF_S / GPUS_PER_HOST / 3600
"""Hours until a host fails, on average, while nothing was seen."""

MOST_HOURS = 10 * ASSUMED_HOURS
"""Once more hours of hosts were seen, what was seen counts half: a cluster that has become better
or worse is believed before long. A host is so never taken to fail less often than once in
ASSUMED_HOURS + MOST_HOURS."""

LEAST_HOURS = 1.0
"""With fewer hours of hosts and no loss nothing is said to be learnt."""


@dataclass(frozen=True)
class FailuresSeen:
    """``losses`` in ``hours`` of hosts that ran protected jobs; older ones count less."""

    losses: float = 0.0
    hours: float = 0.0

    def after(self, losses: int, hours: float) -> FailuresSeen:
        """What was seen once so much more was seen."""
        seen = FailuresSeen(self.losses + losses, self.hours + hours)
        while seen.hours > MOST_HOURS:
            seen = FailuresSeen(seen.losses / 2, seen.hours / 2)
        return seen

    @property
    def times_assumed(self) -> float:
        """The rate, as a multiple of the assumed one."""
        return (1 + self.losses) * ASSUMED_HOURS / (ASSUMED_HOURS + self.hours)

    @property
    def anything(self) -> bool:
        return self.losses > 0 or self.hours >= LEAST_HOURS


NOTHING_SEEN = FailuresSeen()


def mean_time_to_failure(
    hosts: int, gpus: int, of_a_host: float | None, seen: FailuresSeen = NOTHING_SEEN
) -> float:
    """Seconds until one of a job's hosts fails, on average. ``hosts``: their number; ``gpus``: how
    many the job uses; ``of_a_host``: the same for a single host, if the cluster file says so; then
    what was ``seen`` does not count."""
    if of_a_host is not None:
        return of_a_host / hosts
    return GPU_MTTF_S / (gpus or GPUS_PER_HOST * hosts) / seen.times_assumed


def source(of_a_host: float | None, seen: FailuresSeen) -> str:
    """Where the rate comes from, as text: ``given``, ``assumed``, or what it was learnt from."""
    if of_a_host is not None:
        return "given"
    if not seen.anything:
        return "assumed"
    losses = f"{figures(seen.losses)}" if seen.losses % 1 else f"{seen.losses:.0f}"
    what = "loss" if seen.losses == 1 else "losses"
    return f"learnt from {losses} {what} in {seen.hours:.0f} host-hours"
