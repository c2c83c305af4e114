# SPDX-License-Identifier: Apache-2.0
"""The steps of a migration, in the order in which the orchestrator takes them."""
