# SPDX-License-Identifier: Apache-2.0
"""The pages that have come, until they are put in place."""
