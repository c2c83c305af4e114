# SPDX-License-Identifier: Apache-2.0
"""Quiesce: brings all ranks of a job to a boundary."""
