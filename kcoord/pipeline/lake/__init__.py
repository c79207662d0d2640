# SPDX-License-Identifier: Apache-2.0
"""The lake: what became of every group, at every moment, as tables that are kept.

Bronze holds the records as they were read, silver what they mean, gold the answers. `jobs` builds them, `report` shows
them. docs/pipeline.md explains both, docs/lake-tables.md has every column.
"""
