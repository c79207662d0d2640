# SPDX-License-Identifier: Apache-2.0
"""Names in transcripts for ids that a broker makes: member ids, producer ids and topic ids.

* The first member id that client A gets is `A-1`, its second is `A-2`. Member ids of a static member begin with its
  instance id.
* Producer ids are `P1`, `P2` and so on, in the order of their first appearance.
* A topic id is the name of the topic. If a topic of that name was created again, the new id is `foo#2`.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Final

_GENERATED_MEMBER_ID: Final = re.compile(r"(?:(.+?)-)?([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|[\w-]{22})")
NO_TOPIC_ID: Final = bytes(16)


class Names:
    """The names of one transcript. If several files share a stage, `prefix` begins each group and transactional id."""

    def __init__(self, prefix: str = "") -> None:
        self.prefix = prefix
        self._members: dict[str, str] = {}
        self._producers: dict[int, str] = {}
        self._topics: dict[bytes, str] = {}
        self._made: Counter[str] = Counter()

    # Topics.

    def add_topic(self, name: str, topic_id: bytes) -> None:
        if topic_id not in self._topics:
            self._made[f"topic {name}"] += 1
            number = self._made[f"topic {name}"]
            self._topics[topic_id] = name if number == 1 else f"{name}#{number}"

    def topic(self, topic_id: bytes) -> str:
        return self._topics.get(topic_id, topic_id.hex())

    def topic_id(self, name: str) -> bytes:
        """Returns the id of a topic, also of a deleted topic. If there was no topic of that name, it makes up an id."""
        for topic_id, shown in reversed(self._topics.items()):
            if name in (shown, shown.partition("#")[0]):
                return topic_id
        return name.encode().rjust(16, b"?")[:16]

    # Members.

    def learn_member(self, member_id: str, owner: str = "") -> None:
        """Names a member id that a broker made after the client or instance that owns it, or else after its prefix."""
        match = _GENERATED_MEMBER_ID.fullmatch(member_id)
        if member_id in self._members or match is None:
            return
        stem = owner or match[1] or "made"
        self._made[f"member {stem}"] += 1
        self._members[member_id] = f"{stem}-{self._made[f'member {stem}']}"

    def member_id(self, name: str) -> str:
        return next((member_id for member_id, shown in self._members.items() if shown == name), name)

    # Producers.

    def learn_producer(self, producer_id: int) -> None:
        if producer_id >= 0 and producer_id not in self._producers:
            self._producers[producer_id] = f"P{len(self._producers) + 1}"

    def producer(self, producer_id: int) -> str:
        return self._producers.get(producer_id, str(producer_id))

    def producer_id(self, name: str) -> int:
        """Returns the id of a name such as P1. A plain number stands for an id that no producer has."""
        for number, shown in self._producers.items():
            if shown == name:
                return number
        return int(name)

    def shown(self, text: str) -> str:
        """Returns a text of the broker with ids replaced by their names."""
        for member_id, name in self._members.items():
            if member_id in text:
                text = text.replace(member_id, name)
        return text.replace(self.prefix, "") if self.prefix else text
