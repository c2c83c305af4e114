# SPDX-License-Identifier: Apache-2.0
"""What the orchestrator and the agent have in common as daemons."""
