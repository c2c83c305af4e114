# SPDX-License-Identifier: Apache-2.0
"""The interposer under real torch and gloo, and its fork, exec and failure behaviour.

The first half runs two ranks of real torch over loopback. The second drives the same library with a
small C program, linked to a C double of libtorch_cpu.so whose collectives do nothing or call back.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from checkout import INTERPOSER

import liveshift
from liveshift.interposer import library, page, page_directory
from liveshift.interposer.elf import ElfError, shared_library

BARRIER = "_ZN4gloo7barrierERNS_14BarrierOptionsE"


def preloaded(pages: Path | None, **extra: str) -> dict[str, str]:
    """An environment in which programs run under the interposer."""
    unwanted = ("LIVESHIFT_PAGES", "RANK", "WORLD_SIZE", "LOCAL_RANK")
    environment = {k: v for k, v in os.environ.items() if k not in unwanted}
    environment["LD_PRELOAD"] = str(library.library_path())
    if pages is not None:
        environment["LIVESHIFT_PAGES"] = str(pages)
    return environment | extra


def used(seen: page.Page) -> dict[str, int]:
    """Kinds that were called at all, with their counts; begun and back must agree."""
    assert seen.started == seen.finished
    return {kind: count for kind, count in seen.begun.items() if count}


# --- real torch ---------------------------------------------------------------------------------

WORKER = """
import json, os, sys
from datetime import timedelta
import torch
import torch.distributed as dist

folder, rank = sys.argv[1], int(os.environ["RANK"])

def group(name, rank, size):
    dist.init_process_group("gloo", init_method=f"file://{folder}/{name}", rank=rank,
                            world_size=size, timeout=timedelta(seconds=60))

group("store", rank, 2)
seen = {"pid": os.getpid()}
value = torch.full((3,), rank + 1.0)
for _ in range(5):
    dist.all_reduce(value)                         # 1 + 2, then doubled four times
seen["all_reduce"] = value.tolist()
value = torch.full((2,), 10.0 + rank)
for _ in range(3):
    dist.broadcast(value, src=1)
seen["broadcast"] = value.tolist()
dist.barrier()
dist.barrier()
parts = [torch.zeros(1) for _ in range(2)]
for _ in range(4):
    dist.all_gather(parts, torch.tensor([float(rank)]))
seen["all_gather"] = [p.item() for p in parts]
value = torch.tensor([rank + 1.0])
dist.reduce(value, dst=0)
seen["reduce"] = value.item() if rank == 0 else 3.0
dist.gather(torch.tensor([float(rank)]), parts if rank == 0 else None, dst=0)
seen["gather"] = [p.item() for p in parts]
value = torch.zeros(1)
dist.scatter(value, [torch.tensor([5.0]), torch.tensor([6.0])] if rank == 0 else None, src=0)
seen["scatter"] = value.item()
value = torch.zeros(2)
dist.all_to_all_single(value, torch.tensor([rank * 10.0, rank * 10.0 + 1]))
seen["all_to_all"] = value.tolist()

if rank == 1:
    dist.destroy_process_group()                   # the peer is gone
else:
    try:
        dist.all_reduce(torch.ones(1))
        seen["raised"] = None
    except RuntimeError as error:
        seen["raised"] = str(error)
    dist.destroy_process_group()                   # without it torch may abort at exit, by itself

if rank == 1:
    for name, pages in (("counted", os.environ["LIVESHIFT_PAGES"]), ("uncounted", None)):
        if pages is None:
            del os.environ["LIVESHIFT_PAGES"]
        child = os.fork()
        if child == 0:
            group(name, 0, 1)
            value = torch.ones(1)
            dist.all_reduce(value)
            dist.all_reduce(value)
            os._exit(0 if value.item() == 1.0 else 1)
        seen[name] = [child, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])]

with open(f"{folder}/rank{rank}.json", "w") as out:
    json.dump(seen, out)
