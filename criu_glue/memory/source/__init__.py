# SPDX-License-Identifier: Apache-2.0
"""The source's part: it finds the written pages, reads them and sends them."""
