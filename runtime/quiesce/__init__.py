# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a job come to a boundary of their collectives."""
