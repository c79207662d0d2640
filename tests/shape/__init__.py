# SPDX-License-Identifier: Apache-2.0
"""`make shape`: measures how many files a request passes, and how the code is divided."""
