# SPDX-License-Identifier: Apache-2.0
"""The simulated NCCL keeps the contract that liveshift relies on, and looks like each version."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from contract import run_nccl
from doubles.gpu.build import program
from doubles.gpu.build_nccl import DEFAULT, SOURCES, VERSIONS, build_nccl
from sanitizers import BUILT

OLD, NEW = VERSIONS[0], VERSIONS[-1]

LATER = {
    "AlltoAll",
    "CommGrow",
    "CommMemStats",
    "CommResume",
    "CommRevoke",
    "CommShrink",
    "CommSuspend",
    "CommWindowRegister",
    "DevCommCreate",
    "PutSignal",
    "WinGetUserPtr",
}
"""Some of what came between 2.26 and 2.29.7."""


@pytest.mark.parametrize("name", run_nccl.PROGRAMS)
def test_contract(tmp_path: Path, name: str) -> None:
    lines = run_nccl.run_program(name, run_nccl.doubles(BUILT), tmp_path)
    assert lines[0].startswith("simulated: liveshift simulated GPU")
    assert lines[0].endswith("NCCL 2.29.7")
    assert any(line.startswith("ok ") for line in lines)
    skipped = [line for line in lines[1:] if not line.startswith("ok ")]
    assert all(line.endswith("not in NCCL 22907") for line in skipped), skipped


@pytest.mark.parametrize("version", [OLD, NEW])
def test_other_versions_keep_it_too(tmp_path: Path, version: int) -> None:
    lines = run_nccl.run_program("nccl_collectives", run_nccl.doubles(BUILT, version), tmp_path)
    assert f"NCCL 2.{version // 100 % 100}.{version % 100}" in lines[0]
    assert ("skip windows: not in NCCL 22604" in lines) == (version == OLD)
    assert ("ok a collective with a config of its own" in lines) == (version == NEW)


@pytest.mark.parametrize("with_ras", [False, True])
def test_traps_and_strictness(
    tmp_path: Path, with_ras: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if with_ras:
        monkeypatch.setenv("WITH_RAS", "1")
    libraries = run_nccl.doubles(BUILT)
    lines = run_nccl.run_program("nccl_strict", libraries, tmp_path, SOURCES.parent / "programs")
    assert all(line.startswith("ok ") for line in lines[1:])
    survives = "ok with RAS on its thread outlives the communicators"
    assert (survives in lines) == with_ras
    assert len(lines) == (4 if with_ras else 8)


def exported(library: Path) -> dict[str, str]:
    """Symbol name to binding, as nm says: W weak, T strong."""
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", str(library)], check=True, capture_output=True, text=True
    )
    rows = (line.split() for line in listed.stdout.splitlines())
    return {row[2].partition("@")[0]: row[1] for row in rows}


def test_it_exports_what_the_real_one_does() -> None:
    public: dict[int, set[str]] = {}
    for version in (OLD, DEFAULT, NEW):
        symbols = exported(build_nccl(BUILT, version))
        strong = {name for name, binding in symbols.items() if binding == "T"}
        weak = {name for name, binding in symbols.items() if binding == "W"}
        assert strong == {"p" + name for name in weak} | {"ncclResetDebugInitInternal"}
        public[version] = {name.removeprefix("nccl") for name in weak}
    assert LATER.isdisjoint(public[OLD])
    assert public[OLD] | LATER <= public[DEFAULT] < public[NEW]
    # as counted in the real libraries
    assert (len(public[DEFAULT]), len(public[NEW])) == (68, 96)


INTERPOSER = r"""
#include <dlfcn.h>
#include <stdio.h>
#include "nccl_abi.h"
#define FORWARD(name, ...)                                                \
    fprintf(stderr, "seen " #name " %p\n", (void *)comm);                 \
    void *library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_NOLOAD);       \
    return ((__typeof__(&name))dlsym(library, "p" #name))(__VA_ARGS__)
ncclResult_t ncclBroadcast(const void *send, void *recv, size_t count, ncclDataType_t type,
                           int root, ncclComm_t comm, nccl_stream stream) {
    FORWARD(ncclBroadcast, send, recv, count, type, root, comm, stream);
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error) {
    FORWARD(ncclCommGetAsyncError, comm, error);
}
ncclResult_t ncclCommRegister(const ncclComm_t comm, void *buffer, size_t size, void **handle) {
    FORWARD(ncclCommRegister, comm, buffer, size, handle);
}
"""

CALLER = r"""
#include "nccl_ranks.h"
static void body(struct rank *self) {
    ncclComm_t comm = world(self);
    ncclWindow_t window;
    int *number = device_bytes(4096);
    NCCL(pncclBcast(number, 1, ncclInt32, 0, comm, NULL));
    NCCL(pncclCommWindowRegister(comm, number, 4096, &window, 0));
    finish(NULL);
    fprintf(stderr, "real %p\n", (void *)comm);
    NCCL(ncclCommDestroy(comm));
}
int main(void) { return run_ranks(1, body, 0); }
"""


def test_it_reenters_an_interposer_with_real_handles(tmp_path: Path) -> None:
    libraries = run_nccl.doubles(BUILT)
    (tmp_path / "interposer.c").write_text(INTERPOSER)
    (tmp_path / "caller.c").write_text(CALLER)
    preload = program(
        tmp_path / "interposer.c", tmp_path / "interposer.so", [], ["-fPIC", "-shared"]
    )
    caller = program(
        tmp_path / "caller.c",
        tmp_path / "caller",
        [libraries.libnccl, libraries.libcuda],
        [f"-I{run_nccl.HERE}"],
    )
    done = subprocess.run(
        [str(caller)],
        env={**os.environ, **libraries.environment, "LD_PRELOAD": str(preload)},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    words = [line.split() for line in done.stderr.splitlines()]
    handle = next(line[1] for line in words if line[0] == "real")
    seen = {line[1] for line in words if line[0] == "seen" and line[2] == handle}
    assert seen == {"ncclBroadcast", "ncclCommGetAsyncError", "ncclCommRegister"}


def test_it_says_what_it_is(tmp_path: Path) -> None:
    libraries = run_nccl.doubles(BUILT)
    (tmp_path / "caller.c").write_text(CALLER)
    caller = program(
        tmp_path / "caller.c",
        tmp_path / "caller",
        [libraries.libnccl, libraries.libcuda],
        [f"-I{run_nccl.HERE}"],
    )
    environment = {**os.environ, **libraries.environment, "NCCL_DEBUG": "VERSION"}
    done = subprocess.run(
        [str(caller)], env=environment, capture_output=True, text=True, timeout=30, check=True
    )
    assert "NCCL version 2.29.7+liveshift.simulated" in done.stderr
    assert "SIMULATED NCCL: a double" in (SOURCES / "sim.h").read_text()
