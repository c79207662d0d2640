# SPDX-License-Identifier: Apache-2.0
"""Dialogues with a coordinator as text files, played on several stages. CONTRIBUTING.md describes their use."""
