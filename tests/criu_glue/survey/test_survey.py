# SPDX-License-Identifier: Apache-2.0
"""What is seen of the tree in a sandbox: can it move, what stands in the way, what does it need."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from captured import PYTHON, ROOT_PID, numbers
from one_sandbox import Start, ended, netns, plan, said, start
from waits import until

from liveshift.criu_glue.capsule.mounts import Placement
from liveshift.criu_glue.capsule.output import STDERR
from liveshift.criu_glue.survey.found import NeededFile, Survey
from liveshift.criu_glue.survey.survey import changing, fingerprint, survey

__all__ = ["netns", "plan", "start"]


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
        f"os.write(1, {ready.encode()!r}); time.sleep(60)",
    )
    stands = start(PYTHON, "-Sc", f"{head}\n{program}\n{tail}", cwd=cwd)
    until(lambda: ready in said(stands) or not stands.alive())
    assert stands.alive(), said(stands, STDERR)
    return survey(stands, ROOT_PID, placement)


@pytest.mark.root
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


@pytest.mark.root
def test_listed_files_are_no_problem_and_foreign_ones_are(start: Start, foreign: Path) -> None:
    for name in ("shared", "carried", "other"):
        (foreign / name).mkdir()
    program = "; ".join(f"{n[0]} = open('{foreign}/{n}/log', 'a')" for n in ("shared", "carried"))
    placement = Placement((f"{foreign}/shared",), (f"{foreign}/carried",))
    seen = surveyed(start, program, placement, f"{foreign}/carried")
    assert seen.problems == ()
    assert seen.single_files == ()
    assert seen.directories == (f"{foreign}/shared",)
    (log,) = [file for file in seen.needed if file.path.startswith(str(foreign))]
    assert log == NeededFile(f"{foreign}/shared/log", -1, "", 0), "nobody compares what may change"
    assert log.inode == os.stat(log.path).st_ino
    seen = surveyed(start, f"o = open('{foreign}/other/log', 'a')", placement)
    ((text, remedy),) = seen.problems
    assert f"has {foreign}/other/log open for writing, on the tmpfs file system {foreign}" in text
    assert f'list "{foreign}" under files.shared' in remedy


@pytest.mark.root
def test_what_is_written_through_a_mapping_counts_as_open(
    start: Start, local: Path, foreign: Path
) -> None:
    """Most programs close the descriptor once they have the mapping. One of the files has a line
    feed in its name."""
    program = (
        "def mapped(path):\n"
        " with open(path, 'w+b') as file: file.truncate(4096); m = mmap.mmap(file.fileno(), 0)\n"
        " for fd in map(int, os.listdir('/proc/self/fd')):\n"  # Python keeps a duplicate
        "  if os.path.exists(f'/proc/self/fd/{fd}') and os.path.samestat(os.fstat(fd),"
        " os.stat(path)): os.close(fd)\n"
        " return m\n"
        f"a = mapped('{local}/ring'); b = mapped('/tmp/two\\nlines')\n"
    )
    seen = surveyed(start, program, Placement((), ()))
    assert seen.problems == ()
    assert seen.single_files == (f"{local}/ring",)
    assert seen.mapped_writable == ("/tmp/two\nlines", f"{local}/ring")
    assert f"{local}/ring" not in [file.path for file in seen.needed], "it goes along"
    seen = surveyed(start, program + f"d = mapped('{foreign}/ring')", Placement((), ()))
    ((text, _),) = seen.problems
    assert f"has {foreign}/ring open for writing, on the tmpfs file system {foreign}" in text


@pytest.mark.root
def test_events_that_a_program_does_not_read_keep_it_here(start: Start) -> None:
    """CRIU would drop them."""
    watch = (
        "import ctypes; libc = ctypes.CDLL(None); fd = libc.inotify_init1(0)\n"
        "assert libc.inotify_add_watch(fd, b'/tmp', 0x100) > 0\n"
    )
    seen = surveyed(start, f"{watch}open('/tmp/new', 'w')", Placement((), ()))
    ((text, remedy),) = seen.problems
    assert re.fullmatch(
        r"process \d+ \(python3\S*\) has events of inotify that it has not read, which CRIU would"
        " drop or alter",
        text,
    )
    assert "has read it" in remedy
    read = f"{watch}open('/tmp/another', 'w'); assert len(os.read(fd, 4096)) > 16"
    assert surveyed(start, read, Placement((), ())).problems == ()


PTY = "import pty, tty; m, s = pty.openpty(); "


@pytest.mark.root
@pytest.mark.parametrize(
    ("program", "words"),
    [
        (f"{PTY}os.write(s, b'unread')", r"has data on the terminal /dev/\S*ptmx that is not read"),
        (f"{PTY}os.write(m, b'typed\\n'); os.read(m, 99)", "has data on the terminal /dev/pts/"),
        (f"{PTY}tty.setraw(m); os.write(s, b'x' * 5000)", "has data on the terminal"),
        (f"{PTY}os.close(s)", "has the end of a terminal that its last program has closed"),
        (f"{PTY}tty.setraw(m); os.write(s, b'a little'); os.write(m, b'too')", ""),
        (f"{PTY}os.write(s, b'read'); os.read(m, 99)", ""),
        ("m = os.open('/dev/ptmx', os.O_RDWR)", ""),  # no program has opened its other side
        ("e = os.eventfd(2, os.EFD_SEMAPHORE)", "holds an eventfd that is a semaphore"),
        ("e = os.eventfd(2)", ""),
    ],
)
def test_what_criu_would_alter_is_named(start: Start, program: str, words: str) -> None:
    problems = surveyed(start, program, Placement((), ())).problems
    assert len(problems) == bool(words)
    assert all(re.search(words, text) for text, _ in problems)


@pytest.mark.root
def test_a_shared_file_is_looked_for_at_the_destination_while_it_has_its_name(
    start: Start, foreign: Path
) -> None:
    """A path that is in truth each host's own fails the restore, when the job stands."""
    seen = surveyed(
        start,
        f"os.mkfifo('{foreign}/pipe'); p = os.open('{foreign}/pipe', os.O_RDWR)\n"
        + "".join(f"{n} = open('{foreign}/{n}', 'w')\n" for n in ("kept", "deleted", "replaced"))
        + f"os.unlink('{foreign}/deleted'); open('{foreign}/new', 'w').close()\n"
        f"os.rename('{foreign}/new', '{foreign}/replaced'); d = os.open('{foreign}', os.O_RDONLY)",
        Placement((str(foreign),), ()),
    )
    assert seen.problems == ()
    paths = [file.path for file in seen.needed if file.path.startswith(str(foreign))]
    assert paths == [f"{foreign}/kept"]


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("d = os.open('/dev/kmsg', os.O_WRONLY)", "holds the device /dev/kmsg"),
        ("import ctypes; u = ctypes.CDLL(None).syscall(323, 1)", "holds a userfaultfd"),
        (
            "pid = os.fork()\nif not pid:\n os.setsid()\n if os.fork(): os._exit(0)\n"
            " time.sleep(60)\nos.waitpid(pid, 0)",
            "has left the command's process tree",
        ),
        (
            "import socket; s = socket.socketpair(); pid = os.fork()\nif not pid:\n os.setsid()\n"
            " if os.fork(): os._exit(0)\n s[0].close(); s[1].send(b'x'); time.sleep(60)\n"
            "s[1].close(); os.waitpid(pid, 0); s[0].recv(1)",
            "has left the command's process tree",
        ),
        (
            "import ctypes, threading\npid = os.fork()\nif not pid:\n"
            " threading.Thread(target=time.sleep, args=(60,)).start()\n"
            " ctypes.CDLL(None).pthread_exit(None)\n"
            "while ') Z ' not in open(f'/proc/{pid}/stat').read(): time.sleep(0.01)",
            "has threads although its main thread has ended",
        ),
    ],
    ids=["device", "userfaultfd", "daemon", "daemon with a connection", "threads without main"],
)
@pytest.mark.root
def test_what_stands_in_the_way_is_named(start: Start, program: str, words: str) -> None:
    ((text, remedy),) = surveyed(start, program, Placement((), ())).problems
    assert words in text
    assert text.startswith("process 100")
    assert remedy


