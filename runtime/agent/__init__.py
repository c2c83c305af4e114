# SPDX-License-Identifier: Apache-2.0
"""The daemon of one host: it starts capsules, sends them to other hosts and receives them."""
