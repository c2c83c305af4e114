# SPDX-License-Identifier: Apache-2.0
"""What the interposer costs while nothing happens, and how long a boundary takes to find.

``cost``: instructions and nanoseconds of one collective on the open gate. ``step_time``: a DDP job
over gloo with and without the library, interleaved. ``quiesce``: seconds from closing the gates of
real ranks to the boundary. Each runs by itself; ``python -m gate_bench`` runs them all.
"""
