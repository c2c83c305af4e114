# SPDX-License-Identifier: Apache-2.0
"""Cold pages go in place before the tree is restored."""
