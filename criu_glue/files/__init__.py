# SPDX-License-Identifier: Apache-2.0
"""Files and directories: walking, packing, unpacking, and whose they are."""
