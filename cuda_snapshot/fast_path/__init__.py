# SPDX-License-Identifier: Apache-2.0
"""The trial of the fast path: whether device memory can be handed over by descriptor on this host.
The helper tries it with processes of its own before a job depends on it.

The fast path checkpoints a process whose physical memory was exported, unmapped and released while
its addresses stay reserved. Reports differ on whether drivers can do that. So rank.py is such a
process, trial.py does to it what a move would do, and probe.py, in the GPU helper, watches both
with a deadline for each step. If trial.py hangs, the helper leaves it alone and does not hang.
"""
