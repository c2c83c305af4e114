# SPDX-License-Identifier: Apache-2.0
"""A job that may lose a host: a small GPT that reads a large data set in memory.

It does nothing for that by itself. With ``--checkpoint`` rank 0 saves every ``--every`` steps, and
all ranks begin from the file if it is there. With ``--torchft`` each host is a replica group of one
process, after torchft's own train_ddp.py.

The data are read, never written, so most of a rank's memory is cold. A rank's share of a step
follows from the step and the rank alone, so that all of these compute the same bits, whoever trains
it and however often.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sized import BARE, LEAST, LETTERS, noise
from steplog import StepLog, arguments, digest, leave, place
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from train_gpt import GPT

SAMPLES, LENGTH = 2, 64


def began() -> float:
    """When this process began, in seconds since the epoch: some before torch was imported."""
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    since_boot = ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot)


class Share:
    """A model, the data set of which each rank reads its own samples, and the rank's record, to
    which each process that is this rank adds."""

    def __init__(self, args: argparse.Namespace, rank: int) -> None:
        self._log = StepLog(args.out, rank, append=True)
        self._log.note(began=began(), pid=os.getpid(), host=socket.gethostname())
        self._pace = args.pace
        size = args.others if rank and args.others else args.size
        self.data = noise(max(size - BARE, LEAST))
        self.net = GPT(LETTERS, LENGTH, width=64, depth=2)

    def rows(self, step: int, rank: int) -> tuple[Tensor, Tensor]:
        """What is read and what is to be predicted, by one rank in one step."""
        chance = torch.Generator().manual_seed(2 * step + rank)
        starts = torch.randint(len(self.data) - LENGTH, (SAMPLES,), generator=chance).tolist()
        rows = torch.stack([self.data[s : s + LENGTH + 1] for s in starts]).long()
        return rows[:, :-1], rows[:, 1:]

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-3)

    def record(self, step: int, loss: Tensor, part: int) -> None:
        """``part``: the rank whose share of the step this process has trained, -1 for none."""
        told = digest(self.net.parameters())
        self._log.step(step, loss, self._pace, part=part, sha256=told)

    def end(self, step: int) -> None:
        self._log.end(self.net.parameters(), steps=step)


def train(args: argparse.Namespace, rank: int) -> None:
    """DDP over gloo, with a checkpoint now and then where one is asked for."""
    share = Share(args, rank)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(share.net)
    optimizer = share.optimizer(model.parameters())
    first = 1
    if args.checkpoint and args.checkpoint.exists():
        saved = torch.load(args.checkpoint)
        share.net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"] + 1
    for step in range(first, args.steps + 1):
        letters, following = share.rows(step, rank)
        loss = model(letters, following)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if args.checkpoint and rank == 0 and step % args.every == 0:
            fresh = args.checkpoint.with_suffix(".new")
            state = {"model": share.net.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({"step": step, **state}, fresh)
            os.replace(fresh, args.checkpoint)
        share.record(step, loss, rank)
    share.end(step)


def replicate(args: argparse.Namespace, group: int) -> None:
    """``args.replicas`` groups train. A further one computes along, and adds zero to the gradients
    (torchft's FIXED_WITH_SPARES): so the job computes the same after each loss."""
    import torchft

    share = Share(args, group)

    def load(state: dict[str, Any]) -> None:
        share.net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    def save() -> dict[str, Any]:
        return {"model": share.net.state_dict(), "optimizer": optimizer.state_dict()}

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=args.torchft)),
        load_state_dict=load,
        state_dict=save,
        min_replica_size=args.replicas,
        world_size_mode=torchft.manager.WorldSizeMode.FIXED_WITH_SPARES,
        replica_id=f"group_{group}",
        timeout=timedelta(seconds=max(30.0, args.torchft)),
        init_sync=False,  # all begin with the same weights
    )
    model = torchft.DistributedDataParallel(manager, share.net)
    optimizer = torchft.Optimizer(manager, share.optimizer(model.parameters()))
    while (before := manager.current_step()) < args.steps:
        optimizer.zero_grad()  # asks for a quorum
        part = manager.participating_rank()
        letters, following = share.rows(before + 1, part or 0)
        loss = model(letters, following)
        loss.backward()
        optimizer.step()
        if (step := manager.current_step()) > before:
            share.record(step, loss, -1 if part is None else part)
    share.end(args.steps)


def main() -> None:
    parser = arguments()
    parser.add_argument("--size", type=int, required=True, help="bytes, the interpreter's with it")
    parser.add_argument("--others", type=int, help="the same of all ranks but the first")
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--torchft", type=float, help="seconds that a collective may take")
    parser.add_argument("--replicas", type=int, default=2)
    args = parser.parse_args()
    rank, _ = place()
    if args.torchft:
        replicate(args, int(os.environ["REPLICA_GROUP_ID"]))
    else:
        train(args, rank)
    leave()


if __name__ == "__main__":
    main()
