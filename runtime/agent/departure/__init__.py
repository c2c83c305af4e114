# SPDX-License-Identifier: Apache-2.0
"""The source's side of a migration: it pre-copies memory, then dumps the tree and sends it."""
