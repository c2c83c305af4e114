# SPDX-License-Identifier: Apache-2.0
"""The destination's checks: what stands in the way is found, named, and all of it at once."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import msgspec
import pytest
from descriptors import no_descriptor_left
from machine_needs import needs_fact, on_disk
from preflight_scene import HERE, NOTHING, criu, program
from waits import until

from liveshift.criu_glue.criu.explain import KNOWN, explain
from liveshift.criu_glue.criu.tool import Criu
from liveshift.criu_glue.images import pids
from liveshift.criu_glue.survey.found import NeededFile, Survey
from liveshift.criu_glue.survey.survey import fingerprint
from liveshift.errors import Refused
from liveshift.runtime.agent import preflight
from liveshift.runtime.agent.host import task_limits
from liveshift.runtime.agent.host.host_facts import facts, memory_left, memory_offered
from liveshift.runtime.agent.host.task_limits import Limit
from liveshift.runtime.messages import HostFacts
from liveshift.units import size

__all__ = ["criu"]


PLENTY = 1 << 40


def refusal(
    survey: Survey = NOTHING,
    source: HostFacts = HERE,
    here: HostFacts = HERE,
    criu: Criu | None = None,
    memory: int = PLENTY,
) -> Refused:
    with pytest.raises(Refused) as caught:
        preflight.check(survey, source, here, criu, memory)
    return caught.value


def test_a_tree_that_fits_is_told_what_was_found(criu: Criu) -> None:
    rows = dict(preflight.check(NOTHING, HERE, HERE, criu, PLENTY))
    assert rows == {
        "CRIU": "4.2.1",
        "processor and kernel": "Xeon, Linux 6.1.0",
        "memory": f"{size(PLENTY)} offered, 365 MB needed",
        "threads": rows["threads"],
        "files": "0 mapped or open files, all alike here",
        "directories": "the directories that it uses exist",
        "files along": "0 B in 0 files, about 0.0 s while it trains",
    }


def test_an_image_of_a_later_criu_is_refused_with_both_versions(criu: Criu) -> None:
    later = msgspec.structs.replace(HERE, criu="4.3.0")
    refused = refusal(source=later, criu=criu)
    assert str(refused).startswith("the image is of CRIU 4.3.0, and the destination has CRIU 4.2.1")
    assert refused.hint == ("install CRIU 4.3 or later on the destination, or choose another host")


def test_an_image_of_another_kernel_is_let_pass_with_a_warning(criu: Criu) -> None:
    rows = preflight.check(
        NOTHING, msgspec.structs.replace(HERE, kernel="6.12.9"), HERE, criu, PLENTY
    )
    assert [text for what, text in rows if what == "warning"] == [
        "the image is of a host with Linux 6.12.9, and the destination has 6.1.0: the restore may"
        " fail"
    ]


def test_files_without_a_name_need_memory_once_for_the_image(criu: Criu) -> None:
    rows = dict(preflight.check(replace(NOTHING, nameless=10**9), HERE, HERE, criu, PLENTY))
    assert rows["memory"] == f"{size(PLENTY)} offered, 1.36 GB needed"


def test_more_threads_than_may_run_here(criu: Criu, monkeypatch: pytest.MonkeyPatch) -> None:
    tight = Limit("pids.max of /sys/fs/cgroup/agent", 4915, 700, "TasksMax=infinity")
    monkeypatch.setattr(task_limits, "tightest", lambda: tight)
    rows = dict(
        preflight.check(replace(NOTHING, ids=tuple(range(1001, 1601))), HERE, HERE, criu, PLENTY)
    )
    assert rows["threads"].startswith("600 ids in use, room for 700 threads (pids.max of")
    refused = refusal(replace(NOTHING, ids=tuple(range(1001, 1701))), criu=criu)
    assert "it has 700 threads, and only 700 more can run on the destination: pids.max of" in str(
        refused
    )
    assert refused.hint == "TasksMax=infinity"


def test_ids_that_cannot_be_had_here(criu: Criu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pids, "limit", lambda: 5000)
    full = replace(NOTHING, ids=tuple(range(400, 4901)))
    monkeypatch.setattr(task_limits, "tightest", lambda: Limit("", 1 << 20, 1 << 20, ""))
    refused = refusal(full, criu=criu)
    assert "its threads have ids up to 4900, and kernel.pid_max of the destination is 5000" in str(
        refused
    )
    assert refused.hint == "on the destination: sysctl -w kernel.pid_max=4194304"
    preflight.check(replace(NOTHING, ids=tuple(range(1001, 4999))), HERE, HERE, criu, PLENTY)


def test_a_file_on_a_shared_path_may_have_grown(criu: Criu, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("longer than it was")
    shared = replace(NOTHING, needed=(NeededFile(str(path), -1, ""),))
    preflight.check(shared, HERE, HERE, criu, PLENTY)
    own = replace(NOTHING, needed=(NeededFile(str(path), 3, ""),))
    assert f"different {path} (3 bytes at the source" in str(refusal(own, criu=criu))
    path.unlink()
    assert f"lacks {path}" in str(refusal(shared, criu=criu))


def test_an_open_file_of_a_shared_path_is_looked_for_and_not_opened(
    criu: Criu, tmp_path: Path
) -> None:
    """Where the path is in truth each host's own; to open it would break a lease."""
    path = tmp_path / "log"
    shared = replace(NOTHING, needed=(NeededFile(str(path), -1, "", inode=7),))
    assert f"lacks {path}" in str(refusal(shared, criu=criu))
    path.mkdir()
    assert f"lacks {path}" in str(refusal(shared, criu=criu))
    path.rmdir()
    shutil.copy("/bin/true", path)  # which has a build id
    was = signal.signal(signal.SIGIO, signal.SIG_IGN)
    with path.open() as file:
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        preflight.check(shared, HERE, HERE, criu, PLENTY)
        preflight.warm(shared.needed)
        assert fcntl.fcntl(file, fcntl.F_GETLEASE) == fcntl.F_WRLCK
    signal.signal(signal.SIGIO, was)


