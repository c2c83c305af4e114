# SPDX-License-Identifier: Apache-2.0
"""The CPU side of a move: sandboxes, their network and files, CRIU, images as streams."""
