# SPDX-License-Identifier: Apache-2.0
"""The job of resumable.py as torchft wants it: each host is a replica group of one process.

``--replicas`` of the groups train, a further one is a spare that computes along and adds zero to
the gradients (torchft's FIXED_WITH_SPARES), so that the job computes the same whoever is lost.
After torchft's own train_ddp.py.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from shares import Share, open_log, options
from steplog import leave


def main() -> None:
    parser = options()
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=5.0, help="of a collective, in seconds")
    args = parser.parse_args()
    group = int(os.environ["REPLICA_GROUP_ID"])
    log = open_log(args.out, group)

    import torchft

    share = Share(args.size)

    def load(state: dict[str, Any]) -> None:
        share.net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    def save() -> dict[str, Any]:
        return {"model": share.net.state_dict(), "optimizer": optimizer.state_dict()}

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=args.timeout)),
        load_state_dict=load,
        state_dict=save,
        min_replica_size=args.replicas,
        world_size_mode=torchft.manager.WorldSizeMode.FIXED_WITH_SPARES,
        replica_id=f"group_{group}",
        timeout=timedelta(seconds=max(30.0, args.timeout)),
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
            known = -1 if part is None else part
            share.record(log, step, loss, known, args.pace)
    log.end(share.net.parameters(), steps=args.steps)
    leave()


if __name__ == "__main__":
    main()
