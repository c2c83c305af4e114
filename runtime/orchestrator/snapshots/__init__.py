# SPDX-License-Identifier: Apache-2.0
"""Decides when a snapshot of a job is taken, and takes jobs back to snapshots."""
