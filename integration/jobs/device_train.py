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

import numpy as np
from cuda_calls import Buffer, cuda, name, stream, uuid
from numpy_net import Array, descend, input_of, loss_and_gradients, normal
from steplog import StepLog, arguments, leave, rank_and_world

WIDTH = 1024
"""A layer's matrix is then 4 MiB: whole pages of device memory, which the arena takes."""

LAYER_MIB = 12
"""A matrix and its two moments; the biases are too small for the arena."""

HELD = 2 * 1024 * 1024 - 65536
"""Floats of the block that a thread watches: 7.75 MiB, which is no whole number of pages."""

BALLAST_MIB = 16
"""Of a block that is written once and read at the end."""

MANAGED_GLOBAL = 1


class State:
    """A parameter and its moments on the device. Between steps their host arrays are zero."""

    def __init__(self, start: Array) -> None:
        self.shape = start.shape
        self.weight, self.mean, self.square = (Buffer(start.size) for _ in range(3))
        self.weight.host[:] = start.ravel()

    def used(self, weights: ctypes.c_void_p) -> Array:
        """What a step computes with."""
        self.weight.down(weights)
        cuda.cudaStreamSynchronize(weights)
        found = self.weight.host.reshape(self.shape).copy()
        self.wipe()
        return found

    def descend(
        self, gradient: Array, step: int, weights: ctypes.c_void_p, moments: ctypes.c_void_p
    ) -> None:
        self.down(weights, moments)
        descend(self.weight.host, self.mean.host, self.square.host, gradient, step)
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
            buffer.host.fill(0)


def watch_a_block(device: int, over: threading.Event) -> None:
    """Copy a block to another one, look at that, change it, put it back; for ever."""
    cuda.cudaSetDevice(device)
    mine = stream()
    held, copy = Buffer(HELD), Buffer(HELD)
    held.host[:] = np.arange(HELD, dtype=np.float32)
    wanted = held.host.copy()
    while not over.wait(0.05):
        held.up(mine)
        copy.copy_from(held, mine)
        held.host.fill(0)
        copy.down(mine)
        cuda.cudaStreamSynchronize(mine)
        if not np.array_equal(copy.host, wanted):
            print("device_train: the block that is watched has changed", file=sys.stderr)
            os._exit(9)
        wanted += 1
        wanted[wanted == HELD] = 0
        held.host[:] = wanted
        copy.host.fill(0)


class Ballast:
    """Blocks with something of its own in each, and no copy of them on the host."""

    def __init__(self, blocks: int, mine: ctypes.c_void_p) -> None:
        self._host = np.arange(BALLAST_MIB << 18, dtype=np.float32)
        self._mine = mine
        self._blocks = [Buffer(self._host.size, self._host) for _ in range(blocks)]
        for block in self._blocks:
            block.up(mine)
            cuda.cudaStreamSynchronize(mine)
            self._host += 1
        self._host = np.zeros(0, np.float32)
        for block in self._blocks:
            block.host = self._host

    def read(self) -> Iterator[Array]:
        """What is in them now, one after the other."""
        host = np.zeros(BALLAST_MIB << 18, np.float32)
        for block in self._blocks:
            block.host = host
            block.down(self._mine)
            cuda.cudaStreamSynchronize(self._mine)
            yield host


def sums_over(rank: int, world: int, mine: ctypes.c_void_p) -> Callable[[Array], None]:
    """What adds up an array over all ranks, in device memory by NCCL; on one rank, nothing."""
    if world == 1:
        return lambda _: None
    from nccl_calls import FLOAT32, SUM, agreed_id, nccl

    comm = ctypes.c_void_p()
    nccl.ncclCommInitRank(ctypes.byref(comm), world, agreed_id(rank, world), rank)
    buffers: dict[int, Buffer] = {}

    def add_up(array: Array) -> None:
        size = array.size
        if size not in buffers:
            buffers[size] = Buffer(size)
        buffer = buffers[size]
        buffer.host[:] = array.ravel()
        buffer.up(mine)
        nccl.ncclAllReduce(buffer.device, buffer.device, buffer.count, FLOAT32, SUM, comm, mine)
        buffer.down(mine)
        cuda.cudaStreamSynchronize(mine)
        array[...] = buffer.host.reshape(array.shape)
        buffer.host.fill(0)

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
    parser.add_argument("--fail", help="rank N ends with code 1 when the file FAILN is there, once")
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

    rank, world = rank_and_world()
    device = int(os.environ.get("LOCAL_RANK", "0"))
    cuda.cudaSetDevice(device)
    print(f"rank {rank} of {world} on {name(device)}, {uuid(device)}", flush=True)
    weights, moments = stream(), stream()
    add_up = sums_over(rank, world, weights)
    layers = [
        (State(normal(seed, WIDTH, WIDTH) / np.float32(32)), State(np.zeros(WIDTH, np.float32)))
        for seed in range(max(1, args.size // LAYER_MIB))
    ]
    states = [state for layer in layers for state in layer]
    for state in states:
        state.up(weights, moments)
    ballast = Ballast(args.ballast // BALLAST_MIB, moments)
    hinder(args)
    over = threading.Event()
    watching = threading.Thread(target=watch_a_block, args=(device, over), daemon=True)
    watching.start()

    def memory() -> Iterator[Array]:
        for state in states:
            state.down(weights, moments)
        own = [b.host for state in states for b in (state.weight, state.mean, state.square)]
        return chain(own, ballast.read())

    log = StepLog(args.out, rank)
    for step in range(1, args.steps + 1):
        used = [(matrix.used(weights), bias.used(weights)) for matrix, bias in layers]
        loss, gradients = loss_and_gradients(input_of(rank, step, 8, WIDTH), used)
        enough = args.enough is not None and args.enough.exists()
        told = np.array([loss, float(enough)], np.float32)
        add_up(told)
        for state, gradient in zip(states, gradients, strict=True):
            add_up(gradient)
            state.descend(gradient.ravel() / np.float32(world), step, weights, moments)
        log.step(step, told[0], 0.0 if told[1] else args.pace, gpu=uuid(device))
        if args.fail is not None and (told_to := Path(f"{args.fail}{rank}")).exists():
            told_to.unlink()  # a rewind does not bring it back
            os._exit(1)
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
