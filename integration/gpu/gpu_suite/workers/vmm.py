# SPDX-License-Identifier: Apache-2.0
"""Physical memory mapped by hand: SIZE COUNT VARIANT [SOCKET]; "remap" → whether all is as before.

``mapped`` keeps all blocks, ``half`` and ``all`` unmap and release every other one or each, the
reserved addresses stay; ``handed`` gives each block's descriptor to workers.keeper first, and maps
what comes back from it.
"""

from __future__ import annotations

import os
import socket
import sys

from ..cuda import CudaFailed, Driver
from . import heard, say

MARK = 7
FDS = 200
"""SCM_RIGHTS takes 253 descriptors at most (unix(7))."""


def main() -> None:
    size, count, variant = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    driver = Driver()
    base = driver.reserve(size * count)
    places = [base + index * size for index in range(count)]
    handles = [driver.physical(size, variant == "handed") for _ in places]
    for index, (at, handle) in enumerate(zip(places, handles, strict=True)):
        driver.map(at, size, handle)
        driver.fill(at, size, MARK + index)
    driver.wait()
    line = None
    if variant == "handed":
        line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        line.connect("\0" + sys.argv[4])
        descriptors = [driver.export(handle) for handle in handles]
        socket.send_fds(line, [b"these"], descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        assert line.recv(16) == b"mine"
    gone = [
        i for i in range(count) if variant in ("all", "handed") or (variant == "half" and i % 2)
    ]
    for index in gone:
        driver.unmap(places[index], size, handles[index])
    driver.wait()
    say({"unmapped": len(gone)})
    for _ in heard():
        found: dict[str, object] = {}
        if line is not None:
            line.send(b"back")
            _, descriptors, _, _ = socket.recv_fds(line, 16, FDS)
            for index, descriptor in zip(gone, descriptors, strict=True):
                handles[index] = driver.imported(descriptor)
                driver.map(places[index], size, handles[index])
                os.close(descriptor)
            try:
                os.close(driver.export(handles[0]))
                found["an imported block can be exported again"] = True
            except CudaFailed as failed:
                found["an imported block can be exported again"] = str(failed)
        else:
            for index in gone:
                handles[index] = driver.physical(size)
                driver.map(places[index], size, handles[index])
                driver.fill(places[index], size, MARK + index)
        words = [driver.word(at + size - 4) for at in places]
        found["values_right"] = words == [MARK + index for index in range(count)]
        say(found)


if __name__ == "__main__":
    main()
