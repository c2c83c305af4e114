# SPDX-License-Identifier: Apache-2.0
"""A host that is dead counts as lost later than torchrun's own keep-alive ends: what torchrun does
until then is taken back with the rest.

torchrun's c10d rendezvous drops an agent whose keep-alive has not come for 15 s (three of 5 s;
torch.distributed.elastic.rendezvous.dynamic_rendezvous, RendezvousTimeout and keep_alive_interval).
"""

from __future__ import annotations

import time

import pytest
from lab_session import LONG, LabSession, NewLab
from moving_job import AFTER, Job
from protected_job import events, steps, wait_past, wait_protected, wait_steps
from reference_runs import References

from liveshift.launcher import lab as labs

pytestmark = [pytest.mark.lab, pytest.mark.long, pytest.mark.timeout(300)]

KEEP_ALIVE_S, SUSPICION_S = 15.0, 18.0
JOIN = (
    "exec torchrun --nnodes 2 --nproc-per-node 1 --max-restarts 0 --rdzv-backend c10d"
    ' --rdzv-id job --rdzv-endpoint "$PET_MASTER_ADDR:29411" "$@"'
)


@pytest.fixture(scope="module")
def lab(new_lab: NewLab) -> LabSession:
    timeouts = f"collective=600,suspicion={SUSPICION_S:g},heartbeat=1"
    return new_lab("--hosts", "3", "--snapshots", "every=2", "--timeouts", timeouts)


@pytest.mark.parametrize("lost", [0, 1])
def test_agents_of_torchrun_that_miss_each_other_go_back_with_their_ranks(
    lab: LabSession, references: References, lost: int
) -> None:
    """Rank 0's agent of torchrun has the store in which the keep-alives are."""
    argv = ("sh", "-c", JOIN, "torchrun", *LONG[1:])
    job: Job = lab.start(f"late{lost}", argv, nnodes=2)
    job.wait_step(10)
    wait_protected(job)
    victim, before = job.seen(lost).host, len(steps(job, 0))
    cut = time.time()
    labs.kill_host(lab.lab, victim)
    while not (rewound := events(job, "rewound")):
        assert time.time() - cut < 120
        assert job.code() is None, job.output()
        time.sleep(0.5)
    assert rewound[0].time - cut > KEEP_ALIVE_S
    wait_steps(job, rewound[0].time, AFTER)
    wait_past(job, before)
    assert len(events(job, "rewound")) == 1
    assert job.code() is None
    lab.boot(victim)
    job.argv = LONG  # the script computes the same without torchrun
    job.assert_begins_like_never_moved(references)
