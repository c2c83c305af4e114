# SPDX-License-Identifier: Apache-2.0
"""Snapshots of whole jobs, and rewinds to them, in the order in which the orchestrator takes the
steps."""
