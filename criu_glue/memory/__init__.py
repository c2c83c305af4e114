# SPDX-License-Identifier: Apache-2.0
"""Memory that moves outside CRIU's images: followed at the source, kept and filled in there."""
