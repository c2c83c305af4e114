# SPDX-License-Identifier: Apache-2.0
"""What is loaded into every process of a job by LD_PRELOAD, and the page through which it speaks.

The library is C (hooks, counting, forwarding); ``page`` is its Python face, for reading the pages
and for checking the hooked names against a torch library.
"""
