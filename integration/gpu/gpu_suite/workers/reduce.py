# SPDX-License-Identifier: Apache-2.0
"""A rank that all-reduces at a word, by the CUDA runtime and NCCL; MOST bytes of buffer.

["id"] → a unique id; ["join", name, id, rank, ranks] → true; ["reduce", name, bytes, times] →
seconds for all of them, from enqueuing the first until the stream has done the last.
"""

from __future__ import annotations

import ctypes
import sys
import time

from ..cuda import SIZE, Library
from . import heard, say

FLOAT32, SUM = 7, 0


class UniqueId(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * 128),)


def main() -> None:
    most = int(sys.argv[1])
    cuda, nccl = Library("libcudart.so.13"), Library("libnccl.so.2")
    cuda.cudaSetDevice(0)
    buffer, stream = ctypes.c_void_p(), ctypes.c_void_p()
    cuda.cudaMalloc(ctypes.byref(buffer), SIZE(most))
    cuda.cudaMemset(buffer, 0, SIZE(most))
    cuda.cudaStreamCreate(ctypes.byref(stream))
    comms: dict[str, ctypes.c_void_p] = {}
    say("ready")
    for word, *rest in heard():
        if word == "id":
            chosen = UniqueId()
            nccl.ncclGetUniqueId(ctypes.byref(chosen))
            say(bytes(chosen).hex())
        elif word == "join":
            name, hexed, rank, ranks = rest
            comms[name] = ctypes.c_void_p()
            chosen = UniqueId.from_buffer_copy(bytes.fromhex(hexed))
            nccl.ncclCommInitRank(ctypes.byref(comms[name]), ranks, chosen, rank)
            say(True)
        else:
            name, size, times = rest
            began = time.perf_counter()
            for _ in range(times):
                nccl.ncclAllReduce(
                    buffer, buffer, SIZE(size // 4), FLOAT32, SUM, comms[name], stream
                )
            cuda.cudaStreamSynchronize(stream)
            say(time.perf_counter() - began)


if __name__ == "__main__":
    main()
