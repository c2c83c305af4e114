# SPDX-License-Identifier: Apache-2.0
"""The built interposer in other worlds: other glibcs, other Pythons, real torch in them.

A world is a Python and the C library it runs on: those installed here, those of other suites of
the Debian archive that apt is configured with (each in a folder of its own, entered by chroot), and
those named on the command line. In each, ``probe.py`` passes the hooks with a double of torch's
library, forks and execs; where torch can be imported there, ``torch_probe.py`` runs two ranks over
gloo, with and without the interposer. What happened is read from the pages, from outside.
"""
