# SPDX-License-Identifier: Apache-2.0
"""Finds out what a capsule consists of, and which parts of it prevent a move."""
