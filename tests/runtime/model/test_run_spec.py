# SPDX-License-Identifier: Apache-2.0
"""What the journal keeps of jobs is read after an upgrade, and after a host was removed."""

from __future__ import annotations

from pathlib import Path

import msgspec
from fleet_scene import CLUSTER, a_fleet

from liveshift.runtime.config import cluster as config
from liveshift.runtime.fleet.fleet import Fleet
from liveshift.runtime.fleet.status import status
from liveshift.runtime.messages import RunJob
from liveshift.runtime.model import run_spec

RUN = RunJob("b", 1, ["true"], {"A": "1"}, "/", 1000, [100])


def fleet_on(state: Path, text: str = CLUSTER) -> Fleet:
    return Fleet(config.parse(text.replace("{state}", str(state))).cluster)


def test_a_job_that_an_earlier_build_has_written_is_known(tmp_path: Path) -> None:
    """There the class was called Run, and its name was stored."""
    before = fleet_on(tmp_path)
    run = msgspec.to_builtins(RUN) | {"t": "Run"}
    spec = msgspec.msgpack.encode({"uid": 1000, "run": run})
    before.journal.add_job("b", 1, "10.99.0.0/24", spec, {"b/0": (0, "h0")})
    before.journal.file.close()
    job = fleet_on(tmp_path).jobs["b"]
    assert (job.request, job.uid) == (RUN, 1000)


def test_a_job_of_a_build_that_kept_no_umask_is_known() -> None:
    run = msgspec.to_builtins(RUN)
    del run["umask"]
    decoded, _ = run_spec.decode(msgspec.msgpack.encode({"uid": 7, "run": run}))
    assert decoded.umask == -1
    kept = msgspec.structs.replace(RUN, umask=0o077)
    assert run_spec.decode(run_spec.encode(kept, 7)) == (kept, 7)


def test_no_name_of_a_class_is_stored() -> None:
    spec = run_spec.encode(RUN, 7)
    assert b"RunJob" not in spec
    assert run_spec.decode(spec) == (RUN, 7)


def test_a_job_that_has_ended_on_a_host_that_was_removed_is_shown(tmp_path: Path) -> None:
    before = a_fleet(tmp_path)
    for capsule in ("a/0", "a/1"):
        before.journal.set_ended(capsule, 0)
    before.journal.set_job("a", "ended", 0)
    before.journal.file.close()
    removed = '[hosts.h1]\naddress = "10.88.0.11"\nslots = 4\n'
    assert removed in CLUSTER
    fleet = fleet_on(tmp_path, CLUSTER.replace(removed, ""))
    (job,) = status(fleet, lambda _: True, sees_all=True).jobs
    assert [(c.host, c.state) for c in job.capsules] == [("h0", "ended"), ("h1", "ended")]
