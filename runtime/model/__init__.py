# SPDX-License-Identifier: Apache-2.0
"""The concepts job, move and owner, without traffic or clocks."""
