# SPDX-License-Identifier: Apache-2.0
"""The source\'s end of memory: what was written, read and sent."""
