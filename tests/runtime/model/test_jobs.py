# SPDX-License-Identifier: Apache-2.0
"""What a request becomes: a name, an overlay, and an environment that stays true."""

from __future__ import annotations

import msgspec
import pytest

from liveshift.criu_glue.network.overlay import Overlay
from liveshift.errors import LiveshiftError, Refused, WrongUsage
from liveshift.interposer.library import library_path
from liveshift.runtime.config import cluster as config
from liveshift.runtime.messages import SNAPSHOTS_AUTO, SNAPSHOTS_OFF, CapsuleState, RunJob
from liveshift.runtime.model.interval import SnapshotCost
from liveshift.runtime.model.jobs import MOST_CAPSULES, Capsule, Job, check_request, overlay_for

CLUSTER = """
[cluster]
name = "jobs"
orchestrator = "10.88.0.2:7400"
overlay = "10.99.0.0/22"
[hosts.h0]
address = "10.88.0.10"
[env]
pass = ["*"]
drop = ["SECRET*"]
set = { OMP_NUM_THREADS = "1" }
"""


def request(**changes: object) -> RunJob:
    values: dict[str, object] = {
        "name": "gpt",
        "nnodes": 2,
        "argv": ["torchrun", "train.py"],
        "env": {},
        "cwd": "/work",
        "gid": 100,
        "groups": [100, 7],
    }
    return RunJob(**(values | changes))  # type: ignore[arg-type]


def job(**changes: object) -> Job:
    run = request(**({"nnodes": 3} | changes))
    capsules = {f"gpt/{i}": Capsule(f"gpt/{i}", i, f"h{i}", i + 1) for i in range(run.nnodes)}
    return Job("gpt", Overlay(5, "10.99.0.0/24"), run, 1000, 0.0, capsules)


def spec_env(job: Job, name: str) -> dict[str, str]:
    return job.spec(job.capsules[name], config.parse(CLUSTER).cluster).env


def test_the_address_book_and_the_hosts_file_name_every_capsule() -> None:
    made = job(umask=0o027)
    book = made.book()
    assert (book.job, book.vni, book.subnet) == ("gpt", 5, "10.99.0.0/24")
    assert book.where == {
        "10.99.0.1": ("h0", 1),
        "10.99.0.2": ("h1", 2),
        "10.99.0.3": ("h2", 3),
    }
    spec = made.spec(made.capsules["gpt/1"], config.parse(CLUSTER).cluster)
    assert (spec.name, spec.index, spec.cwd, spec.uid, spec.gid, spec.groups) == (
        "gpt/1",
        1,
        "/work",
        1000,
        100,
        [100, 7],
    )
    assert spec.umask == 0o027
    lines = spec.hosts_file.splitlines()
    assert "127.0.0.1 localhost" in lines
    assert [line for line in lines if line.startswith("10.")] == [
        "10.99.0.1 gpt-0",
        "10.99.0.2 gpt-1",
        "10.99.0.3 gpt-2",
    ]


