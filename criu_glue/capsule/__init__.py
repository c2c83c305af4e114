# SPDX-License-Identifier: Apache-2.0
"""The namespaces, mounts and output of a capsule."""
