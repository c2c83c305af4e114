# SPDX-License-Identifier: Apache-2.0
"""Memory that moves outside CRIU's images: the source follows it, the destination fills it in."""
