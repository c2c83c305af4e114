# SPDX-License-Identifier: Apache-2.0
"""The orchestrator decides here which capsules move, where they go, and when: it plans a move,
predicts its cost, chooses a spare, and empties hosts. runtime/migration has the steps of a move."""
