# SPDX-License-Identifier: Apache-2.0
"""The shell (ring 4): sockets, threads, signals. Only this ring uses a clock, a random source or an event loop."""
