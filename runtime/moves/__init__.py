# SPDX-License-Identifier: Apache-2.0
"""Which capsules move, where to, and when: plans, costs, spares, hosts that are to be empty.
runtime/migration has the steps of one move."""
