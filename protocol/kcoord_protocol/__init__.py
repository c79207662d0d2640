# SPDX-License-Identifier: Apache-2.0
"""Kafka's wire protocol: bytes to typed messages and back.

The package is stateless, reads no files but its own schemas, and does not depend on the broker. It is safe to use in
several threads. The message classes are in `kcoord_protocol.messages`.

From schema to bytes: `schema` reads the JSON files, `messages` makes one class per message from them, and `message`
compiles a decoder and an encoder per version on first use (`decoder_source`, `encoder_source`). If compiled code fails,
`reference` reads or writes the message again, slowly, and finds the field that is wrong.
"""
