# SPDX-License-Identifier: Apache-2.0
"""The connections of a capsule that a move breaks are found and named."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from captured import PYTHON
from one_sandbox import Start, netns, plan, said, start
from waits import until

from liveshift.criu_glue.survey.connections import OutsideConnection, outside, parse

__all__ = ["netns", "plan", "start"]

INSIDE = ("10.99.0.0/16", "10.88.0.10")

TABLE = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0200630A:8E5C 057100CB:01BB 01 00000000:00000000 00:00000000 00000000     0        0 4711 1 0
   1: 00000000:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4712 1 0
   2: 0200630A:8E5D 057100CB:01BB 06 00000000:00000000 00:00000000 00000000     0        0 0 3 0
   3: 0000000000000000FFFF00000200630A:8E5E 0000000000000000FFFF0000057100CB:0050 08 0:0 0:0 0 0 0 9
   4: B80D0120000000000000000001000000:01 B80D0120000000000000000002000000:0016 01 0:0 0:0 0 0 0 10
"""


def test_open_connections_are_read_off_the_kernels_table() -> None:
    assert list(parse(TABLE)) == [
        (("203.0.113.5", 443), 4711),
        (("203.0.113.5", 80), 9),
        (("2001:db8::2", 22), 10),
    ]


def test_a_connection_is_told_in_words() -> None:
    plain = OutsideConnection("203.0.113.5", 443, 1001, "python", ("gRPC", "libcurl"))
    assert str(plain) == (
        "203.0.113.5:443 (https), of process 1001 (python), which has loaded gRPC and libcurl"
    )
    assert str(OutsideConnection("2001:db8::2", 50123)) == "[2001:db8::2]:50123"


PROGRAM = """
import os, socket, ssl, time
held = []
def reach(address, port, family=socket.AF_INET, say=None):
    server = socket.create_server((address, port))
    client = socket.socket(family)
    client.connect((say or address, port))
    peer = server.accept()[0]
    held.append((server, client))
    return peer
for address in ("127.0.0.1", "10.99.0.7", "10.88.0.10"):
    reach(address, 8000)
reach("203.0.113.5", 443)
reach("203.0.113.6", 50123, socket.AF_INET6, "::ffff:203.0.113.6")
reach("10.99.0.254", 9000)
if os.fork() == 0:
    held.clear()
    time.sleep(60)
print("there", flush=True)
time.sleep(60)
"""


@pytest.mark.root
def test_those_to_outside_the_cluster_are_found_and_no_others(start: Start, netns: Path) -> None:
    ip = ["ip", "-netns", netns.name]
    addresses = ("10.99.0.7", "10.88.0.10", "203.0.113.5", "203.0.113.6", "10.99.0.254")
    subprocess.run([*ip, "link", "set", "lo", "up"], check=True)
    for address in addresses:
        subprocess.run([*ip, "addr", "add", f"{address}/32", "dev", "lo"], check=True)
    stands = start(PYTHON, "-Sc", PROGRAM)
    until(lambda: said(stands))
    found = {(each.peer, each.port): each for each in outside(stands, INSIDE, "10.99.0.254")}
    # Both ends of each are here: those of the servers have other ports.
    asked = {key: each for key, each in found.items() if key[1] in (443, 50123, 9000)}
    assert asked.keys() == {("203.0.113.5", 443), ("203.0.113.6", 50123), ("10.99.0.254", 9000)}
    assert not {"127.0.0.1", "10.99.0.7", "10.88.0.10"} & {peer for peer, _ in found}
    one = asked["203.0.113.5", 443]
    assert (one.pid, one.process) == (1001, "python3.11"[: len(one.process)])
    assert one.libraries == ("Python's ssl",)
    assert not outside(stands, ("0.0.0.0/0",), "10.99.9.254")
