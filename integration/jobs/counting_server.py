# SPDX-License-Identifier: Apache-2.0
"""Serves one TCP connection on a host's own address: answers every numbered block with its digest.

    counting_server.py ADDRESS PORT REPORT

A block is a number (u64), a length (u32) and that many bytes; the answer is the number and the
SHA-256 of the bytes. A number out of order, or a connection that breaks, goes into REPORT.
"""

import hashlib
import json
import socket
import struct
import sys
from pathlib import Path

HEAD = struct.Struct("!QI")

address, port, report = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])


def exactly(peer: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = peer.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return data


server = socket.create_server((address, port))
print("listening", flush=True)
peer, who = server.accept()
blocks, problem = 0, "none"
try:
    while True:
        number, length = HEAD.unpack(exactly(peer, HEAD.size))
        if number != blocks:
            problem = f"block {number} came when {blocks} was due"
            break
        blocks += 1
        peer.sendall(HEAD.pack(number, 32) + hashlib.sha256(exactly(peer, length)).digest())
except EOFError:
    pass
except OSError as error:
    problem = str(error)
report.write_text(json.dumps({"blocks": blocks, "problem": problem, "peer": who[0]}))