def test_what_makes_a_rank_a_rank() -> None:
    env = spec_env(job(), "gpt/1")
    assert (env["PET_NNODES"], env["PET_NODE_RANK"]) == ("3", "1")
    assert (env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"]) == ("1", "3", "0")
    assert env["MASTER_ADDR"] == env["PET_MASTER_ADDR"] == "10.99.0.1"
    assert env["MASTER_PORT"] == env["PET_MASTER_PORT"]
    assert env["GLOO_SOCKET_IFNAME"] == env["NCCL_SOCKET_IFNAME"] == "eth0"
    assert env["NCCL_HOSTID"] == env["HOSTNAME"] == "gpt-1"


def test_a_single_capsule_is_no_rank_unless_it_is_asked_for() -> None:
    """Programs that find RANK start torch.distributed; launchers believe they were launched."""
    ranks = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    env = spec_env(job(nnodes=1), "gpt/0")
    assert not ranks & set(env)
    assert not [name for name in env if name.startswith("PET_")]
    assert env["HOSTNAME"] == "gpt-0"
    assert env["LIVESHIFT_CAPSULE"] == "gpt/0"
    env = spec_env(job(nnodes=1, env_ranks=True), "gpt/0")
    assert (env["RANK"], env["WORLD_SIZE"], env["PET_NNODES"]) == ("0", "1", "1")
    assert env["MASTER_ADDR"] == "10.99.0.1"
    assert spec_env(job(), "gpt/1") == spec_env(job(env_ranks=True), "gpt/1")


def test_nothing_in_the_environment_changes_with_a_move() -> None:
    before, after = job(), job()
    after.capsules["gpt/1"].host, after.capsules["gpt/1"].epoch = "h9", 7
    assert spec_env(before, "gpt/1") == spec_env(after, "gpt/1")
    assert spec_env(before, "gpt/0") == spec_env(after, "gpt/0")


def test_the_callers_variables_pass_as_the_cluster_file_says() -> None:
    caller = {
        "PATH": "/opt/bin:/bin",
        "SECRET_TOKEN": "x",
        "OMP_NUM_THREADS": "8",
        "RANK": "99",
        "NOTIFY_SOCKET": "/run/systemd/notify",
        "LIVESHIFT_CONFIG": "/etc/other.toml",
        "LD_PRELOAD": "/opt/tcmalloc.so",
    }
    env = spec_env(job(env=caller), "gpt/1")
    assert env["PATH"] == "/opt/bin:/bin"
    assert env["OMP_NUM_THREADS"] == "1"
    assert env["RANK"] == "1"
    assert env["LD_PRELOAD"].split(":") == [str(library_path()), "/opt/tcmalloc.so"]
    assert not {"SECRET_TOKEN", "NOTIFY_SOCKET", "LIVESHIFT_CONFIG"} & set(env)


def test_a_name_is_kept_or_given() -> None:
    cluster = config.parse(CLUSTER).cluster
    assert check_request(request(), set(), cluster, 1) == "gpt"
    assert check_request(request(name=""), {"gpt"}, cluster, 5) == "job5"


def test_a_long_command_and_environment_are_taken_as_long_as_the_kernel_takes_them() -> None:
    cluster = config.parse(CLUSTER).cluster
    argv = ["true", "x" * ((128 << 10) - 1), *["\udcff" * 100_000] * 15]  # no UTF-8
    assert check_request(request(argv=argv, env={"A": "x" * 100_000}), set(), cluster, 1) == "gpt"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"argv": []}, "no command given"),
        ({"nnodes": 0}, "--nnodes 0"),
        ({"argv": ["true", "x" * (128 << 10)]}, "an argument of the command has 131 kB, and the"),
        ({"env": {"A": "x" * (128 << 10)}}, "the variable A has 131 kB, and the kernel takes at"),
        ({"argv": ["true", *["x" * 100_000] * 21]}, "its environment have 2.10 MB, and the kernel"),
        ({"argv": ["x"] * (1 << 18)}, "its environment have 2.62 MB, and the kernel takes at most"),
        ({"nnodes": MOST_CAPSULES + 1}, f"--nnodes {MOST_CAPSULES + 1}"),
        ({"name": "taken"}, '"taken" is running already'),
        ({"collective": 60.0}, "a collective timeout of 60 s is too short"),
        ({"collective": -1.0}, "found -1.0, expected a number of seconds"),
        *(
            ({"name": name}, "invalid job name")
            for name in ("GPT", "a b", "../x", "a/b", "-a", "a-", "a" * 33, "ä", "a\n")
        ),
    ],
)
def test_a_request_that_can_be_no_job_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises((Refused, WrongUsage), match=words):
        check_request(request(**changes), {"taken"}, config.parse(CLUSTER).cluster, 1)


def test_a_jobs_own_collective_timeout_sets_its_deadlines() -> None:
    cluster = config.parse(CLUSTER).cluster
    assert job().timeouts(cluster) == cluster.timeouts
    assert job(collective=200.0).timeouts(cluster).standstill == 100


def test_each_job_gets_a_subnet_and_a_number_of_its_own() -> None:
    cluster = config.parse(CLUSTER).cluster
    assert overlay_for(cluster, set()) == Overlay(1, "10.99.0.0/24")
    assert overlay_for(cluster, {1, 2}) == Overlay(3, "10.99.2.0/24")
    assert overlay_for(cluster, {1, 3}) == Overlay(2, "10.99.1.0/24")
    with pytest.raises(LiveshiftError, match=r"all subnets of 10\.99\.0\.0/22 are taken"):
        overlay_for(cluster, {1, 2, 3, 4})


