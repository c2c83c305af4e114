# SPDX-License-Identifier: Apache-2.0
"""The destination\'s end of a migration: what comes is kept, then the tree is restored."""
