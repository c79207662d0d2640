# SPDX-License-Identifier: Apache-2.0
"""One module per API: API_KEY, VERSIONS, handle() and error_response(). `kcoord.server.api.api_table` collects
them into a table.
"""
