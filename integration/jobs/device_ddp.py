# SPDX-License-Identifier: Apache-2.0
"""Data-parallel training whose gradients lie in device memory and are summed by NCCL, by ctypes.

Computed on the CPU, so that it runs alike on the simulated CUDA and NCCL of tests/doubles and on
real ones; which they are is printed. A watchdog thread asks for asynchronous errors all the while,
as PyTorch's does, and ends the process on any.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading

import numpy as np
from cuda_calls import Buffer, cuda, name
from nccl_calls import FLOAT32, SUM, agreed_id, nccl
from numpy_net import Layer, descend, input_of, loss_and_gradients, normal
from steplog import StepLog, arguments, leave, rank_and_world

WIDTH = 64


def watch(comms: list[ctypes.c_void_p], over: threading.Event) -> None:
    """What PyTorch's watchdog does, ten times as often; until a rank may rightly be gone."""
    error = ctypes.c_int()
    while not over.wait(0.01):
        for comm in comms:
            code = nccl.code("ncclCommGetAsyncError", comm, ctypes.byref(error))
            if code or error.value:
                print(f"watchdog: {code}, asynchronous error {error.value}", file=sys.stderr)
                os._exit(9)


def main() -> None:
    args = arguments().parse_args()

    rank, world = rank_and_world()
    layers: list[Layer] = [
        (normal(seed, WIDTH, WIDTH) / np.float32(8), np.zeros(WIDTH, np.float32)) for seed in (1, 2)
    ]
    weights = [each for layer in layers for each in layer]
    means, squares = ([np.zeros(each.shape, np.float32) for each in weights] for _ in range(2))

    cuda.cudaSetDevice(0)
    nccl.code("ncclGetVersion", ctypes.byref(version := ctypes.c_int()))
    print(f"on {name(0)}, NCCL {version.value}", flush=True)
    stream = ctypes.c_void_p()
    cuda.cudaStreamCreate(ctypes.byref(stream))
    comm, shared = ctypes.c_void_p(), ctypes.c_void_p()
    nccl.ncclCommInitRank(ctypes.byref(comm), world, agreed_id(rank, world), rank)
    nccl.ncclCommSplit(comm, 0, rank, ctypes.byref(shared), None)
    over = threading.Event()
    threading.Thread(target=watch, args=([comm, shared], over), daemon=True).start()

    buffers = [Buffer(each.size) for each in weights]
    passed, received, sums = Buffer(16), Buffer(16), Buffer(1)
    log = StepLog(args.out, rank)
    for step in range(1, args.steps + 1):
        loss, gradients = loss_and_gradients(input_of(rank, step, 16, WIDTH), layers)
        for buffer, gradient in zip(buffers, gradients, strict=True):
            buffer.host[:] = gradient.ravel()
            buffer.up(stream)
            nccl.ncclAllReduce(
                buffer.device, buffer.device, buffer.count, FLOAT32, SUM, comm, stream
            )
            buffer.down(stream)
        passed.host.fill(loss)
        passed.up(stream)
        nccl.ncclGroupStart()
        nccl.ncclSend(passed.device, passed.count, FLOAT32, (rank + 1) % world, comm, stream)
        nccl.ncclRecv(received.device, received.count, FLOAT32, (rank - 1) % world, comm, stream)
        nccl.ncclGroupEnd()
        received.down(stream)
        sums.host.fill(loss)
        sums.up(stream)
        nccl.ncclAllReduce(sums.device, sums.device, sums.count, FLOAT32, SUM, shared, stream)
        sums.down(stream)
        cuda.cudaStreamSynchronize(stream)
        for buffer, weight, mean, square in zip(buffers, weights, means, squares, strict=True):
            averaged = buffer.host.reshape(weight.shape) / np.float32(world)
            descend(weight, mean, square, averaged, step)
        log.step(step, sums.host[0] + received.host.sum() / 1024, args.pace)
    over.set()
    log.end(weights, steps=args.steps)
    leave()


if __name__ == "__main__":
    main()
