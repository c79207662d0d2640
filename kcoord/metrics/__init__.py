# SPDX-License-Identifier: Apache-2.0
"""The metrics of a running broker for Prometheus. They are off unless `kcoord.metrics.port` is set.

`measures` has plain objects that count and time. If metrics are off, these objects do not exist and cost nothing.
`exposition` has the text of the page, and `server` serves it. They alone import the Prometheus library.

Threads: all measures belong to the thread of the event loop. A scrape runs in a thread of the HTTP server. It asks the
event loop for a snapshot of plain numbers, waits for it at most SCRAPE_SECONDS, and formats the text in its own thread.
The event loop never waits for a scrape. All counters begin at 0 when the process starts; nothing is stored.
"""
