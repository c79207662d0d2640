# SPDX-License-Identifier: Apache-2.0
"""`python -m kcoord_protocol.vectors FILE.jsonl[.gz] ...`: checks the codec against messages of another implementation.

Each line has `name`, `version`, `hex` and `doc`. The bytes must decode to the document, and the message must encode to
the same bytes again. Messages of share groups and streams groups that have no schema here are counted and skipped,
because kcoord does not serve these groups.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kcoord_protocol.errors import ProtocolError
from kcoord_protocol.json_form import to_json
from kcoord_protocol.messages import message_class
from kcoord_protocol.schema import JsonObject, SchemaError

_RENAMED = {"TxnOffsetCommitRequest": {"generationId": "generationIdOrMemberEpoch"}}
"""Fields that Kafka 4.4 renamed without a change of their bytes; `schemas/` has the new names."""
_NOT_SERVED = ("Share", "Streams")


def read_vectors(path: Path) -> Iterator[JsonObject]:
    """Yield the lines of a vector file, with the field names of `schemas/`."""
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
        for line in lines:
            if line.strip():
                vector: JsonObject = json.loads(line)
                names = _RENAMED.get(str(vector["name"]), {})
                document = vector["doc"]
                if names and isinstance(document, dict):
                    vector["doc"] = {names.get(key, key): value for key, value in document.items()}
                yield vector


def is_skipped(name: str) -> bool:
    """Return whether the message is one of share or streams groups that has no schema."""
    if not name.startswith(_NOT_SERVED):
        return False
    try:
        message_class(name)
    except KeyError:
        return True
    return False


def check_vector(vector: JsonObject) -> str | None:
    """Return how the codec differs from a vector, None if it agrees."""
    name, version, document = str(vector["name"]), int(str(vector["version"])), vector["doc"]
    data = bytes.fromhex(str(vector["hex"]))
    try:
        message = message_class(name).decode(data, version)
        ours = to_json(message, version)
        encoded = message.encode(version)
    except KeyError:
        return "no schema"
    except (ProtocolError, SchemaError) as e:
        return f"{type(e).__name__}: {e}"
    if _comparable(ours) != _comparable(document):
        return f"decoded to {json.dumps(ours)}, expected {json.dumps(document)}"
    if encoded != data:
        return f"encoded to {encoded.hex()}, expected {data.hex()}"
    return None


def _comparable(value: Any) -> Any:
    """Return a form in which NaN (as a number, or as Jackson's text) equals NaN, and a bool differs from a number."""
    if isinstance(value, dict):
        return {key: _comparable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_comparable(item) for item in value]
    if isinstance(value, bool):
        return ("bool", value)
    if isinstance(value, float) and not (value == value and abs(value) != float("inf")):
        return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[str(value)]
    return value


def main(arguments: list[str]) -> int:
    """Check the files; print every failure and the totals of each file. Return 1 if a vector failed."""
    if not arguments:
        print("usage: python -m kcoord_protocol.vectors FILE.jsonl[.gz] ...", file=sys.stderr)
        return 2
    return max(_check_file(Path(argument)) for argument in arguments)


def _check_file(path: Path) -> int:
    passed = failed = skipped = 0
    for vector in read_vectors(path):
        if is_skipped(str(vector["name"])):
            skipped += 1
            continue
        problem = check_vector(vector)
        if problem is None:
            passed += 1
        else:
            failed += 1
            print(f"{vector['name']} v{vector['version']}: {problem}")
    unserved = f", {skipped} skipped (share and streams groups)" if skipped else ""
    print(f"{passed} passed, {failed} failed{unserved}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
