# SPDX-License-Identifier: Apache-2.0
"""What tests of several folders share: a kcoord process, and bounded waiting."""
