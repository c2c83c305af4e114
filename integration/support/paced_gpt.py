# SPDX-License-Identifier: Apache-2.0
"""examples/train_gpt.py with ``--pace SECONDS``, as the other jobs have it (steplog.py).

A job that is moved must last longer than its moves. This one waits instead of computing for long.
"""

import argparse
import sys
import time
from pathlib import Path

# A copy of both files may lie in one folder.
sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))
import train_gpt


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--pace", type=float, default=0.0)
    own, others = parser.parse_known_args()
    sys.argv[1:] = others
    last_step = train_gpt.last_step
    began = time.monotonic()

    def paced(args: argparse.Namespace) -> int:
        """The program asks after each step which is the last one."""
        nonlocal began
        if own.pace and not (args.out / "hurry").exists():
            time.sleep(max(0.0, began + own.pace - time.monotonic()))
        began = time.monotonic()
        return last_step(args)

    train_gpt.last_step = paced
    train_gpt.main()


if __name__ == "__main__":
    main()