def test_addresses_of_the_largest_job_fit_and_leave_the_gateway() -> None:
    overlay = Overlay(1, "10.99.0.0/24")
    addresses = {overlay.address(index) for index in range(MOST_CAPSULES)}
    assert len(addresses) == MOST_CAPSULES
    assert overlay.gateway == "10.99.0.254"
    assert overlay.gateway not in addresses
    assert all(len(overlay.veth(index)) < 16 for index in (0, MOST_CAPSULES))  # IFNAMSIZ


def test_how_often_snapshots_are_taken() -> None:
    auto = CLUSTER + '[snapshots]\nevery = "auto"\nmttf = "24h"\n'
    off = CLUSTER + '[snapshots]\nevery = "off"\n'
    each = {"off": off, "auto": auto, "1": CLUSTER + "[snapshots]\nevery = 7\n"}
    clusters = {name: config.parse(text).cluster for name, text in each.items()}

    def every(own: float) -> list[float]:
        return [job(snapshot_every=own).snapshot_every(cluster) for cluster in clusters.values()]

    assert every(0.0) == [0.0, 1000.0, 7.0], "5 s each, which may come every 1,000 s"
    assert every(150.0) == [150.0] * 3
    assert every(SNAPSHOTS_OFF) == [0.0] * 3
    assert every(SNAPSHOTS_AUTO)[1:] == [1000.0, pytest.approx(3483.45, abs=0.01)]

    def asked(own: float) -> list[bool]:
        return [job(snapshot_every=own).snapshots_asked(each) for each in clusters.values()]

    assert asked(0.0) == [True, False, True]
    assert asked(SNAPSHOTS_AUTO) == [True] * 3
    assert [job().snapshots_auto(cluster) for cluster in clusters.values()] == [False, True, False]


def test_an_interval_that_is_chosen_goes_with_size_gpus_and_what_was_measured() -> None:
    cluster = config.parse(CLUSTER).cluster
    made = job(snapshot_every=SNAPSHOTS_AUTO)

    def every() -> float:
        return made.snapshot_every(cluster)

    for capsule, size in zip(made.capsules.values(), (100, 500, 300), strict=True):
        capsule.seen = CapsuleState(capsule.name, 1, 3, size * 10**6, 0, 0.0, [], "train")
    # 0.5 s and 500 MB at 1 GB/s; three hosts as 24 GPUs, of which one fails every 337.07 h.
    assert every() == pytest.approx((2 * 1.0 * 7.9 * 3600 * 1024 / 24) ** 0.5)
    for capsule in made.capsules.values():
        assert capsule.seen is not None
        capsule.seen = msgspec.structs.replace(capsule.seen, gpus=["GPU-1", "GPU-2"])
    assert every() == pytest.approx((2 * 1.0 * 7.9 * 3600 * 1024 / 6) ** 0.5)
    made.snapshot_cost = SnapshotCost(0.25)
    assert every() == pytest.approx((2 * 0.25 * 7.9 * 3600 * 1024 / 6) ** 0.5)
    made.capsules["gpt/1"].host = "h0"  # two hosts now
    for capsule in made.capsules.values():
        capsule.seen = None
    assert every() == pytest.approx((2 * 0.25 * 7.9 * 3600 * 1024 / 16) ** 0.5)


def test_a_job_that_enters_a_rewind_or_a_suspension_has_new_owners_and_no_grant() -> None:
    made = job()
    before = made.book()
    for capsule in made.capsules.values():
        capsule.granted = True
    made.capsules["gpt/1"].seen = CapsuleState("gpt/1", 2, 2, 0, 40, 1.0, [1], "true")
    made.enter({name: ("h9", c.epoch + 2) for name, c in made.capsules.items()}, 1, "suspended")
    assert (made.state, made.rewinds) == ("suspended", 1)
    owners = [(c.host, c.epoch, c.granted, c.seen) for c in made.capsules.values()]
    assert owners == [("h9", epoch, False, None) for epoch in (3, 4, 5)]
    book = made.book()
    assert book != before
    assert (book.rewinds, set(book.where.values())) == (1, {("h9", 3), ("h9", 4), ("h9", 5)})
