# SPDX-License-Identifier: Apache-2.0
"""What runs in the capsules of the steps that move jobs."""
