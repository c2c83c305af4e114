# SPDX-License-Identifier: Apache-2.0
"""The code that the daemons, orchestrator and agent, have in common."""
