# SPDX-License-Identifier: Apache-2.0
"""Sets the client quotas of a broker."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from kcoord.client import AdminClient, ClientQuotaEntity


def alter_quota(address: str, entity: Mapping[str, str | None], **values: float | None) -> None:
    """Sets the quotas of an entity, and removes those that are None. `entity`: names by type, None for a default."""
    described: dict[ClientQuotaEntity, dict[str, float]] = {}

    async def alter() -> None:
        async with AdminClient(bootstrap_servers=address) as admin:
            (await admin.alter_client_quotas({ClientQuotaEntity.of(entity): values})).all()
            described.update(await admin.describe_client_quotas())

    asyncio.run(alter())
    kept = {key: value for key, value in values.items() if value is not None}
    assert described.get(ClientQuotaEntity.of(entity), {}) == kept
