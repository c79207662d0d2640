# SPDX-License-Identifier: Apache-2.0
"""Chooses the version of an API for a broker: the highest that the broker, the client and the caller support. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

from kcoord.client.errors import UnsupportedVersionException
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.message import Message
from kcoord_protocol.messages import ApiVersionsResponse

TRANSACTION_VERSION: Final = "transaction.version"

# The codec has schemas of versions that this client must not use. AddPartitionsToTxn from v4 on is for requests between
# brokers. InitProducerId v6 is for two-phase commits (KIP-939), which this client does not have.
_HIGHEST: Final[dict[int, int]] = {ApiKey.ADD_PARTITIONS_TO_TXN: 3, ApiKey.INIT_PRODUCER_ID: 5}

Kip1327Revision = Literal["off", "creation-time", "new-partitions"]

# The highest versions without KIP-1327. The later revision of the KIP adds a heartbeat v2 and nothing else.
_WITHOUT_KIP_1327: Final[dict[int, int]] = {
    ApiKey.METADATA: 13,
    ApiKey.CONSUMER_GROUP_HEARTBEAT: 1,
    ApiKey.CONSUMER_GROUP_DESCRIBE: 1,
    ApiKey.DESCRIBE_TOPIC_PARTITIONS: 0,
}
_HIGHEST_BY_REVISION: Final[Mapping[Kip1327Revision, Mapping[int, int]]] = {
    "off": _HIGHEST | _WITHOUT_KIP_1327,
    "creation-time": _HIGHEST,
    "new-partitions": _HIGHEST | _WITHOUT_KIP_1327 | {ApiKey.CONSUMER_GROUP_HEARTBEAT: 2},
}


class ApiVersions:
    """The API versions of one broker, for a client that uses the given revision of KIP-1327."""

    __slots__ = ("_highest", "_ranges", "features")

    def __init__(
        self,
        ranges: Mapping[int, tuple[int, int]],
        features: Mapping[str, int] | None = None,
        revision: Kip1327Revision = "creation-time",
    ) -> None:
        self._ranges = dict(ranges)
        self._highest = _HIGHEST_BY_REVISION[revision]
        self.features = dict(features or {})

    @classmethod
    def from_response(cls, response: ApiVersionsResponse, revision: Kip1327Revision = "creation-time") -> ApiVersions:
        """Takes the ranges and the finalized features of an ApiVersions response."""
        return cls(
            {api.api_key: (api.min_version, api.max_version) for api in response.api_keys},
            {feature.name: feature.max_version_level for feature in response.finalized_features},
            revision,
        )

    def offers(self, api_key: int, version: int = 0) -> bool:
        """Whether the broker has the API in `version` or a later version."""
        return api_key in self._ranges and self._ranges[api_key][1] >= version

    def range_of(self, api_key: int) -> tuple[int, int] | None:
        """Returns the lowest and the highest version that the broker has; None if it does not have the API."""
        return self._ranges.get(api_key)

    def choose(self, request: type[Message], lowest: int = 0, highest: int | None = None) -> int:
        """Returns the highest common version within the caller's `lowest` and `highest`.

        Raises UnsupportedVersionException if there is none.
        """
        key, ours = request.api_key, request.valid_versions
        if key not in self._ranges:
            raise UnsupportedVersionException(f"the broker does not support {request.message_name}")
        their_lowest, their_highest = self._ranges[key]
        low = max(lowest, ours.start, their_lowest)
        high = min(ours.stop - 1, their_highest, self._highest.get(key, their_highest))
        if highest is not None:
            high = min(high, highest)
        if low > high:
            usable = f"{max(lowest, ours.start)} to {ours.stop - 1 if highest is None else highest}"
            raise UnsupportedVersionException(
                f"{request.message_name}: the client needs version {usable}, the broker has {their_lowest} to "
                f"{their_highest}"
            )
        return high
