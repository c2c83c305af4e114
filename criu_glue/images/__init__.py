# SPDX-License-Identifier: Apache-2.0
"""CRIU's image files: what they contain, what they may contain, and what we change in them."""
