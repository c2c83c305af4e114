# SPDX-License-Identifier: Apache-2.0
"""The GPU helper: one long-lived root process on each host that makes all calls of the CUDA driver.

cuInit takes seconds on a large host. A caller that is killed in the middle of an operation leaves
the driver and the process that it worked on in a bad state. So there is one caller, which outlives
its agent. client.py is the agent's end, __main__.py the helper process. calls.py has the messages,
and service.py says what the helper does for each.
"""
