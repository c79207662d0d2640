# SPDX-License-Identifier: Apache-2.0
"""Writes docs/reference/apis.md from the table of served versions. `--check` fails if the page differs."""

from __future__ import annotations

import sys
from pathlib import Path

from kcoord.server.api.served_versions import (
    FIRST_LISTED_VERSIONS,
    KAFKA_4_4_VERSIONS,
    KIP_1327_VERSIONS,
    SERVED_VERSIONS,
    UNSTABLE_VERSIONS,
)
from kcoord_protocol.api_keys import ApiKey

PAGE = Path(__file__).parent / "reference" / "apis.md"

HEAD = """\
# APIs and versions

For authors of clients. The APIs that a broker serves, and the versions that it accepts. `docs/make_apis.py` makes this
page from `kcoord/server/api/served_versions.py`, from which ApiVersions answers too.

| key | API | versions | notes |
|---|---|---|---|
"""


def main() -> int:
    """Writes or checks the page."""
    text = HEAD + "".join(_row(key, versions) for key, versions in sorted(SERVED_VERSIONS.items()))
    if "--check" in sys.argv[1:]:
        if PAGE.read_text() != text:
            print(f"{PAGE} is not what docs/make_apis.py makes: run `make generate`", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(text)
    return 0


def _row(key: ApiKey, versions: range) -> str:
    notes = []
    first_listed = FIRST_LISTED_VERSIONS.get(key, versions.start)
    if first_listed != versions.start:
        notes.append(f"ApiVersions lists versions from {first_listed} on")
    if key in KIP_1327_VERSIONS:
        notes.append(f"version {KIP_1327_VERSIONS[key]} is of KIP-1327")
    if key in KAFKA_4_4_VERSIONS:
        notes.append(f"version {KAFKA_4_4_VERSIONS[key]} is not served with `kcoord.release=4.3`")
    if key in UNSTABLE_VERSIONS:
        notes.append(f"version {UNSTABLE_VERSIONS[key]} is served with `unstable.api.versions.enable=true` only")
    name = "".join(part.capitalize() for part in key.name.split("_"))
    span = f"{versions.start}" if len(versions) == 1 else f"{versions.start} to {versions.stop - 1}"
    return f"| {int(key)} | {name} | {span} | {'; '.join(notes)} |\n"


if __name__ == "__main__":
    sys.exit(main())
