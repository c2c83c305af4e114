# SPDX-License-Identifier: Apache-2.0
"""What the orchestrator keeps durably: who owns which capsule, what is under way, the history."""
