# SPDX-License-Identifier: Apache-2.0
"""Unchanged clients in front of instances that are killed again and again.

`make clients-before-kafka` runs the long form.
"""
