# SPDX-License-Identifier: Apache-2.0
"""Training whose parameters and optimizer state live in device memory, and nowhere else.

Each step fetches what it needs, computes on the CPU, puts the outcome back and wipes the host's
copy, before it calls a collective and before it rests: a byte that a move loses or changes shows in
the losses from then on. The same script runs on
the simulated CUDA and NCCL of tests/doubles and on real ones; which they are is printed. Besides, a
thread with a stream of its own copies a block about and looks whether it is still right.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import torch
from cuda_calls import Buffer, cuda, name, stream, uuid
from steplog import StepLog, arguments, leave, place
from torch import Tensor

WIDTH = 1024
"""A layer's matrix is then 4 MiB: whole pages of device memory, which the arena takes."""

LAYER_MIB = 12
"""A matrix and its two moments; the biases are too small for the arena."""

HELD = 2 * 1024 * 1024 - 65536
"""Floats of the block that a thread watches: 7.75 MiB, which is no whole number of pages."""

BALLAST_MIB = 16
"""Of a block that is written once and read at the end."""

BETAS, RATE, DECAY, EPS = (0.9, 0.999), 1e-3, 0.01, 1e-8
MANAGED_GLOBAL = 1


class State:
    """A parameter and its moments on the device. Between steps their host tensors are zero."""

    def __init__(self, start: Tensor) -> None:
        self.shape = start.shape
        self.weight, self.mean, self.square = (Buffer(start.numel()) for _ in range(3))
        self.weight.host.copy_(start.flatten())

    def used(self, weights: ctypes.c_void_p) -> Tensor:
        """What a step computes with."""
        self.weight.down(weights)
        cuda.cudaStreamSynchronize(weights)
        found = self.weight.host.view(self.shape).clone().requires_grad_()
        self.wipe()
        return found

    def descend(
        self, gradient: Tensor, step: int, weights: ctypes.c_void_p, moments: ctypes.c_void_p
    ) -> None:
        """AdamW."""
        self.down(weights, moments)
        weight, mean, square = self.weight.host, self.mean.host, self.square.host
        mean.mul_(BETAS[0]).add_(gradient, alpha=1 - BETAS[0])
        square.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
        scale = (square / (1 - BETAS[1] ** step)).sqrt_().add_(EPS)
        weight.mul_(1 - RATE * DECAY)
        weight.addcdiv_(mean, scale, value=-RATE / (1 - BETAS[0] ** step))
        self.up(weights, moments)

    def down(self, weights: ctypes.c_void_p, moments: ctypes.c_void_p) -> None:
        self.weight.down(weights)
        self.mean.down(moments)
        self.square.down(moments)
        cuda.cudaStreamSynchronize(weights)
        cuda.cudaStreamSynchronize(moments)

    def up(self, weights: ctypes.c_void_p, moments: ctypes.c_void_p) -> None:
        """Put it onto the device and forget it here."""
        self.weight.up(weights)
        self.mean.up(moments)
        self.square.up(moments)
        cuda.cudaStreamSynchronize(weights)
        cuda.cudaStreamSynchronize(moments)
        self.wipe()

    def wipe(self) -> None:
        for buffer in (self.weight, self.mean, self.square):
            buffer.host.zero_()


def watch_a_block(device: int, over: threading.Event) -> None:
    """Copy a block to another one, look at that, change it, put it back; for ever."""
    cuda.cudaSetDevice(device)
    mine = stream()
    held, copy = Buffer(HELD), Buffer(HELD)
    held.host.copy_(torch.arange(HELD, dtype=torch.float32))
    wanted = held.host.clone()
    while not over.wait(0.05):
        held.up(mine)
        copy.copy_from(held, mine)
        held.host.zero_()
        copy.down(mine)
        cuda.cudaStreamSynchronize(mine)
        if not torch.equal(copy.host, wanted):
            print("device_train: the block that is watched has changed", file=sys.stderr)
            os._exit(9)
        wanted.add_(1).remainder_(HELD)
        held.host.copy_(wanted)
        copy.host.zero_()


class Ballast:
    """Blocks with something of its own in each, and no copy of them on the host."""

    def __init__(self, blocks: int, mine: ctypes.c_void_p) -> None:
        self._host = torch.arange(BALLAST_MIB << 18, dtype=torch.float32)
        self._mine = mine
        self._blocks = [Buffer(self._host.numel(), self._host) for _ in range(blocks)]
        for block in self._blocks:
            block.up(mine)
            cuda.cudaStreamSynchronize(mine)
            self._host.add_(1)
        self._host = torch.zeros(0)
        for block in self._blocks:
            block.host = self._host

    def read(self) -> Iterator[Tensor]:
        """What is in them now, one after the other."""
        host = torch.zeros(BALLAST_MIB << 18)
        for block in self._blocks:
            block.host = host
            block.down(self._mine)
            cuda.cudaStreamSynchronize(self._mine)
            yield host