"""


class Run:
    """What the two ranks of one run left behind."""

    def __init__(self, folder: Path) -> None:
        self.pages = folder / "pages"
        self.ranks = [json.loads((folder / f"rank{r}.json").read_text()) for r in range(2)]

    def page(self, rank: int) -> page.Page:
        return page.read(self.pages / str(self.ranks[rank]["pid"]))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("gloo")
    (folder / "pages").mkdir()
    (folder / "worker.py").write_text(WORKER)
    ranks = []
    with ExitStack() as cleanup:
        for rank in range(2):
            environment = preloaded(
                folder / "pages",
                RANK=str(rank),
                WORLD_SIZE="2",
                LOCAL_RANK=str(rank),
                GLOO_SOCKET_IFNAME="lo",
                OMP_NUM_THREADS="1",
            )
            command = [sys.executable, str(folder / "worker.py"), str(folder)]
            process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
            ranks.append(cleanup.enter_context(process))
            cleanup.callback(process.kill)
        said = [rank.communicate(timeout=100)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)
    return Run(folder)


@pytest.mark.parametrize("rank", [0, 1])
def test_results_of_collectives_are_right(run: Run, rank: int) -> None:
    seen = run.ranks[rank]
    assert seen["all_reduce"] == [48.0] * 3
    assert seen["broadcast"] == [11.0] * 2
    assert seen["all_gather"] == [0.0, 1.0]
    assert seen["reduce"] == 3.0
    assert seen["gather"] == [0.0, 1.0]
    assert seen["scatter"] == 5.0 + rank
    assert seen["all_to_all"] == [0.0 + rank, 10.0 + rank]


@pytest.mark.parametrize(("rank", "failed"), [(0, 1), (1, 0)])
def test_every_collective_is_counted_once(run: Run, rank: int, failed: int) -> None:
    """Rank 0's last all_reduce raised; it too has begun and come back, all on one clock."""
    with page.opened(run.pages / str(run.ranks[rank]["pid"])) as file:
        answer = file.answer()
    assert answer["unidentified"] == answer["untracked"] == 0
    assert used(run.page(rank)) == {
        "gloo.allreduce": 5 + failed,
        "gloo.broadcast": 3,
        "gloo.barrier": 2,
        "gloo.allgather": 4,
        "gloo.reduce": 1,
        "gloo.gather": 1,
        "gloo.scatter": 1,
        "gloo.alltoall": 1,
    }


@pytest.mark.parametrize("rank", [0, 1])
def test_a_page_tells_whose_it_is(run: Run, rank: int) -> None:
    seen = run.page(rank)
    assert (seen.pid, seen.rank, seen.world_size, seen.local_rank) == (
        run.ranks[rank]["pid"],
        rank,
        2,
        rank,
    )
    assert seen.command == Path(sys.executable).name
    assert seen.version == liveshift.__version__
    now = time.monotonic_ns()
    assert now - 300e9 < seen.created_ns < now


def test_a_raising_collective_is_a_python_exception(run: Run) -> None:
    assert run.ranks[0]["raised"], "all_reduce without its peer returned as if all were well"


def test_a_forked_rank_has_a_page_of_its_own(run: Run) -> None:
    pid, code = run.ranks[1]["counted"]
    assert code == 0
    assert used(page.read(run.pages / str(pid))) == {"gloo.allreduce": 2}


def test_without_a_pages_folder_collectives_pass_uncounted(run: Run) -> None:
    pid, code = run.ranks[1]["uncounted"]
    assert code == 0
    assert not (run.pages / str(pid)).exists()
    assert len(list(run.pages.iterdir())) == 3  # two ranks, one counted child, no draft


def torch_library() -> Path:
    """libtorch_cpu.so of the installed torch, found without importing it."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "lib" / "libtorch_cpu.so"


def test_the_installed_torch_has_every_required_symbol_and_is_asked_quickly() -> None:
    library.missing_symbols(torch_library())  # brings the file's pages into memory
    began = time.process_time()
    assert library.missing_symbols(torch_library()) == []
    assert library.missing_symbols(torch_library(), "identity") == []
    assert time.process_time() - began < 0.3


def test_every_listed_name_is_hooked() -> None:
    hooked = library.hooked_symbols()
    assert len(hooked) >= 11
    assert {need for need, _ in hooked} == {"required", "optional", "identity"}
    with shared_library(library.library_path()) as hooks:
        assert all(hooks.address_of(name) for _, name in hooked)
        assert hooks.address_of("_ZN4gloo7barrierE") is None


# --- the C double -------------------------------------------------------------------------------

DOUBLE = """
#include "hooks/entry_points.h"
#define X(kind, symbol, need) \\
    void symbol(void *options) { if (options) ((void (*)(void))options)(); }
