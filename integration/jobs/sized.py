# SPDX-License-Identifier: Apache-2.0
"""Training with as much memory as asked for, all of it hot or nearly all of it cold.

hot   a GPT as large as that, with AdamW: every step writes parameters, gradients and both moments
cold  a small GPT, and a data set of random bytes in memory that is read, never written
ddp   as hot, with DistributedDataParallel over gloo in a group of one: an all-reduce a bucket

It goes on until ``--steps``, or until the file ``--enough`` is there. With ``--checkpoint`` it
saves every ``--every`` steps, and goes on from the file if it is there when it begins.
"""

import argparse
import hashlib
import os
import sys
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
from steplog import StepLog, place
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from train_gpt import GPT

BARE = 240_000_000
"""Bytes of its own that an interpreter in which torch has trained has written to."""
LEAST = 8 << 20
PER_PARAMETER = 16
"""Bytes: the parameter, its gradient and two moments, 4 each."""
LETTERS = 256
PIECE = 64 << 20
LENGTH = 128
"""Characters of a sample, at most."""
WORK = 5e9
"""Operations of a step of a hot job where samples can make up for it, some 0.1 s of a core."""


def large(size: int) -> tuple[nn.Module, int, int]:
    """A GPT that with its optimizer takes ``size`` bytes; samples of a step, characters of each."""
    width = 256 if size < 64 << 20 else 512 if size < 640 << 20 else 1024
    depth = max(1, round((size / PER_PARAMETER - 2 * LETTERS * width) / (12 * width**2)))
    length = 32
    samples = max(1, round(WORK / (72 * depth * width**2 * length)))
    return GPT(LETTERS, LENGTH, width, depth), samples, length


def noise(size: int) -> Tensor:
    """``size`` bytes that no compression makes smaller, the same every time."""
    words = numpy.empty(size // 8, numpy.uint64)
    chance = numpy.random.Generator(numpy.random.SFC64(7))
    for at in range(0, len(words), PIECE // 8):
        piece = words[at : at + PIECE // 8]
        piece[:] = chance.integers(0, 1 << 64, len(piece), numpy.uint64)
    return torch.from_numpy(words.view(numpy.uint8))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["hot", "cold", "ddp"])
    parser.add_argument("--size", type=int, required=True, help="bytes, the interpreter's with it")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--pace", type=float, default=0.0, help="seconds of a step, at least")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--enough", type=Path, help="stop when this file is there")
    parser.add_argument("--digests", default="", help="after these steps, besides the last one's")
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--after", type=int, default=0, help="the first checkpoint is after this")
    args = parser.parse_args()

    place()
    torch.set_num_threads(args.threads)
    own = max(args.size - BARE, LEAST)
    model: nn.Module
    if args.kind == "cold":
        data = noise(own)
        model, samples, length = GPT(LETTERS, LENGTH), 16, LENGTH  # as the example trains
    else:
        data = noise(LEAST)
        model, samples, length = large(own)
    if args.kind == "ddp":
        store = dist.HashStore()  # type: ignore[attr-defined]  # torch does not declare it
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    first = 1
    if args.checkpoint and args.checkpoint.exists():
        saved = torch.load(args.checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"] + 1
        del saved
    told = {int(step) for step in args.digests.split(",") if step}
    log = StepLog(args.out, 0)
    print(f"{args.kind}, pid {os.getpid()}, from step {first}", flush=True)
    for step in range(first, args.steps + 1):
        chance = torch.Generator().manual_seed(step)
        starts = torch.randint(len(data) - length, (samples,), generator=chance).tolist()
        rows = torch.stack([data[s : s + length + 1] for s in starts]).long()
        loss = model(rows[:, :-1], rows[:, 1:])
        optimizer.zero_grad(set_to_none=False)  # they stay where they are, and hot
        loss.backward()
        optimizer.step()
        if args.checkpoint and step >= args.after and (step - args.after) % args.every == 0:
            state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            fresh = args.checkpoint.with_suffix(".new")
            torch.save(state, fresh)
            os.replace(fresh, args.checkpoint)
        log.step(step, loss, args.pace)
        if step in told:
            log.end(model.parameters(), name=f"after{step}-", steps=step)
        if args.enough and args.enough.exists():
            break
    log.end(model.parameters(), steps=step, data=hashlib.sha256(data.numpy().data).hexdigest())


if __name__ == "__main__":
    main()
