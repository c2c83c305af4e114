# SPDX-License-Identifier: Apache-2.0
"""The runtime decides: orchestrator, agents, the migration, and the wire between them."""