LIVESHIFT_GLOO_ENTRY_POINTS(X)
"""

# Its arguments are steps, done in order.
DRIVER = """
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include "hooks/entry_points.h"
#define barrier _ZN4gloo7barrierERNS_14BarrierOptionsE
void barrier(void *options);
static pthread_barrier_t together;
static void wait_for_line(void) { puts("inside"); fflush(stdout); getchar(); }
static void *many(void *unused) {
    pthread_barrier_wait(&together);
    for (int i = 0; i < 1000; i++) barrier(unused);
    return unused;
}
int main(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "call")) barrier(NULL);
        if (!strcmp(argv[i], "block")) barrier(wait_for_line);
        if (!strcmp(argv[i], "exec")) execv(argv[0], argv + i);
        if (!strcmp(argv[i], "fork")) {
            pid_t child = fork();
            if (child > 0) { waitpid(child, NULL, 0); printf("%d\\n", child); return 0; }
        }
        if (!strcmp(argv[i], "threads")) {
            pthread_t threads[4];
            pthread_barrier_init(&together, NULL, 4);
            for (int t = 0; t < 4; t++) pthread_create(&threads[t], NULL, many, NULL);
            for (int t = 0; t < 4; t++) pthread_join(threads[t], NULL);
        }
    }
    return 0;
}
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("driver")
    (folder / "double.c").write_text(DOUBLE)
    (folder / "driver.c").write_text(DRIVER)
    cc = [*os.environ.get("CC", "cc").split(), "-std=gnu11", "-O1", "-I", str(INTERPOSER)]
    double = folder / "libtorch_cpu.so"
    soname = "-Wl,-soname,libtorch_cpu.so"
    subprocess.run([*cc, "-shared", "-fPIC", soname, "-o", double, folder / "double.c"], check=True)
    program = folder / "driver"
    subprocess.run(
        [*cc, "-pthread", "-o", program, folder / "driver.c", double, f"-Wl,-rpath,{folder}"],
        check=True,
    )
    return program


@pytest.fixture
def pages(tmp_path: Path) -> Path:
    folder = tmp_path / "pages"
    folder.mkdir()
    return folder


