# SPDX-License-Identifier: Apache-2.0
"""Requests to the orchestrator and to agents, over a socket of this host or over TCP."""
