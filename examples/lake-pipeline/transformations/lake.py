# SPDX-License-Identifier: Apache-2.0
"""The tables of `kcoord lake` as datasets of Spark's declarative pipelines. Spark orders and updates them.

Settings (`configuration` of the spec): `kcoord.log`, the folder of the log; `kcoord.ends` and `kcoord.topics`, tables
of samples; `kcoord.retention-minutes`; `kcoord.expiry-policy`; `kcoord.now`, a time in ISO 8601 to which ages are
relative.
"""

from kcoord.pipeline.lake.declarative import define

define()
