# SPDX-License-Identifier: Apache-2.0
"""The schema files: complete, uniform, and with Kafka's layouts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.shared import shared

ROOT = Path(__file__).resolve().parents[2]
SCHEMAS = ROOT / "schemas"
EXTENSIONS = sorted(SCHEMAS.glob("extensions/*.json"))
FILES = sorted(set(SCHEMAS.glob("*/*.json")) - set(EXTENSIONS))
OWN_NAMES = (
    "PrepareAssignment",
    "InstallAssignment",
    "GroupImport",
    "ImportGroups",
    "UpstreamMember",
    "UpstreamAssignment",
    "Shared",
)
OWN = [path for path in FILES if any(name in path.name for name in OWN_NAMES)]
"""The files of messages that Kafka lacks."""
FOLDERS = {
    "requests": {"request"},
    "responses": {"response"},
    "headers": {"header"},
    "coordinator_records": {"coordinator-key", "coordinator-value"},
    "metadata_records": {"metadata"},
    "data": {"data"},
}
MESSAGE_KEYS = [
    "apiKey", "type", "listeners", "name", "validVersions", "flexibleVersions", "latestVersionUnstable",
    "about", "fields", "commonStructs",
]  # fmt: skip
FIELD_KEYS = [
    "name", "type", "versions", "nullableVersions", "taggedVersions", "tag", "default", "ignorable", "mapKey",
    "entityType", "flexibleVersions", "sensitive", "about", "fields",
]  # fmt: skip

Schema = dict[str, Any]


def load(path: Path) -> Schema:
    schema: Schema = json.loads(path.read_text("utf-8"))
    return schema


def all_fields(struct: Schema) -> Iterator[Schema]:
    for field in struct.get("fields", []):
        yield field
        yield from all_fields(field)
    for inner in (*struct.get("commonStructs", []), *struct.get("structs", [])):
        yield from all_fields(inner)


def field_at(name: str, *path: str) -> tuple[Schema, list[str]]:
    """Return the field at the end of the path, and the names of its siblings in wire order."""
    struct = load(next(path for path in FILES if path.stem == name))
    for step in path:
        siblings = [field["name"] for field in struct["fields"]]
        struct = struct["fields"][siblings.index(step)]
    return struct, siblings


def in_order(keys: Schema, order: list[str]) -> bool:
    return list(keys) == [key for key in order if key in keys]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_file_is_uniform_and_describes_its_fields(path: Path) -> None:
    schema = load(path)
    assert schema["name"] == path.stem
    assert schema["type"] in FOLDERS[path.parent.name]
    assert in_order(schema, MESSAGE_KEYS)
    assert "\t" not in path.read_text("utf-8")
    assert path.read_text("utf-8").endswith("}\n")
    fields = list(all_fields(schema))
    for field in fields:
        assert in_order(field, FIELD_KEYS), field["name"]
        assert ("tag" in field) == ("taggedVersions" in field)
    for item in [schema, *schema.get("commonStructs", []), *fields]:
        assert item["about"][0].isupper() or item["about"][0].isdigit() or item["about"][0] == "-", item["name"]
        assert item["about"].endswith("."), item["name"]
        assert 12 <= len(item["about"]) <= 200, item["name"]


@pytest.mark.parametrize("path", EXTENSIONS, ids=lambda path: path.stem)
def test_every_extension_adds_tagged_fields_far_above_those_of_kafka(path: Path) -> None:
    extension = load(path)
    message = load(next(file for file in FILES if file.name == path.name))
    assert list(extension) == ["extends", "about", "structs"]
    assert extension["extends"] == path.stem
    first_tag = 1010 if message["type"] == "coordinator-value" else 10000
    for struct in extension["structs"]:
        assert [field["tag"] for field in struct["fields"]] == list(range(first_tag, first_tag + len(struct["fields"])))
    for field in all_fields(extension):
        assert in_order(field, FIELD_KEYS), field["name"]
        assert field["about"].endswith("."), field["name"]


def test_requests_and_responses_have_the_same_versions() -> None:
    for path in SCHEMAS.glob("requests/*.json"):
        request = load(path)
        response = load(SCHEMAS / "responses" / path.name.replace("Request", "Response"))
        for key in ("apiKey", "validVersions", "flexibleVersions"):
            assert request[key] == response[key], path.stem


@pytest.mark.parametrize(
    ("name", "versions"),
    [
        ("ConsumerGroupHeartbeat", "0-2"),
        ("ConsumerGroupDescribe", "0-2"),
        ("Metadata", "0-14"),
        ("DescribeTopicPartitions", "0-1"),
    ],
)
def test_versions_of_kip_1327(name: str, versions: str) -> None:
    assert load(SCHEMAS / "responses" / f"{name}Response.json")["validVersions"] == versions


def test_fields_of_kip_1327() -> None:
    unknown = {"type": "int64", "default": "-1", "ignorable": True}
    heartbeat, siblings = field_at("ConsumerGroupHeartbeatResponse", "GroupCreationTimeMs")
    assert heartbeat.items() >= {"versions": "2+", **unknown}.items()
    assert siblings[-3:] == ["HeartbeatIntervalMs", "GroupCreationTimeMs", "Assignment"]
    described, siblings = field_at("ConsumerGroupDescribeResponse", "Groups", "GroupCreationTimeMs")
    assert described.items() >= {"versions": "2+", **unknown}.items()
    assert siblings[-3:] == ["Members", "GroupCreationTimeMs", "AuthorizedOperations"]
    for name, path, since, tag in [
        ("MetadataResponse", ["Topics", "Partitions"], "14+", 0),
        ("DescribeTopicPartitionsResponse", ["Topics", "Partitions"], "1+", 0),
        ("PartitionRecord", [], "0+", 3),
        ("ConsumerGroupMetadataValue", [], "0+", 1),
    ]:
        field, _ = field_at(name, *path, "CreationTimeMs")
        assert field.items() >= {"versions": since, "taggedVersions": since, "tag": tag, **unknown}.items()


def test_first_versions_of_offset_commit() -> None:
    partition, _ = field_at("OffsetCommitRequest", "Topics", "Partitions")
    first, second = ([field["name"] for field in partition["fields"] if covers(field, v)] for v in (0, 1))
    assert first == ["PartitionIndex", "CommittedOffset", "CommittedMetadata"]
    assert second == ["PartitionIndex", "CommittedOffset", "CommitTimestamp", "CommittedMetadata"]
    fields = load(SCHEMAS / "requests" / "OffsetCommitRequest.json")["fields"]
    assert [field["name"] for field in fields if covers(field, 0)] == ["GroupId", "Topics"]


def covers(field: Schema, version: int) -> bool:
    low, _, high = field["versions"].rstrip("+").partition("-")
    return int(low) <= version <= (99 if field["versions"].endswith("+") else int(high or low))


def test_layouts_are_kafkas() -> None:
    """This test is skipped if the facts about Kafka's layouts are absent."""
    checker, facts = shared("tools", "check_schemas.py"), shared("kafka-facts-4.4.0", "apis.tsv").parent
    result = subprocess.run([sys.executable, checker, SCHEMAS, facts], capture_output=True, text=True, check=False)
    assert result.stdout.splitlines()[-1] == f"{len(FILES) - len(OWN)} same, 0 different", result.stdout
