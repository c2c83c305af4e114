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

import torch
from cuda_calls import Buffer, cuda, name
from nccl_calls import FLOAT32, SUM, agreed_id, nccl
from steplog import StepLog, arguments, leave, place
from torch import nn


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

    rank, world = place()
    torch.manual_seed(1)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

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

    weights = list(model.parameters())
    gradients = [Buffer(p.numel()) for p in weights]
    passed, received, sums = Buffer(16), Buffer(16), Buffer(1)
    log = StepLog(args.out, rank)
    for step in range(1, args.steps + 1):
        chance = torch.Generator().manual_seed((rank << 20) + step)
        x = torch.randn(16, 64, generator=chance)
        loss = (model(x) - x.roll(1, 1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for buffer, p in zip(gradients, weights, strict=True):
            assert p.grad is not None
            buffer.host.copy_(p.grad.flatten())
            buffer.up(stream)
            nccl.ncclAllReduce(
                buffer.device, buffer.device, buffer.count, FLOAT32, SUM, comm, stream
            )
            buffer.down(stream)
        passed.host.fill_(loss.item())
        passed.up(stream)
        nccl.ncclGroupStart()
        nccl.ncclSend(passed.device, passed.count, FLOAT32, (rank + 1) % world, comm, stream)
        nccl.ncclRecv(received.device, received.count, FLOAT32, (rank - 1) % world, comm, stream)
        nccl.ncclGroupEnd()
        received.down(stream)
        sums.host.fill_(loss.item())
        sums.up(stream)
        nccl.ncclAllReduce(sums.device, sums.device, sums.count, FLOAT32, SUM, shared, stream)
        sums.down(stream)
        cuda.cudaStreamSynchronize(stream)
        for buffer, p in zip(gradients, weights, strict=True):
            assert p.grad is not None
            p.grad.copy_((buffer.host / world).view_as(p.grad))
        optimizer.step()
        log.step(step, sums.host[0] + received.host.sum() / 1024, args.pace)
    over.set()
    log.end(weights, steps=args.steps)
    leave()


if __name__ == "__main__":
    main()
