# SPDX-License-Identifier: Apache-2.0
"""A pipeline of two NCCL ranks which use the GPU in turns: rank 0 has the first half of a GPT, rank
1 the rest, and each sends the other what it has computed.

    python turns.py --out DIR --steps N

The ranks share one GPU, and no kernel of rank 1 waits for one of rank 0, so the GPU never has to
switch away from rank 1 in the middle of a kernel (gpu_suite/sharing.py says why). While one rank
computes, the other waits on the CPU (gloo). Before rank 1 receives, its stream copies memory for
some 40 ms, which needs no kernel, and rank 0 has sent by then. Without CUDA it all runs on the CPU.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from gpu_suite.jobs.gpt import CONTEXT, VOCABULARY, WIDTH, Block, add_in_one_order, batch

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
TYPE = torch.bfloat16 if CUDA else torch.float32
BLOCK, COPIES = 256 << 20, 8


class First(nn.Module):
    """The embedding and the first blocks."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(depth)))

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.blocks(self.token(tokens) + self.place.weight[: tokens.shape[1]])
        return x


class Last(nn.Module):
    """The other blocks and the head."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(depth)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        logits = self.head(self.norm(self.blocks(x)))
        return F.cross_entropy(logits.float().flatten(0, 1), wanted.flatten())


class Turns:
    """The end of a turn, for both ranks at once, and what one sends the other."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        # The head start of what rank 0 sends: COPIES of these take some 40 ms at 53 GB/s.
        self._here = torch.empty(BLOCK, dtype=torch.uint8, pin_memory=CUDA)
        self._there = torch.empty(BLOCK, dtype=torch.uint8, device=DEVICE)

    def end(self, value: float = 0.0) -> float:
        """Wait until no work of either rank is on the GPU. Returns the sum of what both say."""
        if CUDA:
            torch.cuda.synchronize()
        told = torch.tensor(value)
        dist.all_reduce(told)
        return told.item()

    def send(self, what: Tensor) -> None:
        """Send to the other rank, which calls :meth:`receive` at the same time."""
        self.end()
        dist.send(what.contiguous(), 1 - self.rank)

    def receive(self, like: Tensor) -> Tensor:
        self.end()
        for _ in range(COPIES if CUDA and self.rank == 1 else 0):
            self._there.copy_(self._here, non_blocking=True)
        dist.recv(like, 1 - self.rank)
        return like


def main() -> None:
    from steplog import StepLog, arguments, leave, place

    parser = arguments()
    parser.add_argument("--enough", type=Path, help="end when this file is there")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--depth", type=int, default=2, help="blocks of each rank")
    args = parser.parse_args()
    rank, _ = place()
    add_in_one_order()
    if CUDA:
        torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl" if CUDA else "gloo")
    torch.manual_seed(rank)
    model = (Last if rank else First)(args.depth).to(DEVICE, TYPE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    where = torch.cuda.get_device_name() if CUDA else "the CPU"
    print(f"on {where}, {sum(p.numel() for p in model.parameters()):,}", flush=True)
    log = StepLog(args.out, rank)
    between = torch.empty(args.batch, CONTEXT, WIDTH, device=DEVICE, dtype=TYPE)
    turns = Turns()
    for step in range(1, args.steps + 1):
        tokens, wanted = batch(0, step, args.batch, DEVICE)
        optimizer.zero_grad()
        if isinstance(model, First):
            x = model(tokens)
            turns.send(x.detach())
            x.backward(turns.receive(torch.empty_like(between)))
            optimizer.step()
            loss = turns.receive(torch.empty((), device=DEVICE))
        else:
            x = turns.receive(between.clone()).requires_grad_()
            loss = model(x, wanted)
            loss.backward()
            optimizer.step()
            assert x.grad is not None
            turns.send(x.grad)
            turns.send(loss.detach())
        log.step(step, loss, args.pace)
        if turns.end(float(rank == 0 and args.enough is not None and args.enough.exists())):
            break
    log.end([p.float() for p in model.parameters()], steps=step)
    leave()


if __name__ == "__main__":
    main()
