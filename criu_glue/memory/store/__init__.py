# SPDX-License-Identifier: Apache-2.0
"""The store: it keeps the pages that have come until the fill has put them in place."""
