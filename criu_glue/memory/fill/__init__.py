# SPDX-License-Identifier: Apache-2.0
"""Pages go into the restored processes."""
