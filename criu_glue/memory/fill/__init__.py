# SPDX-License-Identifier: Apache-2.0
"""The fill: it copies pages of the store into the restored processes."""
