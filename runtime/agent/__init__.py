# SPDX-License-Identifier: Apache-2.0
"""The daemon of one host: it runs capsules, sends them away and takes them in."""
