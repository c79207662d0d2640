# SPDX-License-Identifier: Apache-2.0
"""The tables of `kcoord lake` as datasets of Spark's declarative pipelines. Spark finds the order, and what is stale.

Settings (`configuration` of the spec): `kcoord.log`, the folder of the log; `kcoord.ends`, a table of samples;
`kcoord.retention-minutes`; `kcoord.expiry-policy`; `kcoord.now`, a time in ISO 8601 from which ages count.
"""

from kcoord.pipeline.lake.declarative import define

define()
