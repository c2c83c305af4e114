# SPDX-License-Identifier: Apache-2.0
"""A process with device memory and one thing beside it that cannot move: KIND OUT.

``nothing`` can; ``managed`` memory, memory shared by ``ipc``, a captured ``graph`` with NCCL in it,
a ``forked`` child that has the driver's files open. OUT gets a line for each second that it lives.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path

from gpu_suite.cuda import SIZE, Library

MIB = 1 << 20
MANAGED_GLOBAL = 1  # cudaMemAttachGlobal
RELAXED = 2  # cudaStreamCaptureModeRelaxed
FLOAT32, SUM = 7, 0


class UniqueId(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * 128),)


cuda = Library("libcudart.so.13")


def allocated(size: int) -> ctypes.c_void_p:
    pointer = ctypes.c_void_p()
    cuda.cudaMalloc(ctypes.byref(pointer), SIZE(size))
    return pointer


def managed() -> None:
    pointer = ctypes.c_void_p()
    cuda.cudaMallocManaged(ctypes.byref(pointer), SIZE(4 * MIB), ctypes.c_uint(MANAGED_GLOBAL))


def ipc() -> None:
    handle = ctypes.create_string_buffer(64)
    cuda.cudaIpcGetMemHandle(handle, allocated(MIB))


def graph() -> None:
    nccl = Library("libnccl.so.2")
    chosen, comm, stream = UniqueId(), ctypes.c_void_p(), ctypes.c_void_p()
    nccl.ncclGetUniqueId(ctypes.byref(chosen))
    nccl.ncclCommInitRank(ctypes.byref(comm), 1, chosen, 0)
    cuda.cudaStreamCreate(ctypes.byref(stream))
    buffer, other = allocated(MIB), allocated(MIB)
    captured, executable = ctypes.c_void_p(), ctypes.c_void_p()
    cuda.cudaStreamBeginCapture(stream, RELAXED)
    nccl.ncclAllReduce(buffer, other, SIZE(1024), FLOAT32, SUM, comm, stream)
    cuda.cudaStreamEndCapture(stream, ctypes.byref(captured))
    cuda.cudaGraphInstantiate(ctypes.byref(executable), captured, ctypes.c_ulonglong(0))
    cuda.cudaGraphLaunch(executable, stream)
    cuda.cudaStreamSynchronize(stream)


def forked() -> None:
    if os.fork() == 0:
        while os.getppid() != 1:
            time.sleep(0.5)
        os._exit(0)


def main() -> None:
    kind, out = sys.argv[1], Path(sys.argv[2])
    cuda.cudaSetDevice(0)
    allocated(4 * MIB)
    what = {"managed": managed, "ipc": ipc, "graph": graph, "forked": forked}.get(kind)
    if what is not None:
        what()
    with out.open("w", buffering=1) as lines:
        while True:
            print(time.time(), file=lines)
            time.sleep(0.2)


if __name__ == "__main__":
    main()
