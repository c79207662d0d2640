# SPDX-License-Identifier: Apache-2.0
"""The lake: the history of every consumer group, as tables that outlive the log.

Bronze tables hold the records as they were read, silver tables their meaning, gold tables the answers. `jobs` builds
the tables and `report` shows them. docs/pipeline.md explains both, docs/lake-tables.md has every column.
"""
