# SPDX-License-Identifier: Apache-2.0
"""The prefill: it puts cold memory in place before the tree is restored."""
