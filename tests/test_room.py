# SPDX-License-Identifier: Apache-2.0
"""Real rooms with the real capsule-init: what a command finds inside, and what is seen of it."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from liveshift.criu_glue import output, room
from liveshift.criu_glue.mounts import Placement
from liveshift.criu_glue.output import HEADER, MARK, STDERR, STDOUT, Record
from liveshift.criu_glue.room import PAGES, PID_FLOOR, Room, RoomPlan
from liveshift.criu_glue.survey import Survey, fingerprint, inner_pid, survey, tasks
from liveshift.errors import LiveshiftError

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="rooms are made by root")

PYTHON = str(Path(sys.executable).resolve())  # not the environment's, which may lie below /tmp
ENV = {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin"}
NOBODY = 65534
ROOT_PID = PID_FLOOR + 1
numbers = itertools.count()


@pytest.fixture
def netns() -> Iterator[Path]:
    name = f"ls-test-{os.getpid()}-{next(numbers)}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    yield Path("/run/netns") / name
    subprocess.run(["ip", "netns", "del", name], check=True)


@pytest.fixture
def plan(tmp_path: Path, netns: Path) -> RoomPlan:
    directory = tmp_path / "capsules" / "gpt.1"
    directory.mkdir(parents=True)
    hosts = "127.0.0.1 localhost\n10.99.0.2 gpt-1\n"
    return RoomPlan(directory, netns, "gpt-1", hosts, 0, 0, ())


Start = Callable[..., Room]


@pytest.fixture
def start(plan: RoomPlan) -> Iterator[Start]:
    rooms: list[Room] = []

    def begin(*argv: str, cwd: str = "/", plan: RoomPlan = plan) -> Room:
        rooms.append(room.start(plan, argv, ENV, cwd))
        return rooms[-1]

    yield begin
    for stands in rooms:
        room.end(stands)


def until(true: Callable[[], object], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.002)


def ended(stands: Room) -> str:
    until(lambda: not stands.alive())
    return stands.plan.status.read_text().strip()


def said(stands: Room, stream: int = STDOUT) -> str:
    records = output.split(stands.plan.log.read_bytes())
    return b"".join(r.data for r in records if r.stream == stream).decode()


# ---- inside ------------------------------------------------------------------------------------


@as_root
def test_a_room_has_everything_of_its_own(start: Start, plan: RoomPlan) -> None:
    host = os.uname().nodename
    spaces = ("cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts")
    stands = start(
        "sh", "-c",
        "hostname; echo $$; grep gpt-1 /etc/hosts; ls -A /tmp; ls -A /dev/shm; echo private"
        "> /tmp/mine; echo memory > /dev/shm/mine; ls /sys/class/net; wc -l < /proc/net/dev;"
        f"for n in {' '.join(spaces)}; do readlink /proc/self/ns/$n; done",
    )  # fmt: skip
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


@as_root
def test_a_command_runs_as_the_person_who_asked(start: Start, plan: RoomPlan) -> None:
    theirs = replace(plan, uid=NOBODY, gid=NOBODY, groups=(NOBODY, 7))
    stands = start(
        "sh", "-c",
        f"id -u; id -g; id -G; pwd; touch /tmp/a /dev/shm/b {PAGES}/c; stat -c %a /tmp /dev/shm;"
        "ls /proc/1/root; echo $HOME-; grep SigIgn /proc/self/status",
        plan=theirs, cwd="/usr",
    )  # fmt: skip
    assert ended(stands) == "exit 0"
    *lines, ignored = said(stands).splitlines()
    assert lines == ["65534", "65534", "65534 7", "/usr", "1777", "1777", "-"]
    libc_own = 1 << 31 | 1 << 32  # posix_spawn leaves them so (make uses it), and nobody sends them
    assert int(ignored.split()[1], 16) & ~libc_own == 0
    assert "Permission denied" in said(stands, STDERR)  # what is process 1's stays root's


@as_root
def test_shared_paths_below_tmp_stay_visible(start: Start, plan: RoomPlan, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "there").write_text("already\n")
    assert str(shared).startswith("/tmp/")
    wider = replace(plan, shared=(str(shared), "/usr"))
    stands = start("sh", "-c", f"cat {shared}/there; echo new > {shared}/here", plan=wider)
    assert ended(stands) == "exit 0"
    assert said(stands) == "already\n"
    assert (shared / "here").read_text() == "new\n"
    assert not [p for p in plan.tmp.rglob("*") if p.is_file()]  # it is not the room's to carry


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
@as_root
def test_hidden_directories_look_empty(
    start: Start, plan: RoomPlan, secret: Path, user: int
) -> None:
    """And nobody inside looks below, or writes there: not root, and not root of its own making."""
    nested = (str(secret), str(secret / "below"), "/nowhere/at/all")
    hiding = replace(plan, uid=user, gid=user, hidden=nested)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(secret / "socket"))
        server.listen()
        (secret / "socket").chmod(0o777)
        stands = start(
            "sh", "-c",
            f"ls -A {secret}; stat -c '%a %u' {secret}; touch {secret}/mine; cat {secret}/key;"
            f"umount {secret} && echo away; umount -l {secret} && echo away;"
            f"mount -t tmpfs none /mnt && echo mounted; nsenter --mount=/proc/1/ns/mnt true &&"
            f"echo entered; unshare -rm sh -c 'umount {secret} && echo away; ls -A {secret}';"
            f"unshare -rm sh -c 'umount -l {secret}; cat {secret}/key'; ls /nowhere;"
            f"{PYTHON} -Sc 'import socket; s = socket.socket(socket.AF_UNIX);"
            f's.connect("{secret}/socket")\'',
            plan=hiding,
        )  # fmt: skip
        ended(stands)
    assert said(stands) == "555 0\n", said(stands, STDERR)
    complaints = said(stands, STDERR)
    assert f"touch: cannot touch '{secret}/mine': Read-only file system" in complaints
    assert "No such file or directory" in complaints.splitlines()[-1]
    assert "secret" not in complaints.replace(str(secret), "")
    assert (secret / "below" / "image").read_text() == "secret\n"


@as_root
def test_a_hidden_directory_that_shared_files_lie_around(
    start: Start, plan: RoomPlan, tmp_path: Path
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


@as_root
def test_root_in_a_room_does_not_run_the_machine(start: Start) -> None:
    """What it has, and some of what it therefore cannot do."""
    refused = (
        "mknod /tmp/disk b 8 0", "chattr +i /tmp", "ip link set lo down", "ip link add x type veth",
        "nft list tables", "mount -t tmpfs none /mnt", "umount /proc", "ls /proc/1/root/",
        "readlink -v /proc/1/fd/20", "nsenter --target 1 --uts true", "unshare --net true",
    )  # fmt: skip
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


@as_root
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


@as_root
def test_stdin_is_empty_and_nothing_else_is_open(start: Start) -> None:
    stands = start("sh", "-c", "read x; echo $?; ls /proc/$$/fd")
    assert ended(stands) == "exit 0"
    assert said(stands) == "1\n0\n1\n2\n"


# ---- how it ends -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "cwd", "status", "words"),
    [
        (["true"], "/", "exit 0", ""),
        (["sh", "-c", "exit 7"], "/", "exit 7", ""),
        (["sh", "-c", "kill -9 $$"], "/", "signal 9", ""),
        (["sh", "-c", "kill -TERM $$"], "/", "signal 15", ""),
        (["no-such-program"], "/", "exit 127", "cannot run no-such-program"),
        (["/etc/passwd"], "/", "exit 126", "cannot run /etc/passwd: Permission denied"),
        (["true"], "/nowhere", "exit 126", "cannot enter /nowhere on this host"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
@as_root
def test_how_a_command_ended(
    start: Start, argv: list[str], cwd: str, status: str, words: str
) -> None:
    stands = start(*argv, cwd=cwd)
    assert ended(stands) == status
    assert words in said(stands, STDERR)


@as_root
def test_signals_reach_a_command_whatever_its_starter_ignores(start: Start) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        stands = start("sleep", "60")
    finally:
        signal.signal(signal.SIGINT, before)
    until(lambda: [t for t in tasks(stands) if t.name() == "sleep"])
    (task,) = tasks(stands)
    assert inner_pid(task.pid) == ROOT_PID
    os.kill(task.pid, signal.SIGINT)
    assert ended(stands) == "signal 2"


@as_root
def test_the_command_ends_the_room_whatever_it_left_behind(start: Start) -> None:
    """Even something that never stops writing."""
    stands = start("sh", "-c", "yes & sleep 60 & exit 4")
    children = tasks(stands)
    assert ended(stands) == "exit 4"
    until(lambda: not [t for t in children if t.is_running()])


@as_root
def test_ending_a_room_ends_all_of_it_at_once(start: Start) -> None:
    stands = start("sh", "-c", "trap '' TERM INT HUP; sleep 60 & sleep 60 & setsid sleep 60 & wait")
    until(lambda: len(tasks(stands)) == 4)
    everyone = tasks(stands)
    room.end(stands)
    until(lambda: not [t for t in everyone if t.is_running()])
    assert not stands.alive()
    assert tasks(stands) == []
    room.end(stands)  # may be said again


@as_root
def test_a_room_that_cannot_be_built_says_why_and_leaves_nothing(plan: RoomPlan) -> None:
    without = replace(plan, netns=Path("/run/netns/ls-test-missing"))
    with pytest.raises(LiveshiftError, match=r"cannot build the room of gpt-1: .*ls-test-missing"):
        room.start(without, ["true"], ENV, "/")
    missing = replace(plan, shared=("/tmp/ls-test-missing",))
    with pytest.raises(LiveshiftError, match="cannot take /tmp/ls-test-missing"):
        room.start(missing, ["true"], ENV, "/")


@as_root
@pytest.mark.parametrize("early", [True, False], ids=["adopted while it runs", "and after its end"])
def test_an_adopted_tree_is_reaped_as_if_it_had_been_started_here(
    plan: RoomPlan, early: bool
) -> None:
    """As a restore does it: a task of the given pid, orphaned into the room, is its root task.
    One that ends before it is adopted was an attempt, and the room stays for the next."""
    stands = room.build_empty(plan, ROOT_PID, PID_FLOOR + 500)
    try:
        assert tasks(stands) == []
        orphan = "(echo out; echo err >&2; sleep 0.2; exit 5)"
        ends = [f"/proc/{stands.init}/fd/{n}" for n in (room.STDOUT_FD, room.STDERR_FD)]
        script = f"echo {ROOT_PID - 1} > /proc/sys/kernel/ns_last_pid; {orphan} & true"
        command = [*room.enter(stands), "sh", "-c", script]
        with open(ends[0], "wb") as out, open(ends[1], "wb") as err:
            for attempt in range(2):
                subprocess.run(command, check=True, stdout=out, stderr=err)
                if attempt == 1 and early:
                    room.adopt(stands)
                    break
                until(lambda: not tasks(stands))
                assert stands.alive()
        room.adopt(stands)  # repeatable
        assert ended(stands) == "exit 5"
        assert (said(stands), said(stands, STDERR)) == ("out\n" * 2, "err\n" * 2)
    finally:
        room.end(stands)


# ---- output ------------------------------------------------------------------------------------

records = st.lists(
    st.builds(Record, st.integers(0, 2**64 - 1), st.integers(0, 2), st.binary(max_size=50)),
    max_size=8,
)


def packed(these: list[Record]) -> bytes:
    return b"".join(HEADER.pack(r.realtime_ns, len(r.data), r.stream) + r.data for r in these)


@settings(deadline=None, database=None)
@given(records, st.integers(0, 500))
def test_records_are_cut_where_they_end(these: list[Record], cut: int) -> None:
    raw = packed(these)
    assert list(output.split(raw)) == these
    assert output.whole(raw) == len(raw)
    part = raw[:cut]
    kept = list(output.split(part))
    assert kept == these[: len(kept)]
    assert part[: output.whole(part)] == packed(kept)
    assert output.whole(part + raw[cut:]) == len(raw)


@as_root
def test_output_is_kept_in_order_and_whole(start: Start) -> None:
    program = "import os\nfor n in range(2000): os.write(1 + n % 2, b'%d ' % n * (n % 50))"
    before = time.time_ns()
    stands = start(PYTHON, "-Sc", program)
    assert ended(stands) == "exit 0"
    for stream, odd in ((STDOUT, 0), (STDERR, 1)):
        expected = "".join(f"{n} " * (n % 50) for n in range(odd, 2000, 2))
        assert said(stands, stream) == expected
    times = [r.realtime_ns for r in output.split(stands.plan.log.read_bytes())]
    assert before <= times[0] <= times[-1] <= time.time_ns()


@as_root
def test_settling_waits_for_what_a_stopped_task_has_written(start: Start) -> None:
    program = "import os, signal\nwhile True: os.write(1, b'x' * 60000); os.kill(os.getpid(), 19)"
    stands = start(PYTHON, "-Sc", program)
    for count in range(1, 20):
        until(lambda: [t for t in tasks(stands) if t.status() == "stopped"])
        output.settle(stands)
        assert len(said(stands)) == count * 60000
        marks = [r for r in output.split(stands.plan.log.read_bytes()) if r.stream == MARK]
        assert len(marks) == count
        os.kill(tasks(stands)[0].pid, signal.SIGCONT)
        until(lambda n=count: len(said(stands)) > n * 60000 or not stands.alive())


def test_settling_does_not_stumble_over_a_record_that_is_just_being_written(
    tmp_path: Path,
) -> None:
    plan = RoomPlan(tmp_path, tmp_path, "gpt-1", "", 0, 0, ())
    before, late, mark = (packed([Record(1, n, d)]) for n, d in ((1, b"a"), (1, b"late"), (0, b"")))
    program = (
        "import signal, sys\n"
        f"log = open({str(plan.log)!r}, 'ab', buffering=0)\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])\n"
        f"log.write({before + late[:9]!r}); print('half of it', flush=True)\n"
        "signal.sigwait([signal.SIGUSR1])\n"
        f"log.write({late[9:]!r}); log.write({mark!r}); sys.stdin.read()\n"
    )
    one = subprocess.Popen([PYTHON, "-Sc", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert one.stdin is not None
    assert one.stdout is not None
    with one.stdin, one.stdout:
        one.stdout.readline()
        output.settle(Room(plan, one.pid, room.started(one.pid)), len(before))
        assert [r.data for r in output.split(plan.log.read_bytes())] == [b"a", b"late", b""]
    assert one.wait(10) == 0


@as_root
def test_settling_a_room_that_has_ended_says_so(start: Start) -> None:
    stands = start("sleep", "60")
    os.kill(stands.init, signal.SIGSTOP)
    with pytest.raises(LiveshiftError, match="process 1 of gpt-1 did not settle"):
        output.settle(stands, deadline_s=0.1)
    os.kill(stands.init, signal.SIGCONT)


# ---- survey ------------------------------------------------------------------------------------


@pytest.fixture
def foreign() -> Iterator[Path]:
    """A file system that nobody has listed."""
    path = Path(f"/var/tmp/ls-test-foreign-{os.getpid()}")
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "ls-test", str(path)], check=True)
    yield path
    subprocess.run(["umount", str(path)], check=True)
    path.rmdir()


@pytest.fixture
def local() -> Iterator[Path]:
    """A directory on the root file system, outside /tmp."""
    path = Path(f"/var/tmp/ls-test-local-{os.getpid()}")
    path.mkdir()
    yield path
    subprocess.run(["rm", "-rf", str(path)], check=True)


def surveyed(start: Start, program: str, placement: Placement, cwd: str = "/") -> Survey:
    ready = f"ready {next(numbers)}\n"
    head, tail = (
        "import os, sys, time, mmap, socket",
        f"os.write(1, {ready.encode()}); time.sleep(60)",
    )
    stands = start(PYTHON, "-Sc", f"{head}\n{program}\n{tail}", cwd=cwd)
    until(lambda: ready in said(stands) or not stands.alive())
    assert stands.alive(), said(stands, STDERR)
    return survey(stands, ROOT_PID, placement)


@as_root
def test_a_plain_tree_can_move(start: Start, local: Path) -> None:
    (local / "read.txt").write_text("x")
    seen = surveyed(
        start,
        "a = open('/dev/shm/m', 'w+b'); a.truncate(8 << 20); a.write(b'x' * (8 << 20)); a.flush()\n"
        "b = open('/tmp/mapped', 'w+b'); b.truncate(4096); m = mmap.mmap(b.fileno(), 4096)\n"
        "c = open('/tmp/private', 'w'); r, w = os.pipe(); s = socket.create_server(('', 0))\n"
        f"f = open('{local}/read.txt'); d = open('{local}/log', 'a'); e = open('/dev/urandom')\n"
        "big = bytearray(50 << 20); pid = os.fork()\n"
        "if not pid: time.sleep(60)",
        Placement((), ()),
        str(local),
    )
    assert seen.problems == ()
    assert seen.pids == (ROOT_PID, ROOT_PID + 1)
    assert seen.resident > 50 << 20
    assert 8 << 20 <= seen.shared_memory < 10 << 20
    assert seen.single_files == (f"{local}/log",)
    assert seen.directories == (str(local),)
    assert seen.mapped_writable == ("/tmp/mapped",)
    needed = {file.path: file for file in seen.needed}
    assert needed[PYTHON] == fingerprint(PYTHON)
    assert needed[PYTHON].size == os.stat(PYTHON).st_size
    assert f"{local}/read.txt" in needed
    assert any("libc.so" in path for path in needed)
    assert not [path for path in needed if path.startswith(("/tmp", "/dev/shm"))]


@as_root
def test_listed_files_are_no_trouble_and_foreign_ones_are(start: Start, foreign: Path) -> None:
    for name in ("shared", "carried", "other"):
        (foreign / name).mkdir()
    program = "; ".join(f"{n[0]} = open('{foreign}/{n}/log', 'a')" for n in ("shared", "carried"))
    placement = Placement((f"{foreign}/shared",), (f"{foreign}/carried",))
    seen = surveyed(start, program, placement, f"{foreign}/carried")
    assert seen.problems == ()
    assert seen.single_files == ()
    assert seen.directories == ()
    seen = surveyed(start, f"o = open('{foreign}/other/log', 'a')", placement)
    ((text, remedy),) = seen.problems
    assert f"has {foreign}/other/log open for writing, on the tmpfs file system {foreign}" in text
    assert f'list "{foreign}" under files.shared' in remedy


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("d = os.open('/dev/kmsg', os.O_WRONLY)", "holds the device /dev/kmsg"),
        ("import ctypes; u = ctypes.CDLL(None).syscall(323, 1)", "holds a userfaultfd"),
        (
            "pid = os.fork()\nif not pid:\n os.setsid()\n if os.fork(): os._exit(0)\n"
            " time.sleep(60)\nos.waitpid(pid, 0); time.sleep(0.1)",
            "has left the command's process tree",
        ),
    ],
    ids=["device", "userfaultfd", "daemon"],
)
@as_root
def test_what_stands_in_the_way_is_named(start: Start, program: str, words: str) -> None:
    ((text, remedy),) = surveyed(start, program, Placement((), ())).problems
    assert words in text
    assert text.startswith("process 100")
    assert remedy


@as_root
def test_a_capsule_that_has_ended_cannot_be_surveyed(start: Start) -> None:
    stands = start("true")
    ended(stands)
    with pytest.raises(ProcessLookupError):
        survey(stands, ROOT_PID, Placement((), ()))


def test_a_fingerprint_names_a_file_that_can_be_compared(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_bytes(b"no ELF")
    found = fingerprint(str(plain))
    assert found is not None
    assert (found.size, found.build_id) == (6, "")
    assert fingerprint(str(tmp_path)) is None
    assert fingerprint(str(tmp_path / "missing")) is None
    said = subprocess.run(["file", "/bin/true"], capture_output=True, text=True, check=False).stdout
    true = fingerprint("/bin/true")
    assert true is not None
    assert len(true.build_id) == 40
    assert "BuildID" not in said or true.build_id in said
