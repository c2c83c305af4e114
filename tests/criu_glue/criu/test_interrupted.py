# SPDX-License-Identifier: Apache-2.0
"""A poll(2) without timeout waits on when CRIU has dumped its thread, here and elsewhere."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest
from captured import ROOT_PID, Sink, sink
from checkout import ROOT
from one_sandbox import said
from sandbox_trees import SandboxMaker, criu, goes_on, moved, new_sandboxes, place
from waits import until

from liveshift.criu_glue.capsule.output import STDERR
from liveshift.criu_glue.capsule.sandboxes import Sandbox
from liveshift.criu_glue.criu.dump import FrozenTree
from liveshift.criu_glue.criu.tool import Criu

__all__ = ["criu", "new_sandboxes", "place", "sink"]

SOURCE = ROOT / "criu_glue" / "criu" / "interrupted_shim.c"
POLL, EPOLL_WAIT = 7, 232
NOINTR, RESTARTBLOCK = (1 << 64) - 513, (1 << 64) - 516
ENDLESS = (1 << 32) - 1

WAITING = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def wait(fd, timeout_ms):
    entry = (ctypes.c_int * 2)(fd, 1)
    answer = libc.poll(entry, 1, timeout_ms)
    os.write(2, b"%d %d\\n" % (answer, ctypes.get_errno() if answer < 0 else 0))
pipes = [os.pipe() for _ in range(3)]
if not os.fork():
    wait(pipes[2][0], -1); time.sleep(600)
for r, _ in pipes[:2]: threading.Thread(target=wait, args=(r, -1), daemon=True).start()
for n in range(10**9):
    os.write(1, b"%d\\n" % n)
    if os.path.exists("/tmp/enough"): [os.write(w, b"x") for _, w in pipes]; time.sleep(1); break
    time.sleep(0.01)
"""
"""Two threads and the first thread of a child call the C library's poll, which does not begin it
again by itself."""


def wait_until_answered(there: Sandbox) -> None:
    """All three polls return at once, as their pipes have something to read."""
    assert said(there, STDERR) == "", "one returned before"
    (there.root / "tmp/enough").touch()
    until(lambda: said(there, STDERR).count("\n") == 3)
    assert said(there, STDERR) == "1 0\n" * 3


@pytest.mark.root
def test_a_poll_is_not_interrupted_by_a_move(
    criu: Criu, new_sandboxes: SandboxMaker, place: Path, sink: Sink
) -> None:
    here, there = new_sandboxes.counting(WAITING), new_sandboxes.empty()
    moved(criu, here, there, place, sink)
    assert goes_on(there)
    wait_until_answered(there)


@pytest.mark.root
def test_a_poll_is_not_interrupted_by_dumps_after_which_the_tree_goes_on(
    criu: Criu, new_sandboxes: SandboxMaker, place: Path, sink: Sink
) -> None:
    """As after each snapshot, and after a move that failed."""
    here = new_sandboxes.counting(WAITING)
    for number in range(3):
        sink.images.clear()
        sink.ended.clear()
        frozen = FrozenTree(here, ROOT_PID, place / f"images-{number}")
        frozen.dump(criu, sink, 60)
        frozen.thaw()
        assert goes_on(here)
    wait_until_answered(here)


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("shim")
    (folder / "cases.c").write_text(
        f'#include "{SOURCE}"\n'
        "EXPORT unsigned long long read_as(unsigned long long call, unsigned long long result,"
        " unsigned long long timeout_ms, size_t size) {\n"
        "    struct user_regs_struct regs = {.orig_rax = call, .rax = result, .rdx = timeout_ms};\n"
        "    call_again(&regs, size ? size : sizeof regs);\n"
        "    return regs.rax;\n"
        "}\n"
    )
    library = folder / "cases.so"
    command = ["cc", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", str(library)]
    subprocess.run([*command, str(folder / "cases.c")], check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.read_as.argtypes = [ctypes.c_uint64] * 3 + [ctypes.c_size_t]
    loaded.read_as.restype = ctypes.c_uint64
    return loaded


@pytest.mark.parametrize(
    ("call", "result", "timeout_ms", "size", "read_as"),
    [
        (POLL, RESTARTBLOCK, ENDLESS, 0, NOINTR),
        (EPOLL_WAIT, RESTARTBLOCK, ENDLESS, 0, RESTARTBLOCK),
        (POLL, 1, ENDLESS, 0, 1),
        (POLL, RESTARTBLOCK, 1000, 0, RESTARTBLOCK),
        (POLL, RESTARTBLOCK, ENDLESS, 68, RESTARTBLOCK),
    ],
    ids=["a poll without timeout", "another call", "it had returned", "with a timeout", "32 bits"],
)
def test_only_a_poll_without_timeout_is_read_as_a_call_to_be_made_again(
    shim: ctypes.CDLL, call: int, result: int, timeout_ms: int, size: int, read_as: int
) -> None:
    assert shim.read_as(call, result, timeout_ms, size) == read_as
