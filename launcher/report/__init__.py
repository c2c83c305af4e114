# SPDX-License-Identifier: Apache-2.0
"""Reports that compare a moved run with an undisturbed one: as a page, as JSON and as a table.

Nothing is imported here: every command uses quantities.py, and few use the rest, which takes long.
"""
