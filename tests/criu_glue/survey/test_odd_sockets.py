# SPDX-License-Identifier: Apache-2.0
"""The survey names sockets that CRIU cannot dump (CRIU itself: test_known_causes.py)."""

from __future__ import annotations

import contextlib
import os
import socket

from descriptors import no_descriptor_left

from liveshift.criu_glue.survey import odd_sockets

MPTCP, AF_XDP = 262, 44  # linux/in.h, linux/socket.h
PLAIN = [
    (socket.AF_INET, socket.SOCK_STREAM),
    (socket.AF_INET6, socket.SOCK_DGRAM),
    (socket.AF_UNIX, socket.SOCK_SEQPACKET),
    (socket.AF_NETLINK, socket.SOCK_RAW),
]


def test_plain_ones_are_no_problem_and_others_are_named_and_nothing_stays_open() -> None:
    with contextlib.ExitStack() as stack:
        for family, kind in PLAIN:
            stack.enter_context(socket.socket(family, kind))
        assert odd_sockets.of_task(os.getpid(), "we") == []
        stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM, MPTCP))
        words = {"we has an MPTCP socket, which CRIU cannot dump"}
        with contextlib.suppress(OSError):  # the kernel may lack this family; it has no name
            bare = socket.socket(AF_XDP, socket.SOCK_RAW, 0).detach()
            stack.callback(os.close, bare)
            words.add("we has a socket of family 44, type 3, protocol 0, which CRIU cannot dump")
        with no_descriptor_left():
            found = odd_sockets.of_task(os.getpid(), "we")
        assert {text for text, _ in found} == words
        assert all(remedy for _, remedy in found)