def test_a_file_with_other_permissions_is_another_file(criu: Criu, tmp_path: Path) -> None:
    """CRIU compares the mode too, but only after the job was stopped."""
    path = tmp_path / "library.so"
    path.write_text("the same")
    path.chmod(0o644)
    there = fingerprint(str(path))
    assert there is not None
    path.chmod(0o640)
    refused = refusal(replace(NOTHING, needed=(there,)), criu=criu)
    assert f"different {path} (mode 0644 at the source, 0640 here)" in str(refused)
    assert "same modes" in str(refused.hint)
    shared = replace(NOTHING, needed=(replace(there, size=-1, mode=0),))
    preflight.check(shared, HERE, HERE, criu, PLENTY)


def test_criu_missing_or_not_working(tmp_path: Path) -> None:
    assert "the destination has no CRIU, or one that is too old" in str(refusal())
    broken = program(tmp_path / "broken", "echo 'Error (x.c:1): no PAGEMAP_SCAN'; exit 1")
    assert "CRIU 4.2.1 does not work on the destination: Error (x.c:1): no PAGEMAP" in str(
        refusal(criu=broken)
    )


def test_another_processor(criu: Criu) -> None:
    other = msgspec.structs.replace(HERE, machine="aarch64")
    assert "runs on x86_64, and the destination is aarch64" in str(refusal(here=other, criu=criu))
    older = msgspec.structs.replace(HERE, cpu_flags=["avx"])
    refused = refusal(here=older, criu=criu)
    assert "the processor of the destination lacks avx2, fma, which Xeon has" in str(refused)
    assert "same processor" in str(refused.hint)
    preflight.check(NOTHING, older, HERE, criu, PLENTY)  # towards more features is fine
    amx = msgspec.structs.replace(HERE, cpu_flags=[*HERE.cpu_flags, "amx_tile"])
    preflight.check(NOTHING, amx, HERE, criu, PLENTY)


