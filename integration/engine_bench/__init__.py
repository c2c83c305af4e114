# SPDX-License-Identifier: Apache-2.0
"""The data path of memory by itself: no job, no CRIU, no lab.

A process that does nothing has some memory. One program reads and seals it as a source does, and
sends it over the loopback interface to another one, which opens and stores it as a destination
does. The store's memory is there before (``ready``) or not: the first touch of free memory is the
kernel's work, and on a virtual machine the hypervisor's.
"""
