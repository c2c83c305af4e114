# SPDX-License-Identifier: Apache-2.0
"""Connections of the control plane: links under CURVE, local sockets, keys."""