def test_memory(criu: Criu) -> None:
    needed = 2 * (110 << 20) + preflight.MEMORY_MARGIN
    preflight.check(NOTHING, HERE, HERE, criu, needed)
    refused = refusal(criu=criu, memory=needed - 1)
    assert "the destination has not enough memory: 365 MB are needed" in str(refused)
    assert "365 MB are offered" in str(refused)


def test_memory_that_comes_page_by_page_need_not_be_there_twice(criu: Criu) -> None:
    large = replace(NOTHING, resident=8 << 30, shared_memory=1 << 30)
    needed = (10 << 30) + preflight.MEMORY_MARGIN + preflight.ONCE_MARGIN
    preflight.check(large, HERE, HERE, criu, needed, ahead=True)
    with pytest.raises(Refused, match=r"11\.4 GB are needed"):
        preflight.check(large, HERE, HERE, criu, needed - 1, ahead=True)
    with pytest.raises(Refused, match=r"19\.5 GB are needed"):
        preflight.check(large, HERE, HERE, criu, needed)


def test_files_missing_or_different(criu: Criu, tmp_path: Path) -> None:
    same, other = tmp_path / "same.so", tmp_path / "other.so"
    shutil.copy("/bin/true", same)
    shutil.copy("/bin/false", other)
    mine = fingerprint(str(same))
    assert mine is not None
    assert len(mine.build_id) == 40
    survey = replace(NOTHING, needed=(mine,))
    rows = dict(preflight.check(survey, HERE, HERE, criu, PLENTY))
    assert rows["files"] == "1 mapped or open files, all alike here"
    wrong = (
        NeededFile(str(tmp_path / "gone.so"), 7, ""),
        NeededFile(str(same), mine.size + 1, mine.build_id),
        NeededFile(str(other), other.stat().st_size, "00" * 20),
    )
    refused = refusal(replace(NOTHING, needed=wrong), criu=criu)
    assert f"the destination lacks {tmp_path}/gone.so" in str(refused)
    assert f"{same} ({mine.size + 1} bytes at the source, {mine.size} here)" in str(refused)
    assert f"{other} (another build id)" in str(refused)
    assert "files.shared or files.carried" in str(refused.hint)


def test_many_missing_files_are_counted(criu: Criu) -> None:
    needed = tuple(NeededFile(f"/nowhere/{n}", 1, "") for n in range(10))
    assert "/nowhere/2 and 7 more" in str(refusal(replace(NOTHING, needed=needed), criu=criu))


def test_working_directories(criu: Criu, tmp_path: Path) -> None:
    survey = replace(NOTHING, directories=(str(tmp_path), str(tmp_path / "gone")))
    refused = refusal(survey, criu=criu)
    assert str(refused) == f"the destination lacks the directory {tmp_path}/gone"


def test_all_findings_are_said_at_once_and_each_hint_once() -> None:
    problems = (
        ("process 7 (x) holds an io_uring", "turn it off"),
        ("process 8 (y) holds an io_uring", "turn it off"),
    )
    survey = replace(NOTHING, problems=problems, directories=("/nowhere",))
    refused = refusal(survey, memory=0)
    for part in ("process 7", "process 8", "has no CRIU", "not enough memory", "/nowhere"):
        assert part in str(refused)
    assert str(refused.hint).count("turn it off") == 1


def test_warming_reads_what_is_there_and_skips_what_is_not(tmp_path: Path) -> None:
    with no_descriptor_left():
        preflight.warm([NeededFile("/bin/true", 1, ""), NeededFile(str(tmp_path / "no"), 1, "")])


