# SPDX-License-Identifier: Apache-2.0
"""CRIU\'s image files: what is in them, what may be, and what is changed in them."""
