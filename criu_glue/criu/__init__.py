# SPDX-License-Identifier: Apache-2.0
"""CRIU itself: finding it, dumping with it, restoring with it."""
