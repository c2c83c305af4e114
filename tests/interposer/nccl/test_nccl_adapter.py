# SPDX-License-Identifier: Apache-2.0
"""NCCL's functions under the interposer, on the simulated CUDA and NCCL: counted, gated, torn down
and rebuilt beneath programs that know nothing of it."""

from __future__ import annotations

import itertools
import os
import subprocess
from pathlib import Path

import pytest
import sanitizers
from checkout import ROOT
from doubles.gpu.build import INCLUDE, program
from nccl_coordinator import TWO_DEVICES, World

from liveshift.interposer import library, page, page_directory

CONTRACT = ROOT / "integration" / "gpu" / "contract"


@pytest.fixture(scope="module")
def undisturbed(world: World, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What train prints at its end without the interposer."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with world.ranks("train", 3, folder / "run", "80", preload=False) as ranks:
        return ranks.finish()


def test_calls_are_counted(world: World, tmp_path: Path, undisturbed: list[str]) -> None:
    with world.ranks("train", 3, tmp_path / "run", "80") as ranks:
        assert ranks.finish() == undisturbed
    for rank, process in enumerate(ranks.processes):
        seen = page.read(tmp_path / "run" / "pages" / str(process.pid))
        assert seen.started == seen.finished
        assert seen.begun["nccl.AllReduce"] == 80 + 240 + (4 if rank else 2)
        assert seen.begun["nccl.Broadcast"] == 240
        assert seen.begun["nccl.Send"] == 80 + (80 if rank < 2 else 0)
        assert seen.begun["nccl.Recv"] == 80 + (80 if rank > 0 else 0)
        assert seen.begun["nccl.ReduceScatter"] == 16
        assert seen.begun["nccl.CommInit"] == 2
        assert seen.begun["nccl.CommSplit"] == 5
        assert seen.begun["nccl.CommDestroy"] == 3 + (4 if rank else 2)


def test_moved_again_and_again_with_the_same_result(
    world: World, tmp_path: Path, undisturbed: list[str]
) -> None:
    """Collectives, groups, pipelines, a second thread; a watchdog that asks all the while."""
    with world.ranks("train", 3, tmp_path / "run", "80") as ranks:
        ranks.await_line("step 1")
        assert ranks.move_until_the_end(7) >= 3
        assert ranks.finish() == undisturbed


OLDEST = ("S", "k", "g", "Iw", "sw", "I", "A")
"""How creations.c has made its communicators, and how their names begin, the oldest first."""


def test_communicators_made_in_every_way_are_rebuilt(world: World, tmp_path: Path) -> None:
    """Init, initAll, scalable, split of two, shrink, grow, non-blocking, in a group; with windows
    and operators on them."""

    def run(folder: str, preload: bool) -> tuple[list[str], int, int]:
        with world.ranks(
            "creations", 3, tmp_path / folder, "60", preload=preload, SIMCUDA_DEVICES=TWO_DEVICES
        ) as ranks:
            ranks.await_line("made")
            moved = late = 0
            if preload:
                moved = ranks.move_until_line("ending", 3)
                late = ranks.move_until_the_end(4)
            return ranks.finish(), moved, late

    undisturbed, *_ = run("undisturbed", False)
    result, moved, late = run("moved", True)
    assert result == undisturbed
    assert moved >= 2
    pages = page_directory.paths(tmp_path / "moved" / "pages")
    assert len(pages) == 3
    for path in pages:
        with page.opened(path) as file:
            rows = file.communicators()
            assert {row.made_by for row in rows} >= set("SgIA")
            alone = [row for row in rows if row.made_by == "s" and row.size == 1]
            assert [row.generation for row in alone] in ([], [0])  # destroyed before the moves
            # All went through the moves before the program's end. It then destroys them, the newest
            # first, also while a move is under way or given up.
            alive = [row for row in rows if row not in alone]
            assert moved - 1 <= min(row.generation for row in alive)
            assert max(row.generation for row in alive) <= moved + late + 1
            # Two of "I" are made in one group, and the two of "A" are destroyed in one.
            kinds = [
                [r.generation for r in alive if f"{r.made_by}{r.name[:1]}" == k] for k in OLDEST
            ]
            assert sum(map(len, kinds)) == len(alive)
            found = [kind for kind in kinds if kind]
            assert all(min(a) >= max(b) for a, b in itertools.pairwise(found)), found
            assert "waits for nobody" in {row.name for row in rows}


@pytest.mark.parametrize("name", sorted(source.stem for source in CONTRACT.glob("nccl_*.c")))
def test_the_contract_holds_under_the_interposer(
    world_2_32: World, tmp_path: Path, name: str
) -> None:
    """The programs that tell what NCCL does notice no difference (a shorter config among it,
    nccl#2347)."""
    world = world_2_32
    source = CONTRACT / f"{name}.c"
    flags = [f"-I{CONTRACT}", *world.flags]
    flags += sanitizers.first(world.linked) if world.linked else []
    target = program(source, tmp_path / name, [world.libnccl, world.libcuda], flags)
    (tmp_path / "pages").mkdir()
    environment = (
        os.environ
        | sanitizers.OPTIONS
        | {
            "LD_LIBRARY_PATH": f"{world.libcuda.parent}:{world.libnccl.parent}",
            "LIVESHIFT_PAGES": str(tmp_path / "pages"),
        }
    )
    if world.linked is None:
        environment["LD_PRELOAD"] = str(library.library_path())
    done = subprocess.run([target], env=environment, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    assert "ok " in done.stdout
    seen = [page.read(path) for path in page_directory.paths(tmp_path / "pages")]
    assert sum(each.started for each in seen) > 0


def test_a_function_that_this_nccl_lacks_is_named(world: World, tmp_path: Path) -> None:
    with world.ranks("commanded", 1, tmp_path / "run") as ranks:
        ranks.await_line("begun")
        assert ranks.ask("encrypt") == ["5"]  # ncclInvalidUsage
        assert (
            "liveshift: ncclSetEncryption was called, but there is no pncclSetEncryption in "
            "libnccl.so.2: it does not export that name"
        ) in ranks.said(0)


def test_our_declarations_are_those_of_the_double(tmp_path: Path) -> None:
    """Two files written apart, for one ABI."""
    values = (
        "sizeof(ncclUniqueId)",
        "ncclInProgress",
        "ncclRemoteError",
        "ncclInvalidUsage",
        "NCCL_SPLIT_NOCOLOR",
        "sizeof(ncclWaitSignalDesc_t)",
        "sizeof(ncclTeam_t)",
        "offsetof(CONFIG, blocking)",
        "offsetof(CONFIG, netName)",
        "offsetof(CONFIG, trafficClass)",
        "offsetof(CONFIG, commName)",
        "offsetof(CALL_CONFIG, algSelection)",
        "MAGIC",
        "OPS",
    )
    ours = (
        "CONFIG=struct nccl_config",
        "CALL_CONFIG=struct nccl_call_config",
        ("MAGIC=NCCL_CONFIG_MAGIC"),
        "OPS=NCCL_NUM_OPS",
    )
    theirs = (
        "CONFIG=ncclConfig_t",
        "CALL_CONFIG=ncclCollConfig_t",
        ("MAGIC=NCCL_API_MAGIC"),
        "OPS=ncclNumOps",
    )
    printed = [f'printf("%lld\\n", (long long)({value}));' for value in values]
    source = tmp_path / "abi.c"
    source.write_text(
        '#include <stdio.h>\n#include "nccl_abi.h"\nint main(void) {' + "\n".join(printed) + "}"
    )

    def run(folder: Path, defines: tuple[str, ...]) -> str:
        flags = [f"-D{d}" for d in defines]
        command = [
            "cc",
            "-std=gnu11",
            f"-I{folder}",
            *flags,
            "-o",
            str(tmp_path / "abi"),
            str(source),
        ]
        subprocess.run(command, check=True)
        return subprocess.run([tmp_path / "abi"], check=True, capture_output=True, text=True).stdout

    assert run(ROOT / "interposer/nccl", ours) == run(INCLUDE, theirs)
