# SPDX-License-Identifier: Apache-2.0
"""Real sandboxes with the real capsule-init: what a command finds inside, and what it does not."""

from __future__ import annotations

import errno
import os
import platform
import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from captured import ENV, PYTHON, ROOT_PID
from one_sandbox import Start, ended, netns, plan, said, start

from liveshift.criu_glue.capsule.output import STDERR
from liveshift.criu_glue.capsule.sandboxes import (
    PAGES,
    STDERR_FD,
    STDOUT_FD,
    Sandbox,
    SandboxPlan,
    build_empty,
    end,
    kill_tree,
    started,
)
from liveshift.criu_glue.capsule.sandboxes import start as sandbox_start
from liveshift.criu_glue.images import pids

__all__ = ["netns", "plan", "start"]

NOBODY = 65534


@pytest.mark.root
def test_a_sandbox_has_everything_of_its_own(start: Start, plan: SandboxPlan) -> None:
    host = os.uname().nodename
    spaces = ("cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts")
    stands = start(
        "sh",
        "-c",
        "hostname; echo $$; grep gpt-1 /etc/hosts; ls -A /tmp; ls -A /dev/shm; echo private"
        "> /tmp/mine; echo memory > /dev/shm/mine; ls /sys/class/net; wc -l < /proc/net/dev;"
        f"for n in {' '.join(spaces)}; do readlink /proc/self/ns/$n; done",
    )
    assert ended(stands) == "exit 0"
    name, pid, line, *listing = said(stands).splitlines()
    assert (name, pid, line) == ("gpt-1", str(ROOT_PID), "10.99.0.2 gpt-1")
    assert listing[:2] == [Path(PAGES).name, "lo"]  # nothing in /tmp, in /dev/shm only our pages
    own = dict(zip(spaces, listing[-8:], strict=True))
    alike = {s for s in spaces if own[s] == os.readlink(f"/proc/self/ns/{s}")}
    assert alike == {"cgroup", "user"}
    assert (plan.tmp / "mine").read_text() == "private\n"
    assert not Path("/dev/shm/mine").exists()
    assert os.uname().nodename == host
    assert Path("/etc/hosts").read_text() != plan.hosts_file


@pytest.mark.root
def test_a_command_runs_as_the_person_who_asked(start: Start, plan: SandboxPlan) -> None:
    theirs = replace(plan, uid=NOBODY, gid=NOBODY, groups=(NOBODY, 7))
    stands = start(
        "sh",
        "-c",
        f"id -u; id -g; id -G; pwd; touch /tmp/a /dev/shm/b {PAGES}/c; stat -c %a /tmp /dev/shm;"
        "ls /proc/1/root; echo $HOME-; grep SigIgn /proc/self/status",
        plan=theirs,
        cwd="/usr",
    )
    assert ended(stands) == "exit 0"
    *lines, ignored = said(stands).splitlines()
    assert lines == ["65534", "65534", "65534 7", "/usr", "1777", "1777", "-"]
    libc_own = 1 << 31 | 1 << 32  # posix_spawn leaves them so (make uses it), and nobody sends them
    assert int(ignored.split()[1], 16) & ~libc_own == 0
    assert "Permission denied" in said(stands, STDERR)  # what is process 1's stays root's


@pytest.mark.parametrize("user", [0, NOBODY])
@pytest.mark.root
def test_a_command_can_open_its_output_by_name(start: Start, plan: SandboxPlan, user: int) -> None:
    theirs = replace(plan, uid=user, gid=user)
    stands = start("sh", "-c", "echo out > /dev/stdout; echo err > /dev/stderr", plan=theirs)
    assert ended(stands) == "exit 0"
    assert (said(stands), said(stands, STDERR)) == ("out\n", "err\n")


@pytest.mark.root
def test_the_output_of_a_restored_tree_is_its_users_too(plan: SandboxPlan) -> None:
    theirs = replace(plan, uid=NOBODY, gid=NOBODY)
    stands = build_empty(theirs, ROOT_PID, pids.RESERVED)
    try:
        owners = {os.stat(f"/proc/{stands.init}/fd/{fd}").st_uid for fd in (STDOUT_FD, STDERR_FD)}
    finally:
        end(stands)
    assert owners == {NOBODY}


