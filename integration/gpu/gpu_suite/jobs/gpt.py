# SPDX-License-Identifier: Apache-2.0
"""A GPT of about 1e8 parameters on a GPU: bf16, AdamW, deterministic; losses and parameters kept.

    python gpt.py --out DIR --steps N [--compile] [--wrap ddp|fsdp]

With --wrap it is one of several NCCL ranks, by the variables that torchrun or liveshift sets. As
examples/train_gpt.py, each rank leaves ``rank<R>.jsonl`` and ``final<R>.json``.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or cuBLAS is not deterministic
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no compile workers in the capsule

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "jobs"))

VOCABULARY, CONTEXT, WIDTH, DEPTH, HEADS = 32_000, 256, 768, 11, 12


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, c // HEADS).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        out: torch.Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out


class GPT(nn.Module):
    """Its head and its embedding are one matrix: 1.03e8 parameters."""

    def __init__(self, depth: int = DEPTH) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor, wanted: Tensor) -> Tensor:
        x = self.token(tokens) + self.place.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), wanted.flatten())


def batch(rank: int, step: int, size: int, device: str = "cuda") -> tuple[Tensor, Tensor]:
    """A rule with some chance in it, which there is something to learn of."""
    chance = torch.Generator().manual_seed((rank << 20) + step)
    starts = torch.randint(VOCABULARY, (size, 1), generator=chance)
    strides = torch.randint(1, 5, (size, 1), generator=chance)
    row = (starts + strides * torch.arange(CONTEXT + 1)) % VOCABULARY
    return row[:, :-1].to(device), row[:, 1:].to(device)


def wrapped(model: nn.Module, how: str) -> nn.Module:
    if how == "ddp":
        return nn.parallel.DistributedDataParallel(model, device_ids=[0])
    if how == "fsdp":
        from torch.distributed.fsdp import fully_shard

        assert isinstance(model, GPT)
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    return model


def add_in_one_order() -> None:
    """Turn off the attention kernels whose backward passes may add in any order."""
    for kind in ("flash", "mem_efficient", "cudnn"):
        getattr(torch.backends.cuda, f"enable_{kind}_sdp")(False)


def enough(args: argparse.Namespace, rank: int) -> bool:
    """Whether rank 0 has seen the file, at the same step for all."""
    if args.enough is None:
        return False
    told = torch.tensor(float(rank == 0 and args.enough.exists()), device="cuda")
    if args.wrap != "none":
        dist.all_reduce(told)
    return bool(told.item())


def main() -> None:
    from steplog import StepLog, arguments, leave, place

    parser = arguments()
    parser.add_argument("--enough", type=Path, help="end when this file is there")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--depth", type=int, default=DEPTH)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--wrap", choices=("none", "ddp", "fsdp"), default="none")
    args = parser.parse_args()
    rank, _ = place()
    add_in_one_order()
    torch.cuda.set_device(0)
    if args.wrap != "none":
        dist.init_process_group("nccl", device_id=torch.device("cuda:0"))
    plain = GPT(args.depth).cuda().bfloat16()
    if args.compile:  # its blocks are alike: they are compiled once
        for block in plain.blocks:
            block.compile()
    model = wrapped(plain, args.wrap)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    print(f"on {torch.cuda.get_device_name()}, {sum(p.numel() for p in model.parameters()):,}")
    sys.stdout.flush()
    log = StepLog(args.out, rank)
    for step in range(1, args.steps + 1):
        loss = model(*batch(rank, step, args.batch))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log.step(step, loss, args.pace)
        if enough(args, rank):
            break
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    log.end([p.float() for p in whole], steps=step)
    leave()


if __name__ == "__main__":
    main()
