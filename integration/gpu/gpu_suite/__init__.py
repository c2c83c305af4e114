# SPDX-License-Identifier: Apache-2.0
"""The GPU suite (``integration/gpu/run``): each step answers one question about a GPU, alone.

Steps are in plan.py, in the order in which they are done; each has processes of its own and a
deadline, and one that fails, hangs or cannot run costs only itself. They stand on what the product
stands on, so that what is measured is what is shipped.
"""
