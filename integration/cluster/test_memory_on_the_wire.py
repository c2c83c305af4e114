# SPDX-License-Identifier: Apache-2.0
"""A program listens at the destination's link while a capsule moves. It can read the capsule's
memory only if the cluster file switches encryption off."""

from __future__ import annotations

import hashlib
import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread

import pytest
from chain_job import assert_whole_chain
from lab_session import CHAIN, LabSession, NewLab
from phases import phase
from three_hosts import inside

pytestmark = [pytest.mark.lab, pytest.mark.timeout(120)]

ETH_P_IP = 0x0800
SO_RCVBUFFORCE = 33
"""As in asm-generic/socket.h; Python has no name for it."""
SIZE = 32 << 20
"""The job holds this many random bytes."""
SEED = 5
BUFFER = 256 << 20
"""The kernel keeps so many bytes of frames until the test reads them, so it drops none."""

KEEPER = f"""
import hashlib, pathlib, random, runpy, sys
secret = random.Random({SEED}).randbytes({SIZE})
kept, *sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
pathlib.Path(kept).write_text(hashlib.sha256(secret).hexdigest())
"""
"""This program holds the secret while it runs another program. At the end it writes the secret's
hash."""


@contextmanager
def listening(lab: LabSession, host: str) -> Iterator[bytearray]:
    """Collect all packets that come to the host, one after the other."""
    heard, over = bytearray(), False
    with inside(lab.lab.machine(host).netns):
        tap = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(ETH_P_IP))

    def listen() -> None:
        while not over:
            try:
                packet, (*_, kind, _, _) = tap.recvfrom(1 << 17)
            except TimeoutError:
                continue
            if kind != socket.PACKET_OUTGOING:
                heard.extend(packet)

    thread = Thread(target=listen)
    with tap:
        tap.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER)
        tap.bind(("eth0", ETH_P_IP))
        tap.settimeout(0.1)
        thread.start()
        try:
            yield heard
        finally:
            over = True
            thread.join()


@pytest.mark.parametrize("seal", ["on", "off"])
def test_memory_is_to_be_read_on_the_wire_only_where_it_goes_in_clear(
    new_lab: NewLab, seal: str
) -> None:
    trust = ",trusted=true" if seal == "off" else ""
    lab = new_lab("--hosts", "2", "--wire", f"seal={seal},compress=never{trust}")
    program, *rest = CHAIN[1:]
    job = lab.start("secret", (CHAIN[0], "-c", KEEPER, "{out}/kept", program, *rest))
    job.wait_step(5)
    seen = job.seen(0)
    destination = next(host for host in lab.lab.hosts if host != seen.host)
    with listening(lab, destination) as heard:
        row = job.migrate(0)
    job.assert_moved(seen, row)
    assert (phase(row, "restore").bytes or 0) > SIZE
    assert len(heard) > SIZE, "it was heard on its way"

    secret = random.Random(SEED).randbytes(SIZE)
    marks = [secret[at : at + 64] for at in range(0, SIZE, SIZE // 64)]
    found = sum(mark in heard for mark in marks)
    if seal == "on":
        assert found == 0
    else:
        assert found > len(marks) / 2, "some of them lie across two packets"

    job.stop()
    assert job.wait_end() == 0
    assert_whole_chain(job)
    assert (job.out / "kept").read_text() == hashlib.sha256(secret).hexdigest()
