# SPDX-License-Identifier: Apache-2.0
"""What a job, a move and an owner are, without traffic or clocks."""
