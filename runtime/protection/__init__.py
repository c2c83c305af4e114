# SPDX-License-Identifier: Apache-2.0
"""The orchestrator decides here when a job gets a snapshot, and whether it is taken back, suspended
or resumed. runtime/snapshot has the steps of each. runtime/losses says what a job has lost."""
