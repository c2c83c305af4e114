# SPDX-License-Identifier: Apache-2.0
"""Takes physical memory by descriptor, SIZE each, on the abstract socket SOCKET, maps it and reads
it; gives it back when asked. What the resident helper does, with nothing around it."""

from __future__ import annotations

import os
import socket
import sys

from ..cuda import Driver
from . import say
from .vmm import FDS


def main() -> None:
    size, name = int(sys.argv[1]), sys.argv[2]
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind("\0" + name)
    listener.listen(1)
    driver = Driver()
    say("ready")
    line, _ = listener.accept()
    _, descriptors, _, _ = socket.recv_fds(line, 16, FDS)
    base = driver.reserve(size * len(descriptors))
    words = []
    for index, descriptor in enumerate(descriptors):
        driver.map(base + index * size, size, driver.imported(descriptor))
        words.append(driver.word(base + index * size))
    line.send(b"mine")
    say({"words": words})
    assert line.recv(16) == b"back"
    socket.send_fds(line, [b"yours"], descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    line.recv(16)  # until the other has ended


if __name__ == "__main__":
    main()
