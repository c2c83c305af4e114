# SPDX-License-Identifier: Apache-2.0
"""A character-level GPT in plain PyTorch: one process, or DDP over gloo under torchrun.

    python train_gpt.py --steps 200
    torchrun --nproc-per-node 2 train_gpt.py --steps 200 --out runs/a

It learns to write licences: its text ships with every Debian system. Two runs with the same
arguments give the same losses and the same final parameters, to the last bit. Each rank leaves in
--out its ``rank<R>.jsonl`` (one line per step) and, at the end, ``final<R>.json``. To end a run
before --steps, write the number of a step that is still to come into --stop-file.
"""

import argparse
import hashlib
import json
import math
import os
import pydoc_data.topics
import socket
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

LICENCES = Path("/usr/share/common-licenses")


class Block(nn.Module):
    """Attention and a small perceptron, each behind a norm and added to the stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        qkv = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, c // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return x


class GPT(nn.Module):
    def __init__(self, vocab: int, block: int, width: int = 96, depth: int = 4) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(vocab, width), nn.Embedding(block, width)
        self.blocks = nn.Sequential(*(Block(width, heads=4) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, idx: Tensor, target: Tensor) -> Tensor:
        x = self.token(idx) + self.place.weight[: idx.shape[1]]
        logits = self.head(self.norm(self.blocks(x)))
        loss: Tensor = F.cross_entropy(logits.flatten(0, 1), target.flatten())
        return loss


def read_text(path: Path | None) -> str:
    """The training text: a file, a folder's plain files, or else Python's own documentation."""
    path = path or LICENCES
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    # Links are left out: Debian's GPL is one to GPL-3, and each text shall count once.
    texts = [f.read_text("utf-8", "replace") for f in files if f.is_file() and not f.is_symlink()]
    if texts:
        return "\n".join(texts)
    if path != LICENCES:
        raise SystemExit(f"train_gpt.py: --text {path}: no file there")
    topics: dict[str, str] = pydoc_data.topics.topics
    return "\n".join(topics[name] for name in sorted(topics))


def batch(data: Tensor, args: argparse.Namespace, rank: int, step: int) -> tuple[Tensor, Tensor]:
    """The samples of one rank in one step: they depend on nothing else."""
    chance = torch.Generator().manual_seed((args.seed << 28) + (rank << 20) + step)
    starts = torch.randint(len(data) - args.block, (args.batch,), generator=chance).tolist()
    rows = torch.stack([data[s : s + args.block + 1] for s in starts])
    return rows[:, :-1], rows[:, 1:]


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Twenty steps of warm-up, then a cosine down to a tenth."""
    peak: float = args.lr * min(1.0, step / 20)
    return peak * (0.55 + 0.45 * math.cos(math.pi * step / args.steps))


def last_step(args: argparse.Namespace) -> int:
    """--steps, or the earlier one that --stop-file names, which no rank has come to yet."""
    if args.stop_file is None or not args.stop_file.exists():
        return int(args.steps)
    return min(int(args.steps), int(args.stop_file.read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description="train a small character-level GPT")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--stop-file", type=Path, help="may name an earlier last step, at any time")
    parser.add_argument("--batch", type=int, default=16, help="samples per rank and step")
    parser.add_argument("--block", type=int, default=128, help="characters per sample")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads per rank")
    parser.add_argument("--text", type=Path, help="a text file, or a folder of them")
    parser.add_argument("--out", type=Path, default=Path("runs/gpt"), help="where results go")
    parser.add_argument("--log-every", type=int, default=10, help="steps between progress lines")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error("--steps: at least 1")

    torch.set_num_threads(args.threads)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(args.seed)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))

    text = read_text(args.text)
    if len(text) <= args.block:
        parser.error(f"--block {args.block}: the text has {len(text)} characters, it needs more")
    letters = sorted(set(text))
    index = {letter: i for i, letter in enumerate(letters)}
    data = torch.tensor([index[letter] for letter in text])
    model: nn.Module = GPT(len(letters), args.block)
    size = sum(p.numel() for p in model.parameters())
    if world > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)
    if rank == 0:
        print(f"{size:,} parameters, {len(text):,} characters, {world} rank(s)", flush=True)

    args.out.mkdir(parents=True, exist_ok=True)
    with (args.out / f"rank{rank}.jsonl").open("w", buffering=1) as log:
        since = time.monotonic()
        step, last = 0, last_step(args)
        while step < last:
            step += 1
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, args)
            loss = model(*batch(data, args, rank, step))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            value = loss.item()
            line = {
                "step": step,
                "loss": value,
                "loss_hex": value.hex(),
                "time": time.time(),
                "mono": time.monotonic(),
                "host": socket.gethostname(),
            }
            log.write(json.dumps(line) + "\n")
            last = last_step(args)
            if rank == 0 and (step % args.log_every == 0 or step == last):
                pace = (time.monotonic() - since) / ((step - 1) % args.log_every + 1)
                since = time.monotonic()
                print(f"step {step:4d}  loss {value:.4f}  {pace:.2f} s/step", flush=True)

    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.contiguous().numpy().tobytes())
    final = {"sha256": digest.hexdigest(), "steps": step, "loss": value}
    (args.out / f"final{rank}.json").write_text(json.dumps(final) + "\n")
    print(f"final sha256 {digest.hexdigest()}", flush=True)
    if world > 1:
        # The model holds the process group. If it went last, Python would destroy the group and
        # hold the GIL, for which gloo's thread may wait (github.com/pytorch/pytorch/issues/56297).
        del model, optimizer, loss
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
