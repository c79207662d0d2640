# SPDX-License-Identifier: Apache-2.0
"""Prints responses and records as the lines of a transcript.

Every field that is neither null nor its default is printed by its name. A struct is one line of `field: value`. Each
struct in a list is an indented line below it. Values have these forms:

* partitions: `foo:0-3,5;bar:0`
* error codes: their names
* ids that a broker made: the names of `names`
* moments: milliseconds after the start of the transcript, `+45000`
* embedded messages of the classic protocol: `subscription v1 [foo]`, `assignment v3 foo:0-2`
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

from kcoord.coordinator.group.classic import consumer_protocol
from kcoord.coordinator.group.consumer.group import MemberState
from kcoord.coordinator.group.records import EMPTY_SINCE_TAG, EPOCH_REASON_TAG
from kcoord.runtime.result import CoordinatorRecord
from kcoord_protocol.errors import Errors
from kcoord_protocol.messages import ControlRecordTypeSchema, Message
from kcoord_protocol.schema import FieldSchema
from tests.transcripts.names import NO_TOPIC_ID, Names

INDENT: Final = "  "
_FIRST_MOMENT: Final = 1_500_000_000_000
"""Larger numbers are printed as moments: they are milliseconds since 1970."""
_OWN_TAGS: Final = {EPOCH_REASON_TAG: "epochReason", EMPTY_SINCE_TAG: "emptySince"}
_HIDDEN: Final = frozenset({"throttleTimeMs"})
_SORTED_BY: Final = ("memberId", "groupId", "transactionalId", "name", "topic", "topicName", "partitionIndex")
"""Lists of structs are sorted by the first of these fields that they have, since clients ignore their order."""
_PRODUCER_IDS: Final = ("producerId", "previousProducerId", "nextProducerId")
_NUMBERS_OF_PARTITIONS: Final = ("partitions", "partitionIndexes")
_STATES_OF_TRANSACTIONS: Final = {
    0: "Empty",
    1: "Ongoing",
    2: "PrepareCommit",
    3: "PrepareAbort",
    4: "CompleteCommit",
    5: "CompleteAbort",
    6: "Dead",
    7: "PrepareEpochFence",
}


@dataclass(slots=True)
class Printer:
    """Prints the responses and records of one transcript."""

    names: Names
    start_ms: int

    # Responses.

    def response(self, message: Message) -> list[str]:
        """Returns the lines of a response."""
        lines = self._struct(message)
        return lines if any(lines) else ["ok"]

    # Records.

    def records(self, records: Iterable[CoordinatorRecord]) -> list[str]:
        """Returns one line per record. The records of a group are together, in the order in which they were written."""
        texts = [self._record(record) for record in sorted(records, key=_owner_of)]
        return [f"record {text}" for text in texts]

    def _record(self, record: CoordinatorRecord) -> str:
        producer = record.producer
        inside = f"[{self.names.producer(producer[0])}/{producer[1]}] " if producer is not None else ""
        if isinstance(record.key, ControlRecordTypeSchema):
            outcome = {0: "abort", 1: "commit"}[record.key.type]
            return f"{inside}marker: {outcome}"
        assert record.key is not None
        values = [getattr(record.key, field.attribute) for field in record.key.schema.fields]
        subject = " ".join([type(record.key).__name__.removesuffix("Key"), *(self._text(str(v)) for v in values)])
        if record.value is None:
            return f"{inside}{subject}: tombstone" + (f" ({record.reason})" if record.reason else "")
        version = f" v{record.value_version}" if record.value_version else ""
        lines = self._struct(record.value)
        return f"{inside}{subject}{version}: " + "  ".join(line.strip() for line in lines if line)

    # Structs.

    def _struct(self, struct: Any) -> list[str]:
        scalars, nested = [], []
        for field in struct.schema.fields:
            value = getattr(struct, field.attribute)
            if field.json_name in _HIDDEN or _is_default(field, value):
                continue
            shown = self._shown(field, value)
            if shown is not None:
                scalars.append(f"{field.json_name}: {shown}")
            else:
                nested.append((field, value))
        for tag, data in struct.unknown_tagged_fields:
            name = _OWN_TAGS.get(tag, str(tag))
            scalars.append(f"{name}: {self._tag(tag, data)}")
        lines = ["  ".join(scalars)]
        for field, value in nested:
            lines += self._nested(field.json_name, value)
        return lines if scalars else lines[1:]

    def _tag(self, tag: int, data: bytes) -> str:
        return data.decode() if tag == EPOCH_REASON_TAG else self._number(int.from_bytes(data, "big"))

    def _nested(self, name: str, value: Any) -> list[str]:
        structs = value if isinstance(value, list) else [value]
        lines = []
        for first, *rest in sorted((self._struct(struct) or ["-"] for struct in structs), key=_place):
            lines.append(f"{INDENT}{name} {first}".rstrip())
            lines += [INDENT + line for line in rest]
        return lines

    def _shown(self, field: FieldSchema, value: Any) -> str | None:
        """Returns the value as a word or a list, or None for structs that need lines of their own."""
        if field.json_name in ("errorCode", "partitionErrorCode"):
            return Errors(value).name
        if field.is_array and field.struct is None:
            if field.json_name == "subscribedTopicNames":
                value = sorted(value)
            return f"[{', '.join(self._item(field, item) for item in value)}]"
        if field.struct is None:
            return self._item(field, value)
        if not field.is_array:
            (inner, *more) = field.struct.fields
            if any(field.tag is None or not _is_default(field, getattr(value, field.attribute)) for field in more):
                return None
            return self._shown(inner, getattr(value, inner.attribute))
        return self._topic_partitions(value)

    def _item(self, field: FieldSchema, value: Any) -> str:
        if value is None:
            return "null"
        if field.element_type in ("bytes", "records"):
            return self._bytes(value)
        if field.element_type == "uuid":
            return self.names.topic(value)
        if field.json_name in _PRODUCER_IDS and value >= 0:
            self.names.learn_producer(value)
            return self.names.producer(value)
        if field.json_name == "transactionStatus":
            return _STATES_OF_TRANSACTIONS[value]
        if field.json_name in ("metadataHash", "version"):
            # They depend on topic ids and on the length of the metadata log.
            return "..."
        if field.json_name == "state" and isinstance(value, int):
            return MemberState(value).name
        if field.json_name in ("memberId", "leader"):
            self.names.learn_member(value)
        if isinstance(value, bool):
            return str(value).lower()
        return self._number(value) if isinstance(value, int) else self._text(value)

    def _number(self, value: int) -> str:
        return f"{value - self.start_ms:+}" if value >= _FIRST_MOMENT else str(value)

    def _text(self, value: str) -> str:
        shown = self.names.shown(value)
        return f'"{shown}"' if not shown or " " in shown or "\n" in shown else shown

    def _bytes(self, data: bytes) -> str:
        """Returns a subscription or an assignment of the classic protocol as text, other bytes in hexadecimal."""
        if not data:
            return "none"
        assignment = _whole_assignment(data)
        if assignment is not None:
            return f"assignment v{data[1]} {assignment}"
        subscription = consumer_protocol.read_subscription(data)
        if subscription is None:
            return data.hex()
        owned = {topic.topic: topic.partitions for topic in subscription.owned_partitions}
        shown = f"subscription v{data[1]} [{', '.join(subscription.topics)}]"
        return f"{shown} owned {show_partitions(owned)}" if owned else shown

    def _topic_partitions(self, structs: Sequence[Any]) -> str | None:
        """Returns partitions of topics on one line, or None if the structs have other fields."""
        if not structs:
            return "none"
        names = {field.json_name for field in structs[0].schema.fields}
        if not names <= {"topicId", "topicName", "topic", "name", "assignmentEpochs", *_NUMBERS_OF_PARTITIONS}:
            return None
        parts = []
        for struct in structs:
            values = {field.json_name: getattr(struct, field.attribute) for field in struct.schema.fields}
            topic = next((values[key] for key in ("topicName", "topic", "name") if values.get(key)), None)
            if topic is None:
                topic = self.names.topic(values.get("topicId", NO_TOPIC_ID))
            numbers = next(values[key] for key in _NUMBERS_OF_PARTITIONS if key in values)
            if not all(isinstance(number, int) for number in numbers):
                return None
            epochs = values.get("assignmentEpochs")
            parts.append((self.names.shown(topic), numbers, epochs))
        return ";".join(
            show_partitions({topic: numbers}) + _show_epochs(epochs)
            for topic, numbers, epochs in sorted(parts, key=lambda part: part[0])
        )


def show_partitions(topics: dict[str, list[int]]) -> str:
    """Returns partitions in the notation that `requests.parse_partitions` reads."""
    return ";".join(f"{topic}:{_spans(partitions)}" for topic, partitions in topics.items()) or "none"


def _spans(numbers: Iterable[int]) -> str:
    runs = groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0])
    ends = [(run[0][1], run[-1][1]) for run in (list(run) for _, run in runs)]
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ends)


def _show_epochs(epochs: list[int] | None) -> str:
    if epochs is None:
        return ""
    return f"@{epochs[0]}" if len(set(epochs)) == 1 else f"@{epochs}"


def _whole_assignment(data: bytes) -> str | None:
    """Returns the partitions if the bytes are exactly one assignment, otherwise None.

    Only a few subscriptions could be read as an assignment, too.
    """
    assignment = consumer_protocol.read_assignment(data)
    version = consumer_protocol.read_version(data)
    if (
        assignment is None
        or version is None
        or consumer_protocol.write_assignment(
            {topic.topic: topic.partitions for topic in assignment.assigned_partitions}, version
        )
        != data
    ):
        return None
    return show_partitions({topic.topic: topic.partitions for topic in assignment.assigned_partitions})


def _is_default(field: FieldSchema, value: Any) -> bool:
    if value is None or field.default_is_null:
        return value is None
    if field.is_array:
        return not value and field.json_name != "topicPartitions"
    return not field.is_struct and bool(value == field.default) and field.json_name not in _SORTED_BY


def _place(lines: list[str]) -> tuple[str, ...]:
    """Returns the key by which the structs of a list are sorted: the first identifying field, numbers by value."""
    words = dict(part.split(": ", 1) for part in lines[0].split("  ") if ": " in part)
    for name in _SORTED_BY:
        if name in words:
            return name, words[name].rjust(10) if words[name].isdigit() else words[name]
    return ()


def _owner_of(record: CoordinatorRecord) -> str:
    """Returns the group id or transactional id of a record."""
    for name in ("group_id", "group", "transactional_id"):
        owner = getattr(record.key, name, None)
        if owner is not None:
            return str(owner)
    return ""