@pytest.mark.parametrize("umask", [0o002, 0o077])
@pytest.mark.root
def test_a_command_has_the_umask_of_its_caller(plan: SandboxPlan, umask: int) -> None:
    stands = sandbox_start(plan, ["sh", "-c", "umask; touch /tmp/new"], ENV, "/", umask)
    try:
        assert ended(stands) == "exit 0"
    finally:
        end(stands)
    assert said(stands) == f"{umask:04o}\n"
    assert (plan.tmp / "new").stat().st_mode & 0o777 == 0o666 & ~umask


@pytest.mark.root
def test_shared_paths_below_tmp_stay_visible(
    start: Start, plan: SandboxPlan, tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "there").write_text("already\n")
    assert str(shared).startswith("/tmp/")
    wider = replace(plan, shared=(str(shared), "/usr"))
    stands = start("sh", "-c", f"cat {shared}/there; echo new > {shared}/here", plan=wider)
    assert ended(stands) == "exit 0"
    assert said(stands) == "already\n"
    assert (shared / "here").read_text() == "new\n"
    assert not [p for p in plan.tmp.rglob("*") if p.is_file()]  # it is not the sandbox's to carry


@pytest.fixture
def secret() -> Iterator[Path]:
    """A directory outside /tmp with something in it, and a mount below it."""
    path = Path(f"/var/tmp/ls-test-secret-{os.getpid()}")
    (path / "below").mkdir(parents=True)
    (path / "key").write_text("secret\n")
    subprocess.run(["mount", "-t", "tmpfs", "ls-test", str(path / "below")], check=True)
    (path / "below" / "image").write_text("secret\n")
    yield path
    subprocess.run(["umount", str(path / "below")], check=True)
    subprocess.run(["rm", "-rf", str(path)], check=True)


@pytest.mark.parametrize("user", [0, NOBODY])
@pytest.mark.root
def test_hidden_directories_look_empty(
    start: Start, plan: SandboxPlan, secret: Path, user: int
) -> None:
    """And nobody inside looks below, or writes there: not root, and not root of its own making."""
    nested = (str(secret), str(secret / "below"), "/nowhere/at/all")
    hiding = replace(plan, uid=user, gid=user, hidden=nested)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(secret / "socket"))
        server.listen()
        (secret / "socket").chmod(0o777)
        stands = start(
            "sh",
            "-c",
            f"ls -A {secret}; stat -c '%a %u' {secret}; touch {secret}/mine; cat {secret}/key;"
            f"umount {secret} && echo away; umount -l {secret} && echo away;"
            f"mount -t tmpfs none /mnt && echo mounted; nsenter --mount=/proc/1/ns/mnt true &&"
            f"echo entered; unshare -rm sh -c 'umount {secret} && echo away; ls -A {secret}';"
            f"unshare -rm sh -c 'umount -l {secret}; cat {secret}/key'; ls /nowhere;"
            f"{PYTHON} -Sc 'import socket; s = socket.socket(socket.AF_UNIX);"
            f's.connect("{secret}/socket")\'',
            plan=hiding,
        )
        ended(stands)
    assert said(stands) == "555 0\n", said(stands, STDERR)
    complaints = said(stands, STDERR)
    assert f"touch: cannot touch '{secret}/mine': Read-only file system" in complaints
    assert "No such file or directory" in complaints.splitlines()[-1]
    assert "secret" not in complaints.replace(str(secret), "")
    assert (secret / "below" / "image").read_text() == "secret\n"


@pytest.mark.root
def test_a_hidden_directory_that_shared_files_lie_around(
    start: Start, plan: SandboxPlan, tmp_path: Path
) -> None:
    """Bringing back a part of /tmp does not bring back what is to be hidden in it."""
    (tmp_path / "shared" / "keys").mkdir(parents=True)
    (tmp_path / "shared" / "keys" / "key").write_text("secret\n")
    hiding = replace(
        plan, shared=(str(tmp_path / "shared"),), hidden=(str(tmp_path / "shared" / "keys"),)
    )
    stands = start(
        "sh", "-c", f"ls -A {tmp_path}/shared; ls -A {tmp_path}/shared/keys", plan=hiding
    )
    assert ended(stands) == "exit 0"
    assert said(stands) == "keys\n"


