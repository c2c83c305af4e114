# SPDX-License-Identifier: Apache-2.0
"""The GPU helper: one resident process of root per host that makes all calls of the CUDA driver.

cuInit takes seconds on a large host, and a caller that is killed in mid-operation leaves the driver
and the process that it named at odds. So there is one caller, which outlives its agent: client.py
is the agent's end, __main__.py the process. calls.py is what passes between them.
"""
