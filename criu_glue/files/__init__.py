# SPDX-License-Identifier: Apache-2.0
"""Files and directories: walking, packing and unpacking them, and the rights of their users."""