def resident(path: Path) -> int:
    """Pages of a file that are in the page cache: mincore(2)."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        first = ctypes.c_char.from_buffer(mapped)
        pages = (ctypes.c_ubyte * (len(mapped) // mmap.PAGESIZE))()
        size = ctypes.c_size_t(len(mapped))
        failed = ctypes.CDLL(None).mincore(ctypes.byref(first), size, pages)
        del first
        assert not failed
        return sum(page & 1 for page in pages)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A folder that is not on a tmpfs, whose files are nowhere but in memory."""
    needs_fact("folder on a disk")
    with TemporaryDirectory(dir=on_disk(tmp_path)) as folder:
        yield Path(folder)


def test_what_was_not_in_the_page_cache_is_when_the_job_stops(disk: Path) -> None:
    path = disk / "library"
    path.write_bytes(os.urandom(8 << 20))
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert resident(path) == 0

    def warmed() -> bool:
        """The kernel may leave out pages for which it has no memory at once: it is asked again."""
        preflight.warm([NeededFile(str(path), 8 << 20, "")])
        return resident(path) == (8 << 20) // mmap.PAGESIZE

    until(warmed)


def test_the_facts_of_this_host(criu: Criu) -> None:
    mine = facts(criu)
    assert mine.criu == "4.2.1"
    assert mine.kernel == os.uname().release
    assert mine.machine == os.uname().machine
    assert mine.cpu_flags == sorted(mine.cpu_flags)
    assert facts(None).criu == ""
    assert 0 < memory_offered(None) <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert memory_offered(12345) == 12345
    assert memory_offered(None, 1 << 50) >= 1 << 50
    assert 0 < memory_left() <= 1 == memory_left(1 << 50)


def test_what_a_source_names_is_not_opened_unless_it_is_a_plain_file(tmp_path: Path) -> None:
    """A pipe would hold the agent's thread for ever; a device may do something when opened."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "plain").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("plain")
    odd = [str(tmp_path / "pipe"), "/dev/null", str(tmp_path), str(tmp_path / "no"), "/x\0y"]
    assert [fingerprint(path) for path in odd] == [None] * len(odd)
    for name in ("plain", "link"):
        path = str(tmp_path / name)
        assert fingerprint(path) == NeededFile(path, 5, "", os.stat(path).st_mode)
    preflight.warm(NeededFile(path, 5, "") for path in [*odd, str(tmp_path / "plain")])


# ---- what CRIU would fail on here is found before, in the same words -----------------------------


def _file(place: Path, **other: object) -> Survey:
    """A tree that needs a library, which is another one here."""
    path = place / "library.so"
    shutil.copy("/bin/true", path)
    path.chmod(0o644)
    mine = fingerprint(str(path))
    assert mine is not None
    return replace(NOTHING, needed=(replace(mine, **other),))  # type: ignore[arg-type]


def _ids_used_up(_: Path, patch: pytest.MonkeyPatch) -> Survey:
    patch.setattr(pids, "limit", lambda: 5000)
    patch.setattr(task_limits, "tightest", lambda: Limit("", 1 << 20, 1 << 20, ""))
    return replace(NOTHING, ids=tuple(range(400, 4901)))


def _no_more_threads(_: Path, patch: pytest.MonkeyPatch) -> Survey:
    patch.setattr(task_limits, "tightest", lambda: Limit("pids.max", 4915, 700, "TasksMax"))
    return replace(NOTHING, ids=tuple(range(1001, 1701)))


def _images_full(_: Path, patch: pytest.MonkeyPatch) -> Survey:
    patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=200 << 20))
    return NOTHING


@dataclass(frozen=True)
class Scene:
    """``survey`` is of a tree that cannot run here. CRIU would log ``line``; the preflight and that
    line, explained, both say ``words``. {0} is the library's path without its first slash."""

    line: str
    words: tuple[str, ...]
    survey: Callable[[Path, pytest.MonkeyPatch], Survey]
    memory: int = PLENTY


