# SPDX-License-Identifier: Apache-2.0
"""Deterministic simulation: the real coordinator under a virtual clock, a lossy network, a crashing disk and model
clients, all driven by one seed. Two runs of a seed are the same run.
"""
