# SPDX-License-Identifier: Apache-2.0
"""The GPU side of a move: which GPUs a host has (NVML) and what its driver can do (libcuda)."""
