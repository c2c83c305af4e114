# SPDX-License-Identifier: Apache-2.0
"""Which file goes along, which is left alone: the rule of the longest listed path, and mounts."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from liveshift.criu_glue.capsule.mounts import Mount, PathKind, Placement, mount_table


def mounted(point: str, kind: str) -> Mount:
    return Mount("8:1", "/", point, kind, "source")


MOUNTS = {
    1: mounted("/", "ext4"),
    2: mounted("/proc", "proc"),
    3: mounted("/dev/shm", "tmpfs"),
    4: mounted("/tmp", "ext4"),
    5: mounted("/data", "nfs4"),
    6: mounted("/data/scratch", "xfs"),
    7: mounted("/scratch", "xfs"),
    8: mounted("/tmp/lab", "ext4"),
    9: mounted("/home", "ext4"),
    10: mounted("/sys/fs/cgroup", "cgroup2"),
}
PLACEMENT = Placement(
    shared=("/data", "/home/ann/src", "/tmp/lab", "/opt/shared"),
    carried=("/data/local", "/home/ann", "/opt/shared/mine", "/var/ckpt"),
)


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("/data/set.bin", PathKind.SHARED),
        ("/data", PathKind.SHARED),
        ("/data/local/log", PathKind.CARRIED),  # the longer one decides
        ("/data/localized", PathKind.SHARED),  # a name that only begins alike
        ("/data/scratch/x", PathKind.FOREIGN),  # a mount below a listed path is not covered by it
        ("/home/ann/notes", PathKind.CARRIED),
        ("/home/ann/src/train.py", PathKind.SHARED),
        ("/home/bob/notes", PathKind.FOREIGN),
        ("/opt/shared/lib.so", PathKind.SHARED),
        ("/opt/shared/mine/log", PathKind.CARRIED),
        ("/opt/other", PathKind.LOCAL),
        ("/var/ckpt/1.pt", PathKind.CARRIED),
        ("/var/log/syslog", PathKind.LOCAL),
        ("/etc/passwd", PathKind.LOCAL),
        ("/", PathKind.LOCAL),
        ("/scratch/x", PathKind.FOREIGN),
        ("/tmp/x", PathKind.PRIVATE),
        ("/tmp/lab/x", PathKind.SHARED),  # shared paths below /tmp stay shared
        ("/tmp/labs", PathKind.PRIVATE),
        ("/dev/shm/sem.x", PathKind.PRIVATE),
        ("/proc/self/status", PathKind.PSEUDO),
        ("/sys/fs/cgroup/cgroup.procs", PathKind.PSEUDO),
    ],
)
def test_where_a_path_lives(path: str, place: PathKind) -> None:
    assert PLACEMENT.of_path(path, MOUNTS) is place


def test_an_open_file_is_judged_by_its_own_mount() -> None:
    """What was opened before something was mounted over it is still where it was."""
    assert PLACEMENT.of_open_file("/data/x", MOUNTS[5]) is PathKind.SHARED
    assert PLACEMENT.of_open_file("/scratch/x", MOUNTS[1]) is PathKind.LOCAL
    assert PLACEMENT.of_open_file("/scratch/x", MOUNTS[7]) is PathKind.FOREIGN


def test_a_listed_path_covers_its_own_file_system_only() -> None:
    everything = Placement(shared=("/",), carried=("/scratch",))
    assert everything.of_path("/etc/passwd", MOUNTS) is PathKind.SHARED
    assert everything.of_path("/scratch/x", MOUNTS) is PathKind.CARRIED
    assert everything.of_path("/home/ann", MOUNTS) is PathKind.FOREIGN


@pytest.mark.root
def test_the_mounts_of_a_task_are_read_with_their_odd_names(tmp_path: Path) -> None:
    odd = tmp_path / "with space ünï\\back"
    odd.mkdir()
    task = subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs odd "$0" && echo ready && read _', odd],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert task.stdin is not None
    assert task.stdout is not None
    with task.stdin, task.stdout:
        assert task.stdout.readline() == b"ready\n"
        mounts = mount_table(task.pid)
        task.stdin.close()
        assert task.wait(10) in (0, 1)
    seen = [(mount.point, mount.kind) for mount in mounts.values()]
    assert (str(odd), "tmpfs") in seen
    assert ("/proc", "proc") in seen
    listed = Placement((str(odd),), ())
    assert listed.of_path(f"{odd}/x", mounts) is PathKind.SHARED
