# SPDX-License-Identifier: Apache-2.0
"""One host and the capsules on it."""
