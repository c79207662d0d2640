# SPDX-License-Identifier: Apache-2.0
"""Names in the product: one class has one name, so a search for it finds one class."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]

SHARED_NAMES = {
    "Group": "kcoord.testing shows a group to users; the coordinator's base class has Kafka's name",
    "Record": "kcoord.testing shows a record to users; the codec's record has Kafka's name",
    "Member": "kcoord.testing shows a member to users; the model check has members of its own",
    "Producer": "kcoord.client offers it to users; in a coordinator's result it is Kafka's producer id and epoch",
}
"""Names that two classes may have, with the reason."""

NOT_YET_RENAMED = {
    *("Api", "Append", "Client", "Clock", "Connection", "Place", "Ready", "Request"),
    *("ShardState", "Subscription", "Worker"),
}


def _classes() -> dict[str, list[str]]:
    """Nested classes too; those of kcoord_protocol.messages are made from the schemas, not written."""
    places: dict[str, list[str]] = defaultdict(list)
    for folder in ("kcoord", "protocol/kcoord_protocol"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    places[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    return places


def test_no_two_classes_have_one_name() -> None:
    twice = {name: places for name, places in _classes().items() if len(places) > 1}
    assert twice.keys() - SHARED_NAMES.keys() - NOT_YET_RENAMED == set(), twice
    assert SHARED_NAMES.keys() - twice.keys() == set(), "no longer shared"
