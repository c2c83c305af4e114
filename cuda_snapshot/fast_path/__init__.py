# SPDX-License-Identifier: Apache-2.0
"""Whether device memory can be handed over by descriptor on this host: tried, with expendable
processes, before a job depends on it.

The fast path checkpoints a process whose physical memory was exported, unmapped and released while
its addresses stay reserved. Reports differ on whether drivers come back from that, so rank.py is
such a process, trial.py does to it what a move would do, and probe.py, in the GPU helper, watches
them with a deadline for each step. Who hangs is left alone: it is not the helper.
"""
