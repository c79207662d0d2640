# SPDX-License-Identifier: Apache-2.0
"""The deterministic simulation of instances in front of an upstream (`kcoord simulate --scenario upstream`).

The instances are the product's own code; the upstream is a model. `world` is the place to begin.
"""
