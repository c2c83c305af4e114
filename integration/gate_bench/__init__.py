# SPDX-License-Identifier: Apache-2.0
"""What the interposer costs while nothing happens, and how long a boundary takes to find.

``cost``: instructions and nanoseconds of one collective on the open gate. ``device_cost``: the same
for NCCL and for allocations, on the doubles. ``step_time``: a DDP job over gloo with and without
the library, in turns. ``quiesce``: seconds from closing the gates of real ranks to the boundary.
``scale``: the same for up to 16,384 simulated ranks, with the orchestrator's own code and messages.
``python -m gate_bench`` runs them all, or those that are named.
"""
