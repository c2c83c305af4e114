# SPDX-License-Identifier: Apache-2.0
"""Which jobs have snapshots and when, and which are taken back, suspended or resumed.
runtime/snapshot has the steps of each, and runtime/losses says what a job has lost."""
