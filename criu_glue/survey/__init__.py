# SPDX-License-Identifier: Apache-2.0
"""What a capsule consists of, and what of it stands in the way of a move."""
