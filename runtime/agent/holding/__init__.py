# SPDX-License-Identifier: Apache-2.0
"""This host as a holder: it keeps images of capsules of other hosts in its memory.

A *generation* is what a snapshot of a job has left here of one capsule: an image that was never
restored. Its memory lies in a store that all generations of the capsule share, so pages that did
not change take memory once. All other streams lie in files of their own for each generation.
"""
