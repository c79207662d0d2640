# SPDX-License-Identifier: Apache-2.0
"""Groups of the classic protocol, and groups that only hold committed offsets."""
