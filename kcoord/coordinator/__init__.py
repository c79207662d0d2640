# SPDX-License-Identifier: Apache-2.0
"""The group coordinator: a pure core (`group`), the runtime that orders it and waits for the disk (`runtime`), and the routing (`service`)."""