def drive(driver: Path, pages: Path | None, *steps: str) -> tuple[int, str]:
    """Run the driver to its end; returns its pid and what it printed, stderr included."""
    with subprocess.Popen(
        [driver, *steps],
        env=preloaded(pages),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        said, _ = process.communicate(timeout=30)
    assert process.returncode == 0, said
    return process.pid, said


def test_a_process_without_collectives_leaves_nothing(driver: Path, pages: Path) -> None:
    assert drive(driver, pages)[1] == ""
    assert list(pages.iterdir()) == []


def test_no_pages_folder_no_counting(driver: Path) -> None:
    assert drive(driver, None, "call", "call")[1] == ""


def test_ranks_are_unknown_without_their_variables(driver: Path, pages: Path) -> None:
    pid, _ = drive(driver, pages, "call")
    seen = page.read(pages / str(pid))
    assert (seen.rank, seen.world_size, seen.local_rank) == (None, None, None)
    assert seen.command == "driver"


def test_a_collective_in_flight_is_visible(driver: Path, pages: Path) -> None:
    with subprocess.Popen(
        [driver, "call", "block"],
        env=preloaded(pages),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "inside\n"
        (seen,) = page_directory.pages(pages)
        assert seen.begun["gloo.barrier"] == 2
        assert seen.started - seen.finished == 1
        open_files = [os.readlink(f) for f in Path(f"/proc/{process.pid}/fd").iterdir()]
        assert not [f for f in open_files if f.startswith(str(pages))]
        assert str(pages) in Path(f"/proc/{process.pid}/maps").read_text()
        process.communicate("\n", timeout=30)
    assert used(page.read(pages / str(process.pid))) == {"gloo.barrier": 2}


def test_threads_share_one_page_and_lose_no_count(driver: Path, pages: Path) -> None:
    pid, _ = drive(driver, pages, "threads")
    (seen,) = page_directory.pages(pages)
    assert seen.pid == pid
    assert used(seen) == {"gloo.barrier": 4000}


def test_a_forked_child_counts_for_itself(driver: Path, pages: Path) -> None:
    pid, said = drive(driver, pages, "call", "fork", "call", "call")
    assert used(page.read(pages / str(pid))) == {"gloo.barrier": 1}
    assert used(page.read(pages / said.strip())) == {"gloo.barrier": 2}


def test_a_forked_child_without_collectives_leaves_nothing(driver: Path, pages: Path) -> None:
    pid, _ = drive(driver, pages, "call", "fork")
    assert [p.name for p in pages.iterdir()] == [str(pid)]


def test_exec_begins_a_new_page_under_the_same_pid(driver: Path, pages: Path) -> None:
    pid, _ = drive(driver, pages, "call", "call", "call", "exec", "call")
    assert [p.name for p in pages.iterdir()] == [str(pid)]
    assert used(page.read(pages / str(pid))) == {"gloo.barrier": 1}


def test_an_unusable_pages_folder_is_said_once_and_the_job_goes_on(
    driver: Path, tmp_path: Path
) -> None:
    absent = tmp_path / "absent"
    _, said = drive(driver, absent, "call", "call")
    assert said.count("\n") == 1
    assert f"LIVESHIFT_PAGES={absent}: No such file or directory" in said


def test_a_full_filesystem_is_an_error_and_no_signal(driver: Path, pages: Path) -> None:
    """By the file size limit, which write() reports as a full filesystem is reported."""
    limited = ["sh", "-c", 'trap "" XFSZ; ulimit -f 0; exec "$@"', "sh", str(driver), "call"]
    process = subprocess.run(limited, env=preloaded(pages), capture_output=True, text=True)
    assert process.returncode == 0
    assert "File too large" in process.stderr
    assert list(pages.iterdir()) == []


def test_a_missing_real_function_stops_the_process_by_name() -> None:
    call = f"import ctypes, sys; ctypes.CDLL(sys.argv[1])['{BARRIER}'](None)"
    command = [sys.executable, "-c", call, str(library.library_path())]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == -signal.SIGABRT
    assert process.stderr.count("\n") == 1
    assert BARRIER in process.stderr
    assert "libtorch_cpu.so: it is not loaded" in process.stderr


def test_the_version_is_exported() -> None:
    loaded = ctypes.CDLL(str(library.library_path()))
    loaded.liveshift_interposer_version.restype = ctypes.c_char_p
    assert loaded.liveshift_interposer_version().decode() == liveshift.__version__


def test_a_library_without_gloo_lacks_the_required_names(driver: Path) -> None:
    required = [name for need, name in library.hooked_symbols() if need == "required"]
    assert library.missing_symbols(driver.parent / "libtorch_cpu.so") == []
    assert required
    assert library.missing_symbols(library_with_nothing(driver.parent)) == required


def library_with_nothing(folder: Path) -> Path:
    """A shared library that exports one function, and nothing of gloo."""
    path = folder / "nothing.so"
    cc = os.environ.get("CC", "cc").split()
    subprocess.run(
        [*cc, "-shared", "-fPIC", "-x", "c", "-", "-o", path],
        input="int nothing(void) { return 0; }",
        text=True,
        check=True,
    )
    return path


@pytest.mark.parametrize("content", [b"", b"not ELF", b"\x7fELF\x02\x01", b"\x7fELF\x02\x01" * 99])
def test_a_file_that_is_no_library_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "odd.so"
    path.write_bytes(content)
    with pytest.raises(ElfError, match=r"odd\.so"):
        library.missing_symbols(path)
    with pytest.raises(ElfError, match=r"absent\.so"):
        library.missing_symbols(tmp_path / "absent.so")
