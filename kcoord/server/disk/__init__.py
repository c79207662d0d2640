# SPDX-License-Identifier: Apache-2.0
"""The logs of a process on disk: its data folder, the log writer, the logs of the shards and the log cleaner."""