SCENES = {
    r"File /?(\S.*) has bad size (\d+) \(expect (\d+)\)": Scene(
        "File {0} has bad size 9 (expect 1234567)",
        ("/{0}", "1234567"),
        lambda place, _: _file(place, size=1234567),
    ),
    r"File /?(\S.*) has bad mode 0(\d+) \(expect 0(\d+)\)": Scene(
        "File {0} has bad mode 0100644 (expect 0100755)",
        ("/{0}", "mode", "644", "755"),
        lambda place, _: _file(place, mode=0o100755),
    ),
    r"File /?(\S+) has bad build-ID": Scene(
        "File {0} has bad build-ID",
        ("/{0}", "another build"),
        lambda place, _: _file(place, build_id="00" * 20),
    ),
    r"Can't open file /?(\S+)": Scene(
        "Can't open file {0} on restore: No such file",
        ("/{0}",),
        lambda place, _: _file(place, path=str(place / "library.so") + ".1"),
    ),
    r"Unable to create a thread: -17": Scene(
        "Unable to create a thread: -17", ("id", "thread"), _ids_used_up
    ),
    r"Unable to create a thread: -11": Scene(
        "Unable to create a thread: -11", ("more",), _no_more_threads
    ),
    r"Can't fork for (\d+): File exists": Scene(
        "Can't fork for 1001: File exists", ("id",), _ids_used_up
    ),
    r"No space left on device": Scene(
        "Can't write: No space left on device", ("memory file system for images",), _images_full
    ),
    r"Cannot allocate memory": Scene(
        "Can't map: Cannot allocate memory",
        ("destination has", "memory"),
        lambda *_: NOTHING,
        200 << 20,
    ),
}
"""By the pattern in ``KNOWN``."""


def test_there_is_a_scene_for_each_cause_at_the_destination() -> None:
    assert SCENES.keys() == {known.pattern for known in KNOWN if not known.in_capsule}


@pytest.mark.parametrize("pattern", SCENES)
def test_the_preflight_says_before_what_criu_says_after(
    criu: Criu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str
) -> None:
    scene, place, log = SCENES[pattern], tmp_path / "place", tmp_path / "restore.log"
    place.mkdir()
    needed = scene.survey(place, monkeypatch)
    library = needed.needed[0].path.lstrip("/") if needed.needed else ""
    log.write_text(f"(00.1) Error (criu/x.c:1): {scene.line.format(library)}\n")
    cause = explain(log)
    assert cause.known is not None
    assert cause.known.pattern == pattern
    with pytest.raises(Refused) as refused:
        preflight.check(needed, HERE, HERE, criu, scene.memory, images=tmp_path)
    for words in scene.words:
        assert words.format(library) in cause.words
        assert words.format(library) in str(refused.value)
    monkeypatch.undo()
    preflight.check(NOTHING, HERE, HERE, criu, PLENTY, images=tmp_path)


def test_an_image_must_fit_where_images_lie(
    criu: Criu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lies there once, however much memory there is besides."""
    free = (110 << 20) + preflight.MEMORY_MARGIN
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    preflight.check(NOTHING, HERE, HERE, criu, PLENTY, images=tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free - 1))
    with pytest.raises(Refused, match=f"{tmp_path} of the destination, is too full: 250 MB are"):
        preflight.check(NOTHING, HERE, HERE, criu, PLENTY, images=tmp_path)


def test_what_moves_memory_is_loaded_before_a_job_is_paused() -> None:
    """An agent reads its C declarations when it first needs them. Inspect and Reserve bring it."""
    source = "\n".join(
        (
            "import sys",
            "from types import SimpleNamespace",
            "from liveshift.criu_glue.memory.source import source_engine, userfault",
            "from liveshift.runtime.agent import preflight",
            "print('cffi' in sys.modules)",
            "preflight.warm_tools(SimpleNamespace(files=lambda: [], warm=lambda: None))",
            "print('cffi' in sys.modules)",
        )
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False", "True"]
