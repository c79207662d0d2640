# SPDX-License-Identifier: Apache-2.0
"""A model of an operator that deletes groups and offsets, and describes and lists groups."""

from __future__ import annotations

from random import Random

from kcoord.simulation.client import Scene, SimulatedClient
from kcoord.simulation.topics import FIRST_TOPIC, LATER_TOPIC
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors
from kcoord_protocol.messages import (
    ConsumerGroupDescribeRequest,
    DeleteGroupsRequest,
    DeleteGroupsResponse,
    ListGroupsRequest,
    Message,
    OffsetDeleteRequest,
    OffsetDeleteResponse,
)


class Admin(SimulatedClient):
    """Sends one request at a time, also for groups in use: the broker has to reject those deletions."""

    def __init__(self, scene: Scene) -> None:
        super().__init__("admin", scene)
        self._trace = scene.trace

    def on_timeout(self) -> None:
        """Does nothing: the next disturbance sends another request."""

    def act(self, random: Random, group_ids: list[str]) -> None:
        """Sends a random request about a random group, unless a request is under way."""
        if self.is_waiting:
            return
        group_id = random.choice(group_ids)
        match random.choice(("delete-group", "delete-offsets", "delete-offsets", "describe", "list")):
            case "delete-group":
                self._delete_group(group_id)
            case "delete-offsets":
                self._delete_offsets(group_id, random.choice((FIRST_TOPIC, LATER_TOPIC)))
            case "describe":
                request = ConsumerGroupDescribeRequest(group_ids=[group_id])
                self._ask(ApiKey.CONSUMER_GROUP_DESCRIBE, 1, group_id, request)
            case _:
                self._ask(ApiKey.LIST_GROUPS, 5, group_id, ListGroupsRequest(states_filter=[], types_filter=[]))

    def _ask(self, api_key: ApiKey, version: int, group_id: str, message: Message) -> None:
        self.request(api_key, version, group_id, message, lambda body: None)

    def _delete_group(self, group_id: str) -> None:
        def on_answer(body: bytes) -> None:
            error = DeleteGroupsResponse.decode(body, 2).results[0].error_code
            self._trace.add("delete-group", f"{group_id} {Errors(error).name}")

        self.request(ApiKey.DELETE_GROUPS, 2, group_id, DeleteGroupsRequest(groups_names=[group_id]), on_answer)

    def _delete_offsets(self, group_id: str, topic_name: str) -> None:
        partitions = [OffsetDeleteRequest.OffsetDeleteRequestPartition(partition_index=number) for number in range(2)]
        deleted = OffsetDeleteRequest.OffsetDeleteRequestTopic(name=topic_name, partitions=partitions)

        def on_answer(body: bytes) -> None:
            response = OffsetDeleteResponse.decode(body, 0)
            errors = {partition.error_code for topic in response.topics for partition in topic.partitions}
            self._trace.add("delete-offsets", f"{group_id} {sorted(errors | {response.error_code})}")

        request = OffsetDeleteRequest(group_id=group_id, topics=[deleted])
        self.request(ApiKey.OFFSET_DELETE, 0, group_id, request, on_answer)
