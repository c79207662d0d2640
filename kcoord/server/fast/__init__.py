# SPDX-License-Identifier: Apache-2.0
"""Fast paths for repeated requests. Each gives the same response and the same records as the handler."""
