# SPDX-License-Identifier: Apache-2.0
"""Starts a command several times, each a rank, as torchrun would, but in a moment."""

import os
import subprocess
import sys


def main() -> None:
    """ranks.py N COMMAND [ARG…]; ends as the first rank that fails does, with none left."""
    count, command = int(sys.argv[1]), sys.argv[2:]
    first, world = (int(os.environ.get(n, d)) for n, d in (("RANK", "0"), ("WORLD_SIZE", "1")))
    ranks = [
        subprocess.Popen(
            command,
            env=os.environ
            | {
                "RANK": str(first * count + local),
                "LOCAL_RANK": str(local),
                "WORLD_SIZE": str(world * count),
            },
        )
        for local in range(count)
    ]
    while ranks:
        pid, status = os.wait()
        ranks = [rank for rank in ranks if rank.pid != pid]
        if code := os.waitstatus_to_exitcode(status):
            for rank in ranks:
                rank.kill()
            sys.exit(code if code > 0 else 128 - code)


if __name__ == "__main__":
    main()
