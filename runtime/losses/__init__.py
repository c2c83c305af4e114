# SPDX-License-Identifier: Apache-2.0
"""What a job has lost: hosts that are dead, links that are cut, ranks that a fault has ended. Only
the orchestrator asks; runtime/protection/rewinds.py then takes the job back."""
