# SPDX-License-Identifier: Apache-2.0
"""The orchestrator as a process: it makes all of its parts, and answers people and agents."""
