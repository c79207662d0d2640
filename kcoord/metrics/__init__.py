# SPDX-License-Identifier: Apache-2.0
"""What a running broker tells Prometheus, off unless `kcoord.metrics.port` is set.

`measures` are plain objects that count and time; they cost nothing where metrics are off, since nobody makes them.
`exposition` reads them, and what the broker knows anyhow, when it is scraped; the Prometheus library is imported there.
"""
