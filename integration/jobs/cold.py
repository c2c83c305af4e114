# SPDX-License-Identifier: Apache-2.0
"""A small DDP job with memory that it hardly ever writes, until a file says that it is enough.

Every step reads a slice of that memory and rewrites a page of it; the digest of all of it is in the
last line of its record. ``--sharers`` forks processes that have it copy on write, each rewrites
some of its own, and tells at the end that the rest is what it was.
"""

import hashlib
import os
import signal
import sys
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
from steplog import StepLog, arguments, digest, leave, place
from torch import nn
from torch.nn.parallel import DistributedDataParallel

PAGE = 4096
SLICE = 1 << 16
WORDS = PAGE // 8


def sharer(cold: numpy.ndarray, number: int) -> None:
    """Have the memory too, write every hundredth page, wait for the parent's word, look again."""
    cold = cold.reshape(-1, WORDS)
    cold[number::100] = number
    before = hashlib.sha256(cold.data).digest()
    signal.sigwait({signal.SIGUSR1})
    os._exit(0 if hashlib.sha256(cold.data).digest() == before else 1)


def main() -> None:
    parser = arguments()
    parser.add_argument("--cold", type=int, required=True, help="bytes")
    parser.add_argument("--sharers", type=int, default=0)
    parser.add_argument("--enough", type=Path, help="stop when this file is there")
    args = parser.parse_args()
    rank, _ = place()
    noise = numpy.random.Generator(numpy.random.SFC64(rank))
    cold = noise.integers(0, 1 << 63, args.cold // 8, numpy.int64)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    children = []
    for number in range(args.sharers):
        if (pid := os.fork()) == 0:
            sharer(cold, number)
        children.append(pid)
    dist.init_process_group("gloo")
    net = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    log = StepLog(args.out, rank)
    for step in range(1, args.steps + 1):
        at = step * 7919 * WORDS % (len(cold) - SLICE)
        read = float(cold[at : at + SLICE].sum() % 1000)
        cold[at : at + WORDS] += step
        x = torch.randn(8, 32)
        loss = (model(x) - x.flip(1) * read / 1000).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        stop = torch.tensor([float(bool(args.enough and args.enough.exists()))])
        dist.broadcast(stop, 0)
        log.step(step, loss, args.pace, sha256=digest(net.parameters()))
        if stop.item():
            break
    for pid in children:
        os.kill(pid, signal.SIGUSR1)
        if os.waitpid(pid, 0)[1] != 0:
            sys.exit(f"process {pid}: the memory it shared is not what it was")
    log.end(net.parameters(), steps=step, cold=hashlib.sha256(cold).hexdigest())
    leave()


if __name__ == "__main__":
    main()
