# SPDX-License-Identifier: Apache-2.0
"""The interposer, which LD_PRELOAD loads into every process of a job, and its pages.

The library is written in C: it hooks, counts and forwards calls. The Python modules read the pages
(``page``), write orders (``orders``), and check the hooked names against a torch library
(``library``).
"""
