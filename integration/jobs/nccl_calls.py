# SPDX-License-Identifier: Apache-2.0
"""NCCL by ctypes, and how the ranks of a job agree on a communicator."""

from __future__ import annotations

import ctypes
import os
import socket
import time

from cuda_calls import Library

FLOAT32, SUM = 7, 0  # ncclDataType_t, ncclRedOp_t
PORT = 29555

nccl = Library("libnccl.so.2")


class UniqueId(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * 128),)


def agreed_id(rank: int, world: int) -> UniqueId:
    """Rank 0's unique id, over one connection to each of the others."""
    made = UniqueId()
    if rank == 0:
        nccl.ncclGetUniqueId(ctypes.byref(made))
        with socket.create_server(("", PORT)) as server:
            for _ in range(world - 1):
                with server.accept()[0] as line:
                    line.sendall(bytes(made))
        return made
    address = os.environ.get("MASTER_ADDR", "127.0.0.1")  # none in a job of one capsule
    until = time.monotonic() + 60
    while True:
        try:
            with socket.create_connection((address, PORT)) as line:
                raw = b""
                while len(raw) < 128:
                    raw += line.recv(128 - len(raw))
            return UniqueId.from_buffer_copy(raw)
        except OSError:
            assert time.monotonic() < until, "rank 0 does not answer"
            time.sleep(0.1)
