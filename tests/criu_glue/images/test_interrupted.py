# SPDX-License-Identifier: Apache-2.0
"""A poll(2) that waits while its capsule moves goes on waiting, as after a stop."""

from __future__ import annotations

import errno
import tarfile
from pathlib import Path

import pytest
from captured import Sink, sink
from checkout import ROOT
from image_edits import change_first, decode, encode
from one_sandbox import said
from sandbox_trees import SandboxMaker, criu, goes_on, moved, new_sandboxes, place
from waits import until

from liveshift.criu_glue.capsule.output import STDERR
from liveshift.criu_glue.criu.tool import Criu
from liveshift.criu_glue.images import interrupted
from liveshift.criu_glue.images.image_kinds import ImageFile
from liveshift.criu_glue.images.protobuf import ProtobufMessage

__all__ = ["criu", "new_sandboxes", "place", "sink"]

SEEDS = ROOT / "tests" / "fuzz" / "seeds"
AX, DX, ORIG_AX, IP, MODE = 11, 13, 16, 17, 28
POLL, EPOLL_WAIT, COMPAT = 7, 232, 2
ENDLESS = (1 << 32) - 1
EINTR = (1 << 64) - errno.EINTR

WAITING = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def wait(fd, timeout_ms):
    entry = (ctypes.c_int * 2)(fd, 1)
    answer = libc.poll(entry, 1, timeout_ms)
    os.write(2, b"%d %d\\n" % (answer, ctypes.get_errno() if answer < 0 else 0))
pipes = [os.pipe() for _ in range(2)]
for r, _ in pipes: threading.Thread(target=wait, args=(r, -1), daemon=True).start()
for n in range(10**9):
    os.write(1, b"%d\\n" % n)
    if os.path.exists("/tmp/enough"): [os.write(w, b"x") for _, w in pipes]; time.sleep(1); break
    time.sleep(0.01)
"""
"""Two threads that call the C library's poll, which does not begin it again by itself."""


@pytest.mark.root
def test_a_poll_is_not_interrupted_by_a_move(
    criu: Criu, new_sandboxes: SandboxMaker, place: Path, sink: Sink
) -> None:
    here, there = new_sandboxes.counting(WAITING), new_sandboxes.empty()
    moved(criu, here, there, place, sink)
    assert goes_on(there)
    assert said(there, STDERR) == "", "it returned"
    (there.root / "tmp/enough").touch()
    until(lambda: said(there, STDERR).count("\n") == 2)
    assert said(there, STDERR) == "1 0\n1 0\n"


@pytest.fixture
def core(tmp_path: Path) -> Path:
    with tarfile.open(SEEDS / "plain.tar.xz") as archive:
        archive.extractall(tmp_path)
    return tmp_path / "core-1001.img"


def registers(core: Path) -> dict[int, int | bytes]:
    thread = ProtobufMessage(ImageFile(core).entries[0]).message(2)
    raw = thread.raw(2) if thread is not None else None
    assert raw is not None
    return dict(decode(bytes(raw)))


def interrupted_in(
    core: Path, call: int, result: int = EINTR, mode: int = 1, timeout_ms: int = ENDLESS
) -> None:
    before = registers(core) | {AX: result, DX: timeout_ms, ORIG_AX: call, MODE: mode}
    change_first(core, (2, 2), encode(list(before.items())))
    interrupted.begin_again([ImageFile(core)])


def test_it_begins_again_at_its_instruction_and_nothing_else_changes(core: Path) -> None:
    size = len(core.read_bytes())
    before = registers(core)
    interrupted_in(core, POLL)
    after = registers(core)
    assert after[AX] == POLL
    assert after[IP] == int(before[IP]) - 2
    made = {AX: 0, IP: 0, DX: ENDLESS, ORIG_AX: POLL, MODE: 1}
    assert {**after, AX: 0, IP: 0} == {**before, **made}
    interrupted.begin_again([ImageFile(core)])
    assert registers(core) == after, "only once"
    assert abs(len(core.read_bytes()) - size) < 16


@pytest.mark.parametrize(
    ("call", "result", "mode", "timeout_ms"),
    [
        (EPOLL_WAIT, EINTR, 1, ENDLESS),
        (POLL, 10, 1, ENDLESS),
        (POLL, EINTR, COMPAT, ENDLESS),
        (POLL, 0, 1, ENDLESS),
        (POLL, EINTR, 1, 1000),
    ],
    ids=["another call", "a handler runs", "32 bits", "it had returned", "with a timeout"],
)
def test_others_stay_as_they_are(
    core: Path, call: int, result: int, mode: int, timeout_ms: int
) -> None:
    interrupted_in(core, call, result, mode, timeout_ms)
    assert registers(core)[AX] == result
