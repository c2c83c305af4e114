# SPDX-License-Identifier: Apache-2.0
"""What a person sees: tables, lines, words."""
