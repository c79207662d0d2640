# SPDX-License-Identifier: Apache-2.0
"""The handlers, one module per API.

Each module has `API_KEY`, `VERSIONS` (all versions that the handler can serve), `handle(broker, context, request)` and
`error_response(request, error, version)`. `kcoord.server.api.api_table` imports them and turns a KafkaError of
`handle`, or of its future, into an error response.

`handle` runs in the event loop and must not block. It returns a response if nothing has to be waited for, else a
future. A plain future ends when the client is gone; a task (`Broker.spawn`) is completed. A handler changes state only
through operations of the coordinators' shards, of the metadata log and of the topic store. Their durability rules
decide when the response leaves.
"""
