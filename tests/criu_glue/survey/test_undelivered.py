# SPDX-License-Identifier: Apache-2.0
"""A connection that was closed before the peer had all of its data keeps a capsule where it is."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from captured import PYTHON
from one_sandbox import Start, netns, plan, said, start
from waits import until

from liveshift.criu_glue.survey import undelivered
from liveshift.criu_glue.survey.undelivered import REMEDY, find, parse, stuck

__all__ = ["netns", "plan", "start"]

HEAD = "  sl  local_address rem_address st tx_queue rx_queue tr tm->when retrnsmt uid timeout inode"


def row(own: str, peer: str, state: str, waits: int, inode: int) -> str:
    return f"   0: {own} {peer} {state} {waits:08X}:00000000 00:00000000 00000000 0 0 {inode} 1 0"


ROWS = {
    row("0100007F:1F90", "0100007F:8E5C", "04", 300, 0): ["127.0.0.1:36444"],
    row("0201630A:1F90", "0301630A:8E5C", "09", 1, 0): ["10.99.1.3:36444"],
    row("0201630A:1F90", "0301630A:8E5C", "0B", 1, 0): ["10.99.1.3:36444"],
    row("0201630A:1F90", "057100CB:01BB", "04", 300, 0): [],  # it breaks anyway
    row("0201630A:1F90", "0301630A:8E5C", "01", 300, 4711): [],  # CRIU carries it
    row("0201630A:1F90", "0301630A:8E5C", "04", 300, 4711): [],
    row("0201630A:1F90", "0301630A:8E5C", "05", 0, 0): [],  # FIN_WAIT2: the peer has all
    row("0201630A:1F90", "0301630A:8E5C", "06", 0, 0): [],  # TIME_WAIT
}


@pytest.mark.parametrize("line", ROWS)
def test_what_no_process_has_and_the_peer_lacks_is_read_off_the_kernels_table(line: str) -> None:
    assert list(parse(f"{HEAD}\n{line}\n")) == ROWS[line]


PROGRAM = """
import os, socket, time
server = socket.create_server(("127.0.0.1", 8000))
client = socket.create_connection(("127.0.0.1", 8000))
peer, _ = server.accept()
peer.setblocking(False)
sent = 0
try:
    while True:
        sent += peer.send(bytes(1 << 16))
except BlockingIOError:
    pass
peer.close()
print("closed", flush=True)
while not os.path.exists("/tmp/read"):
    time.sleep(0.01)
got = 0
while piece := client.recv(1 << 20):
    got += len(piece)
print("all" if got == sent else f"{got} of {sent}", flush=True)
time.sleep(60)
"""


@pytest.mark.root
def test_it_is_named_until_the_peer_has_read_all(
    start: Start, netns: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(undelivered, "LOOK_S", 0.02)
    subprocess.run(["ip", "-netns", netns.name, "link", "set", "lo", "up"], check=True)
    here = start(PYTHON, "-Sc", PROGRAM)
    until(lambda: "closed" in said(here))
    ((text, remedy),) = find(here.init)
    assert text.startswith("a closed connection to 127.0.0.1:")
    assert text.endswith("has data that the peer lacks")
    assert remedy == REMEDY
    assert stuck(here.init) == [(text, remedy)]
    (here.root / "tmp/read").touch()
    until(lambda: "all" in said(here))
    until(lambda: not find(here.init))
    assert stuck(here.init) == []
