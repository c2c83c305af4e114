# SPDX-License-Identifier: Apache-2.0
"""Frames from before a rewind that a link has held back for a while come when the job runs again.
They reach none of its sockets, though addresses, ports and sequence numbers fit."""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import Thread

import pytest
from frames import counted
from lab_session import LONG, LabSession, NewLab, eventually
from protected_job import kill_rank, wait_protected, wait_rewound
from reference_runs import References
from three_hosts import inside

from liveshift.criu_glue.network.overlay import STRIDE, VXLAN_PORT

pytestmark = [pytest.mark.lab, pytest.mark.timeout(240)]

ETH_P_ALL = 3
DATA = 200
"""A frame with so many bytes has more in it than an acknowledgement."""
HELD_S = 2.0
RULES = """
table netdev held {{
  chain arriving {{
    type filter hook ingress device eth0 priority 0;
    udp dport {port} @th,96,24 {vni} drop
  }}
}}
"""


@pytest.fixture(scope="module")
def lab(new_lab: NewLab) -> LabSession:
    return new_lab("--hosts", "3", "--snapshots", "every=2")


class HeldBack:
    """The VXLAN frames with the id ``vni`` that come to a host of the lab, while its link holds
    them back. ``payloads``: each with its VXLAN header."""

    def __init__(self, lab: LabSession, host: str, vni: int) -> None:
        machine = lab.lab.machine(host)
        self.payloads: list[bytes] = []
        self._vni, self._netns, self._address = vni, machine.netns, machine.address
        with inside(self._netns):
            self._tap = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(ETH_P_ALL))
        self._tap.bind(("eth0", ETH_P_ALL))
        self._tap.settimeout(0.1)
        self._over = False
        self._thread = Thread(target=self._take)
        self._thread.start()

    def _take(self) -> None:
        """A tap for all protocols gets a frame before the rule drops it."""
        while not self._over:
            try:
                packet, (*_, kind, _, _) = self._tap.recvfrom(65536)
            except TimeoutError:
                continue
            datagram = packet[(packet[0] & 15) * 4 :]
            if kind == socket.PACKET_OUTGOING or packet[9] != socket.IPPROTO_UDP:
                continue
            port, id_ = struct.unpack("!2xH", datagram[:4])[0], datagram[12:15]
            if port == VXLAN_PORT and int.from_bytes(id_) == self._vni:
                self.payloads.append(datagram[8:])

    def deliver(self, lab: LabSession, sender: str) -> None:
        """Let all of them go on to the host, in their order."""
        self.close()
        nft(self._netns, "delete", "table", "netdev", "held")
        with inside(lab.lab.machine(sender).netns):
            line = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        with line:
            for payload in self.payloads:
                line.sendto(payload, (self._address, VXLAN_PORT))
                time.sleep(0.001)  # so that no queue on the way overflows

    def close(self) -> None:
        self._over = True
        self._thread.join()
        self._tap.close()


class LabHosts:
    """The hosts of a lab as frames.counted wants them."""

    def __init__(self, lab: LabSession) -> None:
        self._lab = lab

    def on(self, host: str) -> AbstractContextManager[None]:
        return inside(self._lab.lab.machine(host).netns)


def nft(netns: str, *words: str, rules: str = "") -> None:
    command = ["ip", "netns", "exec", netns, "nft", *words]
    subprocess.run(command, input=rules, check=True, capture_output=True, text=True)


def wire_id(lab: LabSession, host: str) -> int:
    """The VXLAN id of the only job."""
    shown = ["ip", "-netns", lab.lab.machine(host).netns, "-json", "-details", "link"]
    links = json.loads(subprocess.run(shown, check=True, capture_output=True).stdout)
    (vxlan,) = [link for link in links if link["ifname"].startswith("lsx")]
    return int(vxlan["linkinfo"]["info_data"]["id"])


@contextmanager
def held_back(lab: LabSession, host: str) -> Iterator[HeldBack]:
    vni = wire_id(lab, host)
    frames = HeldBack(lab, host, vni)
    try:
        nft(lab.lab.machine(host).netns, "-f", "-", rules=RULES.format(port=VXLAN_PORT, vni=vni))
        yield frames
    finally:
        frames.close()


def test_frames_that_a_link_has_held_back_reach_no_socket_of_the_time_after_a_rewind(
    lab: LabSession, references: References
) -> None:
    job = lab.start("late", LONG, nnodes=2)
    job.wait_step(10)
    wait_protected(job)
    receiver, sender = (job.seen(rank).host for rank in range(2))
    before = wire_id(lab, receiver)
    with held_back(lab, receiver) as frames:
        began = time.monotonic()
        eventually(lambda: any(len(each) > DATA for each in frames.payloads), "data on the link")
        kill_rank(job, 1)
        wait_rewound(job, 1)
        assert wire_id(lab, receiver) == before + STRIDE
        time.sleep(max(0.0, began + HELD_S - time.monotonic()))
        with counted(LabHosts(lab), receiver, f"@th,96,24 {before}") as arrived:
            frames.deliver(lab, sender)
            assert arrived() == len(frames.payloads)
    job.go_on(20)
    job.assert_begins_like_never_moved(references)
