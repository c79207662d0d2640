# SPDX-License-Identifier: Apache-2.0
"""`make shape`: how far a request travels through the code, and how the code is divided."""
