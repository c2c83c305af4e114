# SPDX-License-Identifier: Apache-2.0
"""The source\'s end of a migration: memory goes ahead, then the tree is dumped and sent."""
