# SPDX-License-Identifier: Apache-2.0
"""The cluster file: its tables, the rules between values, what is derived, and who may do what."""
