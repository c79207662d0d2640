# SPDX-License-Identifier: Apache-2.0
"""The group coordinator: a pure core (`group`), the runtime around it (`runtime`), and the routing (`service`)."""
