# SPDX-License-Identifier: Apache-2.0
"""What a person uses: the command line, ``run``, the lab, the reports. No other folder imports it.

One file per verb. ``cli`` puts the verbs together and is the only place where errors become exit
codes. A verb imports what it needs only when it runs, so that ``liveshift status`` starts quickly.
"""
