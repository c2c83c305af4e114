# SPDX-License-Identifier: Apache-2.0
"""Programs that ranks of the tests run over gloo; each ends with what it has computed.

Called as ``gloo_programs.py NAME STEPS FOLDER...`` with WORLD_SIZE set, for all ranks: once for
each folder, one after the other. The result of a rank goes to FOLDER/<rank>.json, its page to
FOLDER/pages; it depends on nothing but the program, its ranks and its steps.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

RANK, SIZE = -1, int(os.environ["WORLD_SIZE"])


def digest(*tensors: torch.Tensor) -> str:
    whole = hashlib.sha256()
    for tensor in tensors:
        whole.update(tensor.detach().numpy().tobytes())
    return whole.hexdigest()


def several(steps: int) -> str:
    """Several all_reduce in flight at once: gloo's workers take them up in any order."""
    values = [torch.full((n + 1,), float(RANK + n)) for n in range(6)]
    for _ in range(steps):
        works = [dist.all_reduce(value, op=dist.ReduceOp.AVG, async_op=True) for value in values]
        for work in works:
            work.wait()
        for n, value in enumerate(values):
            value += RANK * (n + 1)
    return digest(*values)


def ddp(steps: int) -> str:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    wrapped = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.001)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
    source = torch.Generator().manual_seed(RANK)
    for _ in range(steps):
        batch = torch.rand(8, 16, generator=source)
        optimizer.zero_grad()
        (wrapped(batch) - batch.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
    return digest(*model.parameters())


def groups(steps: int) -> str:
    """Overlapping groups, and two with equal members; whoever is in none computes meanwhile."""
    members = [list(range(SIZE)), [0, 1], [0, 1], [1, 2], list(range(1, SIZE)), [0, SIZE - 1]]
    made = [(ranks, dist.new_group(ranks)) for ranks in members]
    value = torch.full((8,), float(RANK))
    for step in range(steps):
        for n, (ranks, group) in enumerate(made):
            if RANK in ranks and (step + n) % 3:
                dist.all_reduce(value, op=dist.ReduceOp.AVG, group=group)
                value += n
        if step % 5 == 0:
            dist.broadcast(value, src=step % SIZE)
    return digest(value)


def pairs(steps: int) -> str:
    """A pipeline, with receives posted long before they are waited for, and other groups' work."""
    value = torch.full((64,), float(RANK))
    other = torch.zeros(64)
    for step in range(steps):
        after, before = (RANK + 1 + step % (SIZE - 1)) % SIZE, (RANK - 1 - step % (SIZE - 1)) % SIZE
        receiving = dist.irecv(other, before)
        sending = dist.isend(value, after)
        total = value.clone()
        if step % 4 == 3:
            dist.all_reduce(total, op=dist.ReduceOp.AVG)
        assert sending is not None
        assert receiving is not None
        sending.wait()
        receiving.wait()
        value = (value + other + total) / 3
    # Who asks the first rank is answered; in what order they ask is open, and doesn't matter.
    asked = torch.zeros(4, dtype=torch.int64)
    number = torch.zeros(4, dtype=torch.int64)
    for step in range(steps):
        if RANK == 0:
            for _ in range(SIZE - 1):
                sender = dist.recv(number)
                asked += number
                dist.send(number * sender, sender)
        else:
            dist.send(number + step * RANK, 0)
            dist.recv(number, 0)
            asked += number
            number.zero_()
    return digest(value, asked)


def fresh(steps: int) -> str:
    """Groups come and go."""
    value = torch.full((8,), float(RANK))
    for step in range(steps):
        first = step % SIZE
        ranks = [first, (first + 1) % SIZE]
        group = dist.new_group(ranks)
        if RANK in ranks:
            dist.all_reduce(value, op=dist.ReduceOp.AVG, group=group)
            dist.destroy_process_group(group)
        dist.all_reduce(value, op=dist.ReduceOp.AVG)
        value += RANK
    return digest(value)


PROGRAMS: dict[str, Callable[[int], str]] = {
    program.__name__: program for program in (several, ddp, groups, pairs, fresh)
}


def main() -> int:
    """Fork the ranks, once torch is imported, and wait for them; the worst of their statuses."""
    global RANK
    for folder in map(Path, sys.argv[3:]):
        os.environ["LIVESHIFT_PAGES"] = str(folder / "pages")
        for rank in range(SIZE):
            if os.fork() == 0:
                RANK = rank
                os.environ["RANK"] = str(rank)
                run(folder)
        # Whichever ends first, so that none is seen that has ended.
        if worst := max(abs(os.waitstatus_to_exitcode(os.wait()[1])) for _ in range(SIZE)):
            return worst
    return 0


def run(folder: Path) -> NoReturn:
    name, steps = sys.argv[1], int(sys.argv[2])
    status = 1
    try:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=RANK,
            world_size=SIZE,
            timeout=timedelta(seconds=60),
        )
        result = PROGRAMS[name](steps)
        dist.barrier()
        (folder / f"{RANK}.json").write_text(json.dumps(result))
        time.sleep(0.2)  # what the barrier has to send is sent
        status = 0
    except Exception:
        traceback.print_exc()
    finally:  # torch 2.13's own teardown aborts now and then, see integration/jobs/steplog.py
        os._exit(status)


if __name__ == "__main__":
    sys.exit(main())
