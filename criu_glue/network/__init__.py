# SPDX-License-Identifier: Apache-2.0
"""The overlay, its fence, and the lock of a capsule's network."""
