# SPDX-License-Identifier: Apache-2.0
"""The order of a migration, as the orchestrator goes through it."""
