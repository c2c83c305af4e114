# SPDX-License-Identifier: Apache-2.0
"""A job whose log and checkpoints lie on its host's own disk, on a path that goes along.

It keeps the log open all the time, adds a line in every step, and every few steps saves a
checkpoint under a new name and deletes the one before the last. At its end it reads all of it.
"""

import os
from pathlib import Path

import torch
from steplog import StepLog, arguments, digest, place
from torch import nn

EVERY = 10

parser = arguments()
parser.add_argument(
    "--own", type=Path, required=True, help="on this host's own disk, with RANK for it"
)
args = parser.parse_args()

rank, _ = place()
own = Path(str(args.own).replace("RANK", str(rank)))
own.mkdir(parents=True)
model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
steps = StepLog(args.out, rank)
with (own / "train.log").open("a", buffering=1) as log:
    for step in range(1, args.steps + 1):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step))
        loss = (model(x) - x.roll(1, 1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log.write(f"step {step} loss {loss.item().hex()}\n")
        if step % EVERY == 0:
            state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, own / "new.pt")
            os.replace(own / "new.pt", own / f"checkpoint-{step}.pt")
            (own / f"checkpoint-{step - 2 * EVERY}.pt").unlink(missing_ok=True)
        steps.step(step, loss, args.pace)

lines = (own / "train.log").read_text().splitlines()
assert [int(line.split()[1]) for line in lines] == list(range(1, args.steps + 1))
last = args.steps - args.steps % EVERY
kept = sorted(path.name for path in own.iterdir())
expected = [f"checkpoint-{last}.pt", f"checkpoint-{last - EVERY}.pt", "train.log"]
assert kept == sorted(expected), kept
saved = torch.load(own / f"checkpoint-{last}.pt")
assert saved["step"] == last
if last == args.steps:
    assert digest(saved["model"].values()) == digest(model.state_dict().values())
steps.end(model.parameters(), lines=len(lines), kept=kept)
