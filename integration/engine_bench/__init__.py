# SPDX-License-Identifier: Apache-2.0
"""The data path of memory by itself: no job, no CRIU, no lab.

A process that does nothing has some memory. One program reads and seals that memory as a source
does, and sends it over the loopback interface. Another program opens and stores it as a destination
does. Either the store has its memory before (``ready``), or it touches free memory for the first
time, which is work of the kernel, and on a virtual machine of the hypervisor.
"""
