# SPDX-License-Identifier: Apache-2.0
"""Which version of an API to use with a broker: the highest that it, we and the caller have. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kcoord.client.errors import UnsupportedVersionException
from protocol.api_keys import ApiKey
from protocol.message import Message
from protocol.messages import ApiVersionsResponse

TRANSACTION_VERSION: Final = "transaction.version"

# Versions that have a schema here and that no broker serves to clients: AddPartitionsToTxn from v4 is between brokers,
# and InitProducerId v6 is for two-phase commits (KIP-939), which this client does not offer.
_HIGHEST: Final[Mapping[int, int]] = {ApiKey.ADD_PARTITIONS_TO_TXN: 3, ApiKey.INIT_PRODUCER_ID: 5}


class ApiVersions:
    """What one broker offers."""

    __slots__ = ("_ranges", "features")

    def __init__(self, ranges: Mapping[int, tuple[int, int]], features: Mapping[str, int] | None = None) -> None:
        self._ranges = dict(ranges)
        self.features = dict(features or {})

    @classmethod
    def from_response(cls, response: ApiVersionsResponse) -> ApiVersions:
        return cls(
            {api.api_key: (api.min_version, api.max_version) for api in response.api_keys},
            {feature.name: feature.max_version_level for feature in response.finalized_features},
        )

    def offers(self, api_key: int, version: int = 0) -> bool:
        """Whether the broker has the API in `version` or a later one."""
        return api_key in self._ranges and self._ranges[api_key][1] >= version

    def choose(self, request: type[Message], lowest: int = 0, highest: int | None = None) -> int:
        """The highest common version; `lowest` and `highest` are what the caller can do with."""
        key, ours = request.api_key, request.valid_versions
        if key not in self._ranges:
            raise UnsupportedVersionException(f"the broker has no {request.message_name}")
        their_lowest, their_highest = self._ranges[key]
        low = max(lowest, ours.start, their_lowest)
        high = min(ours.stop - 1, their_highest, _HIGHEST.get(key, their_highest))
        if highest is not None:
            high = min(high, highest)
        if low > high:
            wanted = f"{max(lowest, ours.start)} to {ours.stop - 1 if highest is None else highest}"
            raise UnsupportedVersionException(
                f"{request.message_name}: wanted is version {wanted}, the broker has {their_lowest} to {their_highest}"
            )
        return high
