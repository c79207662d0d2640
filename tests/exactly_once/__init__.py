# SPDX-License-Identifier: Apache-2.0
"""Applications that process exactly once through a gateway, while they, kcoord and brokers of the upstream are killed.

`make exactly-once` runs the long form.
"""