RIGHTS = {0, 1, 3, 4, 5, 6, 7, 8, 10, 11, 13, 14, 15, 18, 23, 24, 28, 29, 31}
"""Numbers of linux/capability.h."""
SYS_RESOURCE = 24


@pytest.mark.root
def test_root_in_a_sandbox_does_not_run_the_machine(start: Start) -> None:
    """What it has, and some of what it therefore cannot do."""
    refused = (
        "mknod /tmp/disk b 8 0",
        "chattr +i /tmp",
        "ip link set lo down",
        "ip link add x type veth",
        "nft list tables",
        "mount -t tmpfs none /mnt",
        "umount /proc",
        "ls /proc/1/root/",
        "readlink -v /proc/1/fd/20",
        "nsenter --target 1 --uts true",
        "unshare --net true",
    )
    tried = ";".join(f"{command} >&2 && echo {command.split()[0]} worked" for command in refused)
    stands = start("sh", "-c", f"grep Cap /proc/self/status; {tried}; true")
    assert ended(stands) == "exit 0"
    sets = dict(line.split() for line in said(stands).splitlines() if "worked" not in line)
    assert "worked" not in said(stands)
    assert len(said(stands, STDERR).splitlines()) >= len(refused)
    for which in ("CapEff:", "CapPrm:", "CapBnd:"):
        held = {number for number in range(64) if int(sets[which], 16) >> number & 1}
        assert held | {SYS_RESOURCE} == RIGHTS  # that one the agent itself may lack
    assert int(sets["CapInh:"], 16) == int(sets["CapAmb:"], 16) == 0


@pytest.mark.root
def test_only_a_sandbox_of_its_own_is_emptied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record whose process 1 is in our own pid namespace would have `kill -1` end the host."""
    monkeypatch.setattr(subprocess, "run", lambda *command, **_: pytest.fail(f"ran {command}"))
    plan = SandboxPlan(Path("gpt.1"), Path("netns"), "gpt-1", "", 0, 0, ())
    with pytest.raises(ValueError, match="not process 1 of gpt-1's own pid namespace"):
        kill_tree(Sandbox(plan, os.getpid(), started(os.getpid())))


def test_io_uring_is_not_there(start: Start) -> None:
    program = "import ctypes, os; print(ctypes.CDLL(None, use_errno=True).syscall(425, 8, 0),"
    program += "os.strerror(ctypes.get_errno()))"
    program += "; pid = os.fork(); print(ctypes.CDLL(None).syscall(425, 8, 0)) if not pid else"
    program += " os.wait()"  # nor for its children
    stands = start(PYTHON, "-Sc", program)
    assert ended(stands) == "exit 0"
    assert said(stands).split("\n")[:2] == ["-1", "-1 Function not implemented"] or said(
        stands
    ).split("\n")[:2] == ["-1 Function not implemented", "-1"]


I386_CALL = """
import ctypes, mmap
code = "53 b8a9010000 bb08000000 31c9 cd80 5b c3"  # io_uring_setup(8, NULL) by int 0x80
memory = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
memory.write(bytes.fromhex(code))
print(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(memory)))())
"""
X32_CALL = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
print(libc.syscall(0x40000000 | 425, 8, 0) * ctypes.get_errno())
"""


@pytest.mark.root
@pytest.mark.parametrize(
    "program", [I386_CALL, X32_CALL] if platform.machine() == "x86_64" else [X32_CALL]
)
def test_io_uring_is_not_there_for_programs_of_another_kind_of_processor(
    start: Start, program: str
) -> None:
    """A 64-bit kernel also has the system calls of 32-bit programs, if it was built so."""
    stands = start(PYTHON, "-Sc", program)
    assert (ended(stands), said(stands)) in [
        ("exit 0", f"{-errno.ENOSYS}\n"),
        (f"signal {int(signal.SIGSEGV)}", ""),  # it has none of them
    ]


@pytest.mark.root
def test_stdin_is_empty_and_nothing_else_is_open(start: Start) -> None:
    stands = start("sh", "-c", "read x; echo $?; ls /proc/$$/fd")
    assert ended(stands) == "exit 0"
    assert said(stands) == "1\n0\n1\n2\n"
