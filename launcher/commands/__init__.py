# SPDX-License-Identifier: Apache-2.0
"""The commands, one verb in a file."""