def sums_over(rank: int, world: int, mine: ctypes.c_void_p) -> Callable[[Tensor], None]:
    """What adds up a tensor over all ranks, in device memory by NCCL; on one rank, nothing."""
    if world == 1:
        return lambda _: None
    from nccl_calls import FLOAT32, SUM, agreed_id, nccl

    comm = ctypes.c_void_p()
    nccl.ncclCommInitRank(ctypes.byref(comm), world, agreed_id(rank, world), rank)
    buffers: dict[int, Buffer] = {}

    def add_up(tensor: Tensor) -> None:
        size = tensor.numel()
        if size not in buffers:
            buffers[size] = Buffer(size)
        buffer = buffers[size]
        buffer.host.copy_(tensor)
        buffer.up(mine)
        nccl.ncclAllReduce(buffer.device, buffer.device, buffer.count, FLOAT32, SUM, comm, mine)
        buffer.down(mine)
        cuda.cudaStreamSynchronize(mine)
        tensor.copy_(buffer.host)
        buffer.host.zero_()

    return add_up


def hinder(args: argparse.Namespace) -> None:
    """Do what keeps a process from being moved."""
    if args.managed:
        cuda.cudaMallocManaged(
            ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(4096), MANAGED_GLOBAL
        )
    if args.ipc:
        pointer, handle = ctypes.c_void_p(), ctypes.create_string_buffer(64)
        cuda.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(4096))
        cuda.cudaIpcGetMemHandle(handle, pointer)
    parent = os.getpid()
    for _ in range(args.forked_workers):
        if os.fork() == 0:
            while os.getppid() == parent:
                time.sleep(0.05)
            os._exit(0)


def main() -> None:
    parser = arguments()
    parser.add_argument("--enough", type=Path, help="stop when this file is there")
    parser.add_argument(
        "--round", type=int, default=1, help="then go on, without rests, to a multiple of so many"
    )
    parser.add_argument(
        "--remember", action="store_true", help="what the memory holds after each such multiple"
    )
    parser.add_argument("--size", type=int, default=24, metavar="MIB", help="of the state")
    parser.add_argument("--ballast", type=int, default=0, metavar="MIB", help="besides")
    parser.add_argument("--managed", action="store_true")
    parser.add_argument("--ipc", action="store_true")
    parser.add_argument("--forked-workers", type=int, default=0, metavar="N")
    args = parser.parse_args()

    rank, world = place()
    device = int(os.environ.get("LOCAL_RANK", "0"))
    cuda.cudaSetDevice(device)
    print(f"rank {rank} of {world} on {name(device)}, {uuid(device)}", flush=True)
    weights, moments = stream(), stream()
    add_up = sums_over(rank, world, weights)
    start = torch.Generator().manual_seed(7)
    layers = [
        (State(torch.randn(WIDTH, WIDTH, generator=start) / 32), State(torch.zeros(WIDTH)))
        for _ in range(max(1, args.size // LAYER_MIB))
    ]
    states = [state for layer in layers for state in layer]
    for state in states:
        state.up(weights, moments)
    ballast = Ballast(args.ballast // BALLAST_MIB, moments)
    hinder(args)
    over = threading.Event()
    watching = threading.Thread(target=watch_a_block, args=(device, over), daemon=True)
    watching.start()

    def memory() -> Iterator[Tensor]:
        for state in states:
            state.down(weights, moments)
        own = [b.host for state in states for b in (state.weight, state.mean, state.square)]
        return chain(own, ballast.read())

    log = StepLog(args.out, rank)
    for step in range(1, args.steps + 1):
        used = [[state.used(weights) for state in layer] for layer in layers]
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed((rank << 20) + step))
        y = x
        for matrix, bias in used:
            y = torch.tanh(y @ matrix.T + bias)
        loss = (y - x.roll(1, 1)).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no types for it
        told = torch.tensor([loss.item(), float(args.enough is not None and args.enough.exists())])
        add_up(told)
        for state, tensor in zip(states, (t for layer in used for t in layer), strict=True):
            assert tensor.grad is not None
            gradient = tensor.grad.flatten()
            add_up(gradient)
            state.descend(gradient / world, step, weights, moments)
        log.step(step, told[0], 0.0 if told[1] else args.pace, gpu=uuid(device))
        if told[1] and step % args.round == 0:
            break
        if args.remember and step % args.round == 0:
            log.end(memory(), f"after{step}-")
            for state in states:
                state.wipe()
    over.set()
    watching.join()
    log.end(memory(), steps=step)
    print(f"rank {rank} ends", flush=True)
    leave()


if __name__ == "__main__":
    main()
