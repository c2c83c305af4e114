# SPDX-License-Identifier: Apache-2.0
"""The one that decides: jobs, moves, spares, evacuations, and the journal of them."""