LOST = (
    "f = open('{0}/old', 'w+b'); f.truncate(4096); m = mmap.mmap(f.fileno(), 4096)\n"
    "os.link('{0}/old', '{0}/new'); os.rename('{0}/old', '{0}/gone'); os.unlink('{0}/gone')\n"
)
"""A file whose name is gone, though it has another."""
ONLY_MAPPED = "os.closerange(3, 20)"
NAMELESS = "os.unlink('{0}/new')"


@pytest.mark.root
def test_a_file_that_has_lost_its_name_and_has_another_is_carried_with_its_directory_only(
    start: Start, local: Path, foreign: Path
) -> None:
    def found(top: Path | str, then: str = "", shared: tuple[str, ...] = ()) -> list[str]:
        program = (LOST + then).format(top)
        return [text for text, _ in surveyed(start, program, Placement(shared, ())).problems]

    for number, then in enumerate(("", ONLY_MAPPED)):
        (local / str(number)).mkdir()
        (text,) = found(local / str(number), then)
        assert f"uses the deleted name {local}/{number}/gone of a file that still has" in text
    assert found("/tmp") == found("/dev/shm", ONLY_MAPPED) == []
    assert found(foreign, shared=(str(foreign),)) == []
    assert found(local, NAMELESS) == [], "one without any name goes in the image"


@pytest.mark.root
def test_a_child_that_has_ended_and_was_not_waited_for_is_no_problem(start: Start) -> None:
    program = "pid = os.fork() or os._exit(0); os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)"
    seen = surveyed(start, program, Placement((), ()))
    assert seen.problems == ()
    assert seen.pids == (ROOT_PID, ROOT_PID + 1), "CRIU restores it as what it is"


@pytest.mark.root
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


@pytest.mark.root
def test_the_sizes_of_what_is_open_for_writing_on_shared_paths_are_noted(
    start: Start, local: Path
) -> None:
    """CRIU notes none of a file that is open only for appending."""
    program = (
        f"a = open('{local}/appended', 'a'); a.write('12345'); a.flush()\n"
        f"w = open('{local}/written', 'w'); w.write('123'); w.flush()\n"
        f"r = open('{local}/appended')\n"
        f"o = open('{local}/read', 'w+').close(); o = open('{local}/read')\n"
        "print('ready', flush=True); time.sleep(60)"
    )
    stands = start(PYTHON, "-Sc", f"import time\n{program}")
    until(lambda: "ready" in said(stands))
    seen = changing(stands, Placement((str(local),), ()))
    assert seen.written == {f"{local}/appended": 5, f"{local}/written": 3}
    assert set(seen.shared) == {*seen.written, f"{local}/read"}
    assert changing(stands, Placement((), ())).written == {}
