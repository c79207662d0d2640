# SPDX-License-Identifier: Apache-2.0
"""Names in the product: one class has one name, so a search for it finds one class."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]

SHARED_NAMES = {
    "Group": "kcoord.testing shows a group to users; the coordinator's base class has Kafka's name",
    "Member": "kcoord.testing shows a member to users; an assignor of their own gets another view of one",
    "Record": "kcoord.testing shows a record to users; the codec's record has Kafka's name",
    "Producer": "kcoord.client offers it to users; in a coordinator's result it is Kafka's producer id and epoch",
}
"""Names that two classes may have, with the reason."""


CALLED_BY_NAME = {"CustomBuildHook", "__dir__", "__getattr__", "kcoord_broker_factory", "pytest_addoption"}
"""Names that hatch, Python and pytest look up."""


def _classes() -> dict[str, list[str]]:
    """Returns the places of all classes by name, nested classes too.

    The classes of kcoord_protocol.messages are generated from the schemas, so they are not in the source.
    """
    places: dict[str, list[str]] = defaultdict(list)
    for folder in ("kcoord", "protocol/kcoord_protocol"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    places[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    return places


def test_no_two_classes_have_one_name() -> None:
    twice = {name: places for name, places in _classes().items() if len(places) > 1}
    assert twice.keys() - SHARED_NAMES.keys() == set(), twice
    assert SHARED_NAMES.keys() - twice.keys() == set(), "these names are no longer shared"


def _module_level_names(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def test_no_name_of_a_module_is_unused() -> None:
    """A name counts as used if its word occurs anywhere else, so every name that this test reports is unused."""
    words: Counter[str] = Counter()
    defined: dict[str, str] = {}
    for folder in ("kcoord", "protocol", "tests", "bench", "docs", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            if path == Path(__file__):
                continue
            text = path.read_text()
            words.update(re.findall(r"\w+", text))
            if folder in ("kcoord", "protocol"):
                defined |= dict.fromkeys(_module_level_names(ast.parse(text)), str(path.relative_to(ROOT)))
    unused = {name: file for name, file in defined.items() if words[name] == 1}
    assert unused.keys() - CALLED_BY_NAME == set(), unused
