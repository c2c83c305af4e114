# SPDX-License-Identifier: Apache-2.0
"""The destination's side of a migration: it stores the image, then restores the tree."""
